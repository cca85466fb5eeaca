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
from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.selftest import trial
from tinykv_plugin.selftest.comparison import compare
from tinykv_plugin.selftest.outcomes import Outcome, Outcomes

REQUEST = AttentionRequest(4, 2, 16, 16, mx.float32, 8, 1, "none", None, 0, False)
KINDS = [
    {},
    {"query_len": 3, "mask": "causal", "window": 24, "softcap": 30.0, "dtype": mx.bfloat16},
    {"window": 40, "keep": 4, "sinks": True},
    {"mask": "array", "value_dim": 32},
]


def attached(plugins: Any) -> Any:
    return tinykv.attach(shared("llama", num_hidden_layers=2), plugins=plugins, attention="auto", page_size=8)


@pytest.mark.parametrize("changes", KINDS)
def test_the_kernels_pass(backend: Any, changes: dict[str, Any]) -> None:
    comparison = compare(backend, GatherBackend(), dataclasses.replace(REQUEST, **changes))
    assert comparison.problem == ""
    assert comparison.error <= comparison.allowed


DIFFERS = "its result differs from gather's by "
FORMAT = KVFormat(8, 4, 32)
BROKEN: dict[str, tuple[dict[str, Any], Any, str]] = {
    "queries not scaled": ({}, Replace("attend", "? scale * float(", "? float("), DIFFERS),
    "values in the first slot": (
        {},
        Replace("write", "kv_heads, page_size, value_dim", "kv_heads, page_size, 0"),
        DIFFERS,
    ),
    "pages copied to themselves": ({}, Replace("copy", "value_pages[source", "value_pages[target"), DIFFERS),
    "prefill without a token": ({}, Replace("gather", "column < length ? key", "column < length - 1 ? key"), DIFFERS),
    "a compile error": ({}, Replace("attend", "const int lane", "const in lane"), "it fails: RuntimeError: "),
    "a compile error of prefill": ({}, Replace("gather", "const int dim", "const in dim"), "it fails: RuntimeError: "),
    "no softcap": ({"softcap": 50.0}, Replace("attend", "s = softcap * precise::tanh(s / softcap);", ""), DIFFERS),
    "a window too long": (
        {"window": 24, "query_len": 3, "mask": "causal"},
        Replace("attend", "position > own - (window", "position >= own - (window"),
        DIFFERS,
    ),
    "no kept tokens": (
        {"window": 24, "keep": 4},
        Replace("attend", "|| position < keep || own < window", "|| own < window"),
        DIFFERS,
    ),
    "sinks of other heads": ({"sinks": True}, Replace("attend", "sinks[kv_head * GROUP +", "sinks[0 *"), DIFFERS),
    "no boolean mask": ({"mask": "array"}, Replace("attend", "seen = float(mask[at]) != 0.0f;", ""), DIFFERS),
    "no added mask": ({"mask": "array"}, Replace("attend", "s += float(mask[at]);", ""), DIFFERS),
    "drafts that see later ones": (
        {"query_len": 3, "mask": "causal"},
        Replace("attend", "seen = seen && position <= own;", ""),
        DIFFERS,
    ),
    "values as long as keys": (
        {"value_dim": 32},
        Replace("attend", "opened ? V_DIM : V_ROW", "K_ROW"),
        DIFFERS,
    ),
    "no biases": (
        {"key_dim": 32, "value_dim": 32, "keys": FORMAT.keys(32), "values": FORMAT.values(32)},
        Replace("attend", "1u)) + bias;", "1u));"),
        DIFFERS,
    ),
    "own pages like the others": (
        {"key_dim": 32, "value_dim": 32, "keys": FORMAT.keys(32), "values": FORMAT.values(32), "open_page": True},
        Replace("attend", "open_page_ids[open_start + first / PAGE]", "page_ids[start + first / PAGE]"),
        DIFFERS,
    ),
    "vectors of another set": (
        {"query_heads": 32, "key_dim": 64, "value_dim": 64},
        Replace("attend", "pass_vector + set * PASS", "pass_vector + 0 * set"),
        DIFFERS,
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_kernels_are_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every feature that a kernel claims, whatever breaks it."""
    from tinykv_metal.backend import MetalBackend

    if build.problem():
        pytest.skip(build.problem())
    changes, change, problem = BROKEN[fault]
    install(Device(change=change), monkeypatch)
    request = dataclasses.replace(REQUEST, **changes)
    assert MetalBackend().supports(request) == []
    assert compare(MetalBackend(), GatherBackend(), request).problem.startswith(problem)


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
