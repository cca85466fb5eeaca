"""Program: one compiled instance of a kernel, and its runs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import build, translate
from .memory import guarded

MLX_INCLUDE = Path(next(iter(mx.__path__)) if hasattr(mx, "__path__") else str(Path(mx.__file__).parent)) / "include"
KERNELS = MLX_INCLUDE / "mlx" / "backend" / "metal" / "kernels"
# What comes before every kernel: mlx puts utils.h there.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
#include "mlx/backend/metal/kernels/utils.h"
"""

_libraries: dict[Path, ctypes.CDLL] = {}


class KernelError(AssertionError):
    """The run of a kernel had problems; the message is the report, one line for each."""


class Kind(IntEnum):
    """What a kernel may do with an argument."""

    INPUT = 0
    OUTPUT = 1
    INITIALISED = 2
    IN_PLACE = 3


@dataclass
class Argument:
    """An array for a kernel; its bytes are modified if the kernel writes it. None: an argument that isn't there.

    After a run ``bytes_read`` and ``bytes_written`` are what the kernel loaded and stored, counted in ``check`` builds
    only.
    """

    data: np.ndarray[Any, Any] | None
    kind: Kind = Kind.INPUT
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Counts:
    """Of one run: rendezvous of simdgroups, bytes of threadgroup memory, threadgroups."""

    meetings: int
    threadgroup_bytes: int
    threadgroups: int


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("name", ctypes.c_char_p), ("item", ctypes.c_uint32),
        ("kind", ctypes.c_int), ("bytes_read", ctypes.c_uint64), ("bytes_written", ctypes.c_uint64),
    )  # fmt: skip


class _Call(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p), ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("count", ctypes.c_int),
        ("buffers", ctypes.POINTER(_Buffer)), ("grid", ctypes.c_uint32 * 3), ("threadgroup", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint32),
    )  # fmt: skip


class Program:
    """``kernel`` of ``source``, with template ``arguments`` as text; ``variant`` is "fast" or "check"."""

    def __init__(self, source: str, kernel: str, arguments: str, variant: str) -> None:
        cpp = translate.as_cpp(source, kernel, arguments)
        path = build.shared_object(PRELUDE, cpp, variant, [MLX_INCLUDE], f"mlx {version('mlx')}")
        if path not in _libraries:
            _libraries[path] = ctypes.CDLL(str(path))
        self._library = _libraries[path]
        self._constants = translate.function_constants(source)
        self._names = [
            parameter.name
            for parameter in translate.parameters(source, kernel)
            if not parameter.attribute or parameter.attribute.startswith("function_constant")
        ]

    def run(
        self,
        arguments: Sequence[Argument],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        schedule: int = 0,
        constants: Mapping[str, Any] | None = None,
    ) -> Counts:
        """Run over ``grid`` threads. Raises KernelError with everything that was wrong."""
        assert len(arguments) == len(self._names), (len(arguments), self._names)
        for name, value in (constants or {}).items():
            typed = np.array(value, {"bool": np.bool_, "int": np.int32}[self._constants[name]])
            self._library.msl_constant(name.encode(), typed.ctypes.data_as(ctypes.c_void_p))
        count = len(arguments)
        buffers = (_Buffer * count)()
        with ExitStack() as stack:
            placed: dict[int, int] = {}
            for buffer, name, argument in zip(buffers, self._names, arguments, strict=True):
                _place(buffer, name, argument, placed, stack)
            addresses = (ctypes.c_void_p * count)(*(buffer.data for buffer in buffers))
            entry = ctypes.cast(self._library.msl_entry, ctypes.c_void_p).value
            call = _Call(entry, addresses, count, buffers, (ctypes.c_uint32 * 3)(*grid),
                         (ctypes.c_uint32 * 3)(*threadgroup), schedule)  # fmt: skip
            text, counts = ctypes.create_string_buffer(1 << 16), (ctypes.c_uint64 * 3)()
            problems = self._library.msl_run(ctypes.byref(call), text, len(text), counts)
            for buffer, argument in zip(buffers, arguments, strict=True):
                argument.bytes_read, argument.bytes_written = buffer.bytes_read, buffer.bytes_written
                if argument.data is not None and argument.kind != Kind.INPUT and not problems:
                    ctypes.memmove(argument.data.ctypes.data, buffer.data, argument.data.nbytes)
        if problems:
            raise KernelError(_with_lines(text.value.decode()))
        return Counts(*counts)


def _place(buffer: _Buffer, name: str, argument: Argument, placed: dict[int, int], stack: ExitStack) -> None:
    """Copies an argument between guard pages.

    ``placed`` has the addresses of those before: an array given twice is one piece of memory.
    """
    data = argument.data if argument.data is not None else np.zeros(64, np.uint8)
    assert data.flags.c_contiguous
    address = placed.get(data.ctypes.data)
    if address is None:
        alignment = 16 if data.nbytes % 16 == 0 else data.itemsize
        address = placed[data.ctypes.data] = stack.enter_context(guarded(data.nbytes, alignment))
        ctypes.memmove(address, data.ctypes.data, data.nbytes)
    buffer.data = address
    buffer.bytes, buffer.name, buffer.item, buffer.kind = data.nbytes, name.encode(), data.itemsize, argument.kind


def _with_lines(report: str) -> str:
    """Addresses of code replaced by their places in the source, where addr2line is there to tell."""

    def place(match: re.Match[str]) -> str:
        try:
            done = subprocess.run(
                ["addr2line", "-e", match.group(1), match.group(2)], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return match.group(0)
        found = done.stdout.split(" (")[0].strip()
        return f"at {Path(found).name}" if found and "??" not in found else match.group(0)

    return re.sub(r"@(\S+\.so)\+(0x[0-9a-f]+)", place, report)
