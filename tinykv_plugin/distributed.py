"""Models divided between several processes: all of them must come to the same decisions about pages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from .session import PagedSession

# Set by mlx.launch and by MPI's launchers for the processes they start.
LAUNCH_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

_MOST = 2**30


def world() -> mx.distributed.Group | None:
    """All processes that were launched together; None if this one was started by itself."""
    if not any(name in os.environ for name in LAUNCH_VARIABLES):
        return None
    group = mx.distributed.init()
    return group if group.size() > 1 else None


def is_divided(model: Any) -> bool:
    """Whether ``shard()`` or ``pipeline()`` has left this process a part of ``model`` only."""
    return any("Sharded" in type(part).__name__ or getattr(part, "pipeline_size", 1) > 1 for part in model.modules())


def smallest(count: int, group: mx.distributed.Group) -> int:
    """The smallest ``count`` of all processes, each of which must ask."""
    mine = mx.array(min(count, _MOST), dtype=mx.int32)
    least: Any = mx.distributed.all_min(mine, group=group, stream=mx.cpu).item()
    return int(least)


def alike(names: str, group: mx.distributed.Group) -> bool:
    """Whether all processes, each of which must ask, have the same ``names``."""
    number = sum(place * code for place, code in enumerate(names.encode(), 1)) % _MOST
    return smallest(number, group) == -smallest(-number, group)


def agree_on_room(session: PagedSession, model: Any) -> None:
    """Where ``model`` is divided between processes, give all of them room for as many tokens.

    All must call it at the same point, as they do what computes. The process with the least room decides, so that
    every reservation succeeds in all of them or in none. Modifies the budget, the pools' limits and the prefix cache.
    """
    group = world()
    if group is None or not is_divided(model):
        return
    page_bytes = sum(pool.page_bytes for pool in session.pools)
    pages = smallest(session.budget.total // page_bytes if page_bytes else session.budget.total, group)
    session.budget.total = min(session.budget.total, pages * page_bytes)
    same = alike(f"{[(pool.name, len(pool.layers)) for pool in session.pools]} {len(session.stateful)}", group)
    session.prefix.confine(same)
    if not same:
        # None of the pools here may outgrow those elsewhere.
        for pool in session.pools:
            pool.max_pages = pages if pool.max_pages is None else min(pages, pool.max_pages)
