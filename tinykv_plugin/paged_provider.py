"""The built-in provider "paged"."""

from __future__ import annotations

import os

import mlx.core as mx

from .hookspecs import hookimpl
from .plan import make_plan
from .protocols import AttachContext, CacheProvider, CacheSession
from .session import PagedSession


class PagedProvider:
    """K/V in pages; what this package is about."""

    name = "paged"

    def open(self, context: AttachContext) -> CacheSession:
        return PagedSession(context, make_plan(context), context.config.memory_bytes(device_memory()))


def device_memory() -> int:
    """Bytes that a fraction in the setting ``memory`` is taken of: recommended working set or physical memory."""
    if mx.metal.is_available():
        return int(mx.device_info()["max_recommended_working_set_size"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@hookimpl
def tinykv_providers() -> list[CacheProvider]:
    """This module's provider."""
    return [PagedProvider()]
