"""What happens on a user's device before the backend serves: a comparison with gather, kept; gather if it fails."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import greedy, prompt, shared

import tinykv_plugin as tinykv
from metal_device import install
from metal_faults import Replace
from msl_cpu import build
from msl_cpu.device import Device
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.selftest import trial
from tinykv_plugin.selftest.comparison import compare
from tinykv_plugin.selftest.outcomes import Outcome, Outcomes

REQUEST = AttentionRequest(4, 2, 16, 16, mx.float32, 8, 1, "none", None, 0, False)
KINDS = [
    {},
    {"query_len": 3, "mask": "causal"},
    {"window": 24},
    {"window": 40, "keep": 4, "sinks": True},
    {"mask": "array"},
    {"dtype": mx.bfloat16},
]


def attached(plugins: Any) -> Any:
    return tinykv.attach(shared("llama", num_hidden_layers=2), plugins=plugins, attention="metal", page_size=8)


@pytest.mark.parametrize("changes", KINDS)
def test_the_kernels_pass(backend: Any, changes: dict[str, Any]) -> None:
    comparison = compare(backend, GatherBackend(), dataclasses.replace(REQUEST, **changes))
    assert comparison.problem == ""
    assert comparison.error <= comparison.allowed


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (Replace("attend", "? scale * float(", "? float("), "its result differs from gather's by "),
        (
            Replace("write", "kv_heads, page_size, value_dim", "kv_heads, page_size, 0"),
            "its result differs from gather's by ",
        ),
        (Replace("copy", "value_pages[source", "value_pages[target"), "its result differs from gather's by "),
        (Replace("attend", "const int lane", "const in lane"), "it fails: RuntimeError: "),
    ],
)
def test_broken_kernels_are_found_out(change: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_metal.backend import MetalBackend

    if build.problem():
        pytest.skip(build.problem())
    install(Device(change=change), monkeypatch)
    assert compare(MetalBackend(), GatherBackend(), REQUEST).problem.startswith(problem)


@pytest.mark.selftest
def test_gather_serves_instead_of_a_broken_kernel(
    plugins: Any, device: Any, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    if device is None:
        pytest.skip("kernels are broken where they run on a CPU")
    device.change = Replace("attend", "? scale * float(", "? float(")
    model = shared("llama", num_hidden_layers=2)
    right = greedy(model, prompt(12), 6)
    with caplog.at_level(logging.WARNING, "tinykv"), attached(plugins) as kv:
        assert greedy(model, prompt(12), 6) == right
        for line in kv.plan:
            assert (line.attention, line.backend) == ("gather", "gather")
            assert "metal: it failed its self-test on this device: its result differs" in line.reason
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "`tinykv selftest` shows more" in warning
    assert not Outcomes().path.exists(), "a failure isn't kept"


@pytest.mark.selftest
def test_a_passed_test_is_kept(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = GatherBackend()
    assert trial.try_out(backend, gather, REQUEST) == trial.Trial()
    trial.forget()
    monkeypatch.setattr(trial, "compare", lambda *_: pytest.fail("it was compared before"))
    assert trial.try_out(backend, gather, REQUEST) == trial.Trial()
    with pytest.raises(pytest.fail.Exception):
        trial.try_out(backend, gather, dataclasses.replace(REQUEST, query_len=2))
    monkeypatch.setattr(type(backend), "selftest_key", lambda self: "another device")
    with pytest.raises(pytest.fail.Exception):
        trial.try_out(backend, gather, REQUEST)


@pytest.mark.selftest
def test_short_contexts_are_gathered_where_that_was_faster(backend: Any, plugins: Any, device: Any) -> None:
    if device is None:
        pytest.skip("launches are counted where kernels run on a CPU")
    model = shared("llama", num_hidden_layers=2)
    request = dataclasses.replace(REQUEST, mask="none")
    Outcomes().record(backend.selftest_key(), request, Outcome(gather_below=20, gather_below_batch=0))
    right = greedy(model, prompt(12), 20)
    with attached(plugins) as kv:
        assert kv.plan[0].reason.startswith("gathered below 20 tokens (a batch: 0)")
        device.keep_launches = True
        assert greedy(model, prompt(12), 20) == right
    kernels = [launch.kernel.removeprefix("tinykv_") for launch in device.launches]
    first = kernels.index("attend")
    # Two layers, once for the prompt and for the contexts from 12 to 19.
    assert kernels[:first].count("gather") == 2 * 9
    assert "gather" not in kernels[first:]


def test_files_that_cannot_be_read_are_as_if_empty(tmp_path: Path) -> None:
    for text in ("", "[1]", '{"key": 3}', '{"key": {"4/2 heads": 1}}', "\udcff"):
        path = tmp_path / "selftest.json"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        outcomes = Outcomes(path)
        assert outcomes.find("key", REQUEST) is None
        outcomes.record("key", REQUEST, Outcome(3, 4))
        assert outcomes.find("key", REQUEST) == Outcome(3, 4)
        outcomes.record("key", REQUEST, None)
        assert outcomes.find("key", REQUEST) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcomes = Outcomes(tmp_path / "file" / "selftest.json")
    outcomes.record("key", REQUEST, Outcome())
    assert outcomes.find("key", REQUEST) is None
