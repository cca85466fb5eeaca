"""The built-in provider "paged"."""

from __future__ import annotations

from .device import device_memory
from .hookspecs import hookimpl
from .plan import make_plan
from .protocols import AttachContext, CacheProvider, CacheSession
from .session import PagedSession


class PagedProvider:
    """K/V in pages; what this package is about."""

    name = "paged"

    def open(self, context: AttachContext) -> CacheSession:
        """Plan the model and make its page pools."""
        return PagedSession(context, make_plan(context), context.config.memory_bytes(device_memory()))


@hookimpl
def tinykv_providers() -> list[CacheProvider]:
    """This module's provider."""
    return [PagedProvider()]
