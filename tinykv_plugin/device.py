"""The machine's memory."""

from __future__ import annotations

import os

import mlx.core as mx


def physical_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory() -> int:
    """Bytes that a fraction in the setting ``memory`` is taken of: recommended working set or physical memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return physical_memory()
