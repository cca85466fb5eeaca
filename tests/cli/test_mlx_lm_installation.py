"""Where mlx-lm isn't installed, one line says how it is, on each Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from toml_text import loads

from tinykv_plugin.mlx_lm_installation import how_to_install, without_mlx_lm

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
WITHOUT = "import sys; sys.modules['mlx_lm'] = None\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, check=False)


def test_python_3_10_needs_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    guide = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    assert f"$ {how_to_install()}\n" in guide
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    (wanted,) = (line for line in loads(PROJECT)["project"]["dependencies"] if line.startswith("mlx-lm"))
    assert how_to_install() == f"python -m pip install '{wanted.partition(';')[0]}'"


def test_the_command_line_says_how(tmp_path: Path) -> None:
    program = f"from tinykv_plugin.cli.main import main; sys.exit(main(['demo', '--model', {str(tmp_path)!r}]))"
    done = run(program)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"tinykv: error: mlx-lm is not installed: {how_to_install()}", done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_is_told_too() -> None:
    done = run("import tinykv_plugin; tinykv_plugin.attach")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: mlx-lm is not installed: {how_to_install()}"


def test_other_modules_are_named_as_ever() -> None:
    assert not without_mlx_lm(ModuleNotFoundError("No module named 'foo'", name="foo"))
    assert without_mlx_lm(ModuleNotFoundError("No module named 'mlx_lm.server'", name="mlx_lm.server"))
