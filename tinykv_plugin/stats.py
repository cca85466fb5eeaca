"""PoolStats: what ``kv.stats()`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .group_info import OPEN

if TYPE_CHECKING:
    from .session import PagedSession


@dataclass(frozen=True)
class PoolStats:
    """Pages and bytes of one attachment at one moment. Pages are counted per cache group, over all its layers at once.

    ``pages_total`` is what the budget allows, ``pages_used`` what requests hold, ``pages_cached`` what only the prefix
    cache holds, ``pages_free`` the rest; ``pages_shared`` are held by more than one request. ``bytes_reserved`` is the
    size of the arrays, ``bytes_used`` the part of it in used pages, ``bytes_per_token`` what a token takes over all
    layers (without the open page of a request). ``tokens`` counts each request's tokens, ``slots_filled`` the page
    slots that hold one (shared ones once), of ``slots_used``; ``freed_slots`` and ``freed_filled`` add those of
    requests that have ended, as they were at their end. The rest are counts since attach:
    ``growths`` of pools, ``cow_copies`` of pages on write, ``page_moves`` within a pool so that its end could go to
    another one, ``evictions`` of cached pages, tokens of prompts that were found in the prefix cache
    (``prefix_hit_tokens``) and that had to be run (``prefix_missed_tokens``), those that were stored but could not be
    used, by reason (``prefix_refused``), and stored ones that gave way (``prefix_evicted_tokens``).
    """

    pages_total: int = 0
    pages_used: int = 0
    pages_free: int = 0
    pages_shared: int = 0
    pages_cached: int = 0
    bytes_total: int = 0
    bytes_reserved: int = 0
    bytes_used: int = 0
    bytes_per_token: int = 0
    sequences: int = 0
    tokens: int = 0
    slots_used: int = 0
    slots_filled: int = 0
    freed_slots: int = 0
    freed_filled: int = 0
    peak_pages_used: int = 0
    peak_bytes_reserved: int = 0
    growths: int = 0
    cow_copies: int = 0
    page_moves: int = 0
    evictions: int = 0
    prefix_hit_tokens: int = 0
    prefix_missed_tokens: int = 0
    prefix_evicted_tokens: int = 0
    prefix_refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        """Share of the used pages' slots that hold no token, 0 to 1; with no page in use, that of ended requests."""
        filled, slots = (
            (self.slots_filled, self.slots_used) if self.slots_used else (self.freed_filled, self.freed_slots)
        )
        return 1 - filled / slots if slots else 0.0


def collect(session: PagedSession) -> PoolStats:
    """Count the pages of ``session``, whose lock is held."""
    rows = [row for row in session.live_sequences() if row.tokens or row.growing]
    shared = slots_used = slots_filled = bytes_used = 0
    for group, pool in enumerate(session.pools):
        size = pool.page_size
        # By page id; arrays, as there may be a million of them.
        fill = np.zeros(pool.allocator.capacity, np.int32)
        holders = np.zeros_like(fill)
        for row in rows:
            pages = np.array(row.tables[group].pages, np.int32)
            filled = np.minimum(size, row.tokens + row.growing - size * np.arange(len(pages)))
            kept = pages >= 0
            pages = pages[kept]
            fill[pages] = np.maximum(fill[pages], filled[kept])
            holders[pages] += 1
        shared += int(np.count_nonzero(holders > 1))
        held = pool.allocator.used - pool.allocator.cached_only
        slots_used += held * pool.page_size
        slots_filled += int(fill.sum())
        bytes_used += held * pool.page_bytes
    cached = sum(pool.allocator.cached_only for pool in session.pools)
    used = sum(pool.allocator.used for pool in session.pools) - cached
    # What is left of the budget is given to the pools as they need it: with several, count it in the largest pages.
    keeping = [pool for pool in session.pools if pool.name != OPEN]
    growable = min((pool.limit - pool.allocator.capacity for pool in keeping), default=0)
    total = sum(pool.allocator.capacity for pool in session.pools) + growable
    return PoolStats(
        pages_total=total,
        pages_used=used,
        pages_free=total - used - cached,
        pages_shared=shared,
        pages_cached=cached,
        bytes_total=session.budget.total,
        bytes_reserved=session.budget.reserved,
        bytes_used=bytes_used,
        bytes_per_token=sum(pool.page_bytes // pool.page_size for pool in keeping),
        sequences=len(rows),
        tokens=sum(row.tokens for row in rows),
        slots_used=slots_used,
        slots_filled=slots_filled,
        freed_slots=session.freed_slots,
        freed_filled=session.freed_filled,
        peak_pages_used=sum(pool.peak_used for pool in session.pools),
        peak_bytes_reserved=session.budget.peak,
        growths=sum(pool.growths for pool in session.pools),
        cow_copies=session.cow_copies,
        page_moves=sum(pool.moves for pool in session.pools),
        evictions=session.prefix.index.evicted,
        prefix_hit_tokens=session.prefix.counts.hit_tokens,
        prefix_missed_tokens=session.prefix.counts.missed_tokens,
        prefix_evicted_tokens=session.prefix.index.evicted_tokens,
        prefix_refused=dict(session.prefix.counts.refused),
    )
