"""``tinykv selftest``: backends compared with gather and timed, on a tiny model and without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tinykv_plugin import hookimpl, manager
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.manager import PluginManager
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.selftest import trial
from tinykv_plugin.selftest.outcomes import Outcomes, kind_of

Call = Callable[..., Any]
QUICK = ("--contexts", "24", "40", "--batches", "1", "2")


class Direct(GatherBackend):
    """Says that it reads pages directly, and wants to be tried."""

    name = "direct"
    direct = True
    priority = 5
    factor = 1.0

    def selftest_key(self) -> str:
        return "a device"

    def attend(self, *args: Any, **options: Any) -> mx.array:
        return self.factor * super().attend(*args, **options)

    def dense(self, metadata: Any) -> Any:
        raise AssertionError("gather serves that")

    def supports(self, request: AttentionRequest) -> list[str]:
        return ["more than one query token"] if request.query_len > 1 else []

    def _gather(self, metadata: Any) -> Any:
        return super().dense(metadata)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Direct]:
    """The only direct backend, through gather's operations."""
    made = Direct()
    made.dense = made._gather  # type: ignore[method-assign]

    class Plugin:
        @hookimpl
        def tinykv_attention_backends(self) -> list[Any]:
            return [made]

    plugins = PluginManager(disabled=["cpu", "metal", "example"])
    plugins.register(Plugin(), "direct")
    monkeypatch.setattr(manager, "default_manager", lambda: plugins)
    monkeypatch.setenv("TINYKV_CACHE_DIR", str(tmp_path / "cache"))
    trial.forget()
    yield made
    trial.forget()


def rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]


def test_it_compares_times_and_keeps_the_outcome(tinykv: Call, backend: Direct, tiny_model_dir: Path) -> None:
    done = tinykv("selftest", str(tiny_model_dir), *QUICK, "--kv-page-size", "8")
    assert done.code == 0
    assert "tinykv-plugin: " in done.out and "device: " in done.out
    compared, refused, *timed = rows(done.out)
    assert compared[0] == "direct" and "page size 8, 1 new" in compared[1] and compared[-1] == "passed"
    assert refused[-1] == "not served: more than one query token"
    assert [row[:2] for row in timed] == [["1", "24"], ["1", "40"], ["2", "24"], ["2", "40"]]
    assert all(float(cell) > 0 for row in timed for cell in row[2:])
    kept = next(iter(Outcomes()._read()["a device"]))
    assert kept == compared[1]


def test_calls_are_of_the_kinds_that_a_model_makes(
    tinykv: Call, backend: Direct, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend is only asked about what it says that it knows; a model's own masks stay arrays."""
    from tinykv_plugin.cli import selftest

    plain = AttentionRequest(4, 2, 16, 16, mx.float32, 8, 1, "none", None, 0, False)
    kinds = [dataclasses.replace(plain, **more) for more in ({"softcap": 30.0}, {"mask": "array"}, {"chunk": 12})]
    monkeypatch.setattr(selftest, "_requests_of_model", lambda *_: kinds)
    monkeypatch.setattr(Direct, "features", frozenset({"chunk"}))
    capped, _, masked, more, chunked, _ = rows(tinykv("selftest", str(tiny_model_dir), "--contexts", "24").out)[:6]
    assert capped[-1] == "not served: softcap is not supported"
    assert (masked[1].endswith("1 new, mask"), masked[-1]) == (True, "passed")
    assert (more[1].endswith("4 new, mask"), more[-1]) == (True, "not served: more than one query token")
    assert (chunked[1].endswith("1 new, chunk 12"), chunked[-1]) == (True, "passed")


def test_wrong_numbers_are_an_exit_code(tinykv: Call, backend: Direct) -> None:
    backend.factor = 1.5
    done = tinykv("selftest", *QUICK, "--kv-page-size", "8")
    assert done.code == 1
    first, *others = rows(done.out)
    assert first[-1].startswith("its result differs from gather's by ")
    assert len(others) == 1, "what gives wrong numbers isn't timed"
    assert not Outcomes()._read()["a device"]


def test_a_backend_that_fails_is_an_exit_code(tinykv: Call, backend: Direct) -> None:
    backend.dense = None  # type: ignore[assignment, method-assign]
    done = tinykv("selftest", *QUICK)
    assert done.code == 1
    assert "it fails: TypeError: " in done.out


def test_calls_that_do_not_fit_are_left_out(tinykv: Call, backend: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_plugin.selftest import timing

    def measure(*args: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(timing, "measure", measure)
    done = tinykv("selftest", "--contexts", "1024", "--batches", "3")
    assert done.code == 0
    assert "3 rows of 1,024 tokens can't be timed: no room" in done.err


def test_with_gather_alone_there_is_nothing_to_test(tinykv: Call, backend: Direct) -> None:
    done = tinykv("selftest", "--kv-attention", "gather")
    assert done.code == 0
    assert "no backend that reads pages directly is installed or chosen" in done.out


def test_a_size_limit_is_part_of_the_calls(tinykv: Call, backend: Direct, tiny_model_dir: Path) -> None:
    done = tinykv("selftest", str(tiny_model_dir), "--contexts", "24", "--batches", "1", "--kv-max-kv-size", "16")
    assert "window 16, keep 4" in done.out


@pytest.mark.parametrize("argv", [["--contexts", "0"], ["--batches", "many"], ["no_such_folder"]])
def test_wrong_arguments(tinykv: Call, backend: Direct, argv: list[str]) -> None:
    assert tinykv("selftest", *argv).code != 0


def test_timings_decide_from_where_on_gather_is_left() -> None:
    from tinykv_plugin.selftest.timing import Timing, outcome_of

    def at(batch: int, context: int, ratio: float) -> Timing:
        return Timing(batch, context, 1.0, ratio, 1.0)

    slow, fast = 0.5, 2.0
    outcome = outcome_of([at(1, 1024, slow), at(1, 4096, fast), at(8, 1024, fast), at(8, 4096, fast)])
    assert (outcome.gather_below, outcome.gather_below_batch) == (4096, 0)
    outcome = outcome_of([at(1, 1024, fast), at(1, 4096, slow), at(8, 4096, 0.98)])
    assert (outcome.gather_below, outcome.gather_below_batch) == (4097, 0)
    assert kind_of(AttentionRequest(4, 2, 16, 8, mx.float16, 8, 1, "array", 32, 0, True)) == (
        "4/2 heads of 16/8, float16, page size 8, 1 new, window 32, sinks, mask"
    )
