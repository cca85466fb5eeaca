"""Guarded: a copy of an array between pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# As far as an index of 32 bits reaches, in both directions.
_GAP = 1 << 31
_NORESERVE = 0x4000


@contextmanager
def guarded(size: int, alignment: int) -> Iterator[int]:
    """The address of ``size`` bytes that end, up to ``alignment``, where memory ends."""
    pages = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    length = pages + 2 * _GAP
    base = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        raise MemoryError("no address space for a guarded array")
    try:
        _libc.mprotect(base + _GAP, pages, mmap.PROT_READ | mmap.PROT_WRITE)
        yield base + _GAP + pages - -(-size // alignment) * alignment
    finally:
        _libc.munmap(base, length)
