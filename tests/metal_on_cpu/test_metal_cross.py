"""The harness on arm64: a kernel with barriers and simdgroup sums, cross-compiled and run in QEMU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metal_case import Case
from metal_device import install
from msl_cpu import build, device, translate
from msl_cpu.program import MLX_INCLUDE, PRELUDE, Argument, Counts, Kind, Program

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(build.problem()), reason=build.problem()),
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} missing: g++-aarch64-linux-gnu, qemu-user"),
]

# Reads each argument from a file, runs the kernel, and writes what it made.
DRIVER = """
#include <cstdio>
#include <cstdlib>
#include "state.h"
struct Call {
  void (*entry)(void**);
  void** arguments;
  int count;
  msl::Buffer* buffers;
  uint32_t grid[3], group[3], schedule;
};
struct Counts { uint64_t meetings, bytes, groups; };
extern "C" void msl_entry(void**);
extern "C" int msl_run(Call*, char*, size_t, Counts*);
int main(int count, char** files) {
  static void* pointers[64];
  static msl::Buffer buffers[64];
  static char text[1 << 16];
  for (int i = 1; i < count; i++) {
    FILE* file = fopen(files[i], "rb");
    int item, kind;
    long size;
    if (!file || fscanf(file, "%d %d %ld ", &item, &kind, &size) != 3) return 2;
    pointers[i - 1] = aligned_alloc(64, (size + 127) / 64 * 64);
    if (fread(pointers[i - 1], 1, size, file) != size_t(size)) return 3;
    buffers[i - 1] = {(char*)pointers[i - 1], size_t(size), files[i], uint32_t(item), kind, 0, 0};
  }
  Call call = {msl_entry, pointers, count - 1, buffers, {GRID}, {GROUP}, 1};
  Counts counts;
  if (msl_run(&call, text, sizeof text, &counts)) return puts(text), 1;
  for (int i = 1; i < count; i++) {
    FILE* file = fopen(files[i], "wb");
    fwrite(pointers[i - 1], 1, buffers[i - 1].bytes, file);
    fclose(file);
  }
}
"""


@pytest.mark.parametrize("variant", ["fast", "check"])
def test_a_kernel_on_arm64(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_metal.backend import MetalBackend

    runs: list[tuple[tuple[Any, ...], list[Argument], tuple[int, ...], tuple[int, ...], list[bytes]]] = []

    class Recorded(Program):
        def __init__(self, source: str, kernel: str, arguments: str, variant: str) -> None:
            super().__init__(source, kernel, arguments, variant)
            self.text = source, kernel, arguments

        def run(self, arguments: Any, grid: Any, threadgroup: Any, *more: Any) -> Counts:
            before = [Argument(np.array(one.data), one.kind) for one in arguments]
            counts = super().run(arguments, grid, threadgroup, *more)
            made = [one.data.tobytes() for one in arguments if one.kind == Kind.OUTPUT]
            runs.append((self.text, before, grid, threadgroup, made))
            return counts

    monkeypatch.setattr(device, "Program", Recorded)
    install(device.Device(), monkeypatch)
    backend = MetalBackend()
    Case([40, 7], page_size=8).fill(backend).attend(backend)
    ((text, arguments, grid, threadgroup, made),) = runs

    runtime = build.HERE / "runtime"
    sources = {"kernel.cpp": PRELUDE + translate.as_cpp(*text)}
    sources["driver.cpp"] = DRIVER.replace("GRID", ", ".join(map(str, grid))).replace(
        "GROUP", ", ".join(map(str, threadgroup))
    )
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    flags = ["-std=gnu++17", "-w", "-O1", f"-I{build.INCLUDE}", f"-I{runtime}", f"-I{MLX_INCLUDE}"]
    checks = ["-fsanitize=thread", "-DMSL_CHECK"] if variant == "check" else []
    language = ["-fsingle-precision-constant", "-ffp-contract=off", "-fno-strict-aliasing"]
    run(COMPILER, *flags, *language, *checks, "-c", tmp_path / "kernel.cpp", "-o", tmp_path / "kernel.o")
    run(COMPILER, *flags, *checks[1:], "-static", tmp_path / "kernel.o", tmp_path / "driver.cpp",
        *sorted(runtime.glob("*.cpp")), "-o", tmp_path / "kernel")  # fmt: skip
    files = []
    for number, one in enumerate(arguments):
        assert one.data is not None
        files.append(tmp_path / str(number))
        header = f"{one.data.itemsize} {int(one.kind)} {one.data.nbytes} ".encode()
        files[-1].write_bytes(header + one.data.tobytes())
    run(EMULATOR, tmp_path / "kernel", *files)
    outputs = [file for file, one in zip(files, arguments, strict=True) if one.kind == Kind.OUTPUT]
    assert [file.read_bytes() for file in outputs] == made


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
