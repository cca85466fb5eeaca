"""The compiled backend builds into this environment and its tests pass; skipped where there is no C++ compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = (os.environ.get("CXX", ""), "c++", "g++", "clang++")


@pytest.mark.timeout(1800)
def test_the_native_backend_builds_and_its_tests_pass() -> None:
    if not any(shutil.which(compiler) for compiler in COMPILERS if compiler):
        pytest.skip("there is no C++ compiler: install g++ or clang++, or set CXX")
    # Output goes straight to the terminal: run pytest with -s.
    subprocess.run([sys.executable, "-m", "pip", "install", ROOT / "native"], check=True)
    subprocess.run([sys.executable, "-m", "pytest", "tests/native"], cwd=ROOT, check=True)
