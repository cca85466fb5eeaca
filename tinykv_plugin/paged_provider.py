"""The built-in provider "paged"."""

from __future__ import annotations

from dataclasses import replace

from .device import device_memory
from .hookspecs import hookimpl
from .plan import check_format, make_plan
from .pool import Budget
from .protocols import AttachContext, CacheProvider, CacheSession
from .session import PagedSession


class PagedProvider:
    """K/V in pages; what this package is about."""

    name = "paged"

    def check(self, context: AttachContext) -> None:
        """Raise ConfigError if the model's K/V can't be stored as the settings ask."""
        check_format(context)

    def open(self, context: AttachContext) -> CacheSession:
        """Plan the model and make its page pools, in a budget of their own unless it is shared."""
        sharing = context.shares_budget_of
        if isinstance(sharing, PagedSession):
            budget = sharing.budget
        else:
            budget = Budget(context.config.memory_bytes(device_memory()))
        # The other model is not kept alive by this one.
        return PagedSession(replace(context, shares_budget_of=None), make_plan(context), budget)


@hookimpl
def tinykv_providers() -> list[CacheProvider]:
    """This module's provider."""
    return [PagedProvider()]
