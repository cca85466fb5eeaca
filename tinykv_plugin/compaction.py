"""Moving live pages together, so that what a pool doesn't use goes to pools that need it, wherever it lies."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import CacheStateError
from .pool import Budget, PagePool, find_room

if TYPE_CHECKING:
    from .prefix_tree import PrefixNode
    from .sequence import PagedSequence
    from .session import PagedSession

log = logging.getLogger("tinykv")

SPARE = 1 / 16
"""Share of a budget that is made free when pools must be resized: less is used up soon, and then they must be again."""


def provide_room(pools: Sequence[PagePool], needed: Sequence[int]) -> None:
    """See to it that ``needed`` pages of each pool can be allocated next. Not in a transaction.

    Raises OutOfPagesError if the budget doesn't allow it, PoolGrowthError if the system lacks memory to resize a pool.
    """
    if not find_room(pools, needed, last_try=False):
        compact(pools[0].budget, dict(zip(pools, needed, strict=True)))
        find_room(pools, needed, last_try=True)


def compact(budget: Budget, wanted: Mapping[PagePool, int]) -> None:
    """Divide a budget between its pools anew: each gets its used pages, the ``wanted`` ones, and a share of the rest.

    Larger pools give back their end, from where pages are moved to free ids below; everybody who lists them is told.
    So that this isn't needed again at once, stored prompts give way until the rest is :data:`SPARE` of the budget. Not
    in a transaction. Raises PoolGrowthError if the system lacks the memory; pages that have moved by then are in their
    new places.
    """
    sessions = [session for session in [*budget.sessions] if _is_usable(session)]
    pools = [pool for session in sessions for pool in session.pools]
    fixed = budget.reserved - sum(pool.booked for pool in pools)
    while True:
        least = {pool: pool.allocator.used + wanted.get(pool, 0) for pool in pools}
        least_bytes = sum(pages * pool.page_bytes for pool, pages in least.items())
        rest = max(0, budget.total - fixed - least_bytes)
        short = int(SPARE * budget.total) - rest
        few = max(1, short // (16 * max((pool.page_bytes for pool in pools), default=1)))
        if short <= 0 or not any(session.prefix.index.evict(few) for session in sessions):
            break
        if all(count <= pool.allocator.free for pool, count in wanted.items()):
            return  # without any pool being resized
    for session in sessions:
        for group, pool in enumerate(session.pools):
            share = rest * least[pool] // max(1, least_bytes)  # in proportion to what it needs
            size = least[pool] + share
            if size < pool.allocator.capacity:
                _move_together(session, group, size)
                pool.give_back(size)


def _is_usable(session: PagedSession) -> bool:
    """Whether pages of ``session`` may be moved in this thread. Of a detached model only the end is given back."""
    if session.closed:
        for pool in session.pools:
            pool.give_back(0)
        return False
    try:
        session.enter()
    except CacheStateError as error:
        log.info("pages of another model stay where they are: %s", str(error))
        return False
    return True


def _move_together(session: PagedSession, group: int, size: int) -> None:
    """Move the pages of a cache group that are beyond the first ``size`` to free ones below."""
    pool = session.pools[group]
    if pool.allocator.end <= size:
        return
    # Held until all is done: no request ends in between and puts its tables aside as they were.
    rows = session.live_sequences()
    holders = _Holders(rows, session.prefix.index.tree.oldest_first(), group)
    sources, targets = holders.moves(pool.allocator.ref_counts(), size)
    if sources:
        pool.move(sources, targets)
        holders.follow(sources, targets, pool.allocator.capacity)
        session.forget_places()
        log.info("pool %r: %d pages moved together", pool.name, len(sources))


class _Holders:
    """Who lists the pages of one cache group: the tables of requests, and stored prompts."""

    def __init__(self, rows: Iterable[PagedSequence], nodes: Iterable[PrefixNode], group: int) -> None:
        self._group = group
        tables = {id(row.tables[group]): row.tables[group] for row in rows}
        self._tables = [(table, np.array(table.pages, np.int32)) for table in tables.values()]
        self._nodes = [node for node in nodes if node.pages[group] >= 0]

    def moves(self, ref_counts: array[int], size: int) -> tuple[list[int], list[int]]:
        """Pages beyond the first ``size``, and free ones to move them to. All holders of what moves are known."""
        counts = np.array(ref_counts)
        known = np.zeros_like(counts)
        for _, pages in self._tables:
            known[pages[pages >= 0]] += 1
        np.add.at(known, [node.pages[self._group] for node in self._nodes], 1)
        # A page may be held for a moment by somebody without a table, such as a request that is just ending.
        fixed = np.flatnonzero(known != counts)
        end = max(size, int(fixed[-1]) + 1 if fixed.size else 0)
        sources = end + np.flatnonzero(counts[end:])
        return sources.tolist(), np.flatnonzero(counts[:end] == 0)[: len(sources)].tolist()

    def follow(self, sources: Sequence[int], targets: Sequence[int], pages: int) -> None:
        """Page ``sources[i]`` of ``pages`` is ``targets[i]`` now."""
        moved = np.full(pages + 1, -1, np.int32)  # -1, where a window has passed, stays -1
        moved[sources] = targets
        for table, old in self._tables:
            new = moved[old]
            logicals = np.flatnonzero(new >= 0)
            if logicals.size:
                table.follow(zip(logicals.tolist(), new[logicals].tolist(), strict=True))
        for node in self._nodes:
            page = int(moved[node.pages[self._group]])
            if page >= 0:
                node.pages[self._group] = page
