"""Every script in benchmarks/ still runs: with ``--smoke``, in tiny sizes, it prints its table and finite figures."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


def figures(value: Any) -> Iterator[float]:
    """Every number in what a script saved."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from figures(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_and_saves_finite_figures(
    script: Path,
    tiny_model_dir_64: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(logging.getLogger("tinykv"), "level", logging.WARNING)  # a script may want silence
    name = f"benchmark_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)

    model = ["--model", str(tiny_model_dir_64)] if '"--model"' in script.read_text(encoding="utf-8") else []
    saved = tmp_path / "figures.json"
    try:
        module.main(["--smoke", "--json", str(saved), *model])
    except SystemExit as error:
        if script.stem == "metal_traffic" and isinstance(error.code, str):
            pytest.skip(f"the Metal kernels can't be run here: {error.code}")
        raise
    found = list(figures(json.loads(saved.read_text(encoding="utf-8"))))
    assert len(found) > 3
    assert all(math.isfinite(number) for number in found)
    printed = capsys.readouterr().out
    assert sum(character.isdigit() for character in printed) > 3
    assert "nan" not in printed.lower().split()
