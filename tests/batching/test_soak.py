"""A short form of benchmarks/soak.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mixed_load_loses_and_leaks_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("soak", BENCHMARKS / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    result = module.soak(requests=60, seed=seed, pages=48)
    assert result.ok, result
    assert result.finished > 40
    assert result.preempted > 0
