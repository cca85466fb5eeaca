"""The kernels built for other machines by PyPI's ziglang, and run there by QEMU; skipped where one is missing.

The first run takes minutes: ziglang builds its C++ library for each machine, and keeps it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
MODULES = ("attention_check", "attention_part", "attention_plan", "attention_run", "dispatch", "kernels", "page_io",
           "pool_memory", "thread_pool")  # fmt: skip
FLAGS = ["-std=c++20", "-O2", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror", "-DTINYKV_ISA=base"]

pytestmark = pytest.mark.timeout(1200)


def compile_for(target: str, source: Path, result: Path, *more: str) -> str:
    """Returns the path of what was compiled: an object file, or with objects as ``more`` a program."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *FLAGS, f"-I{NATIVE / 'src'}", str(source)]
    subprocess.run([*command, *(more or ("-c",)), "-o", str(result)], check=True)
    return str(result)


def compile_all(target: str, folder: Path) -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang isn't installed: pip install ziglang")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = [NATIVE / "src" / f"{name}.cpp" for name in MODULES]
        return list(pool.map(lambda path: compile_for(target, path, folder / f"{path.stem}.o"), sources))


def test_apple_silicon_compiles(tmp_path: Path) -> None:
    compile_all("aarch64-macos", tmp_path)


def test_arm64_computes_the_same(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("QEMU isn't installed: apt-get install qemu-user")
    target = "aarch64-linux-musl"
    objects = compile_all(target, tmp_path)
    for name in ("attention", "page_io", "pool_memory", "simd", "thread_pool"):
        program = compile_for(target, NATIVE / "tests" / f"test_{name}.cpp", tmp_path / name, "-static", *objects)
        subprocess.run([emulator, program], check=True, env={**os.environ, "TINYKV_EMULATED": "1"})
