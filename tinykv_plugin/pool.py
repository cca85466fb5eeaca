"""PagePool: one cache group's pages, allocated all or nothing, growing from a small start to the budget."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .allocator import PageAllocator
from .errors import OutOfPagesError, PoolGrowthError
from .hookspecs import PoolGrown
from .journal import Journal
from .kv_format import KVFormat
from .pages import LayerPages
from .protocols import AttentionBackend
from .units import format_bytes

if TYPE_CHECKING:
    from .session import PagedSession

log = logging.getLogger("tinykv")

START_TOKENS = 256
GROWTH = 1.5
FULL_PRECISION = KVFormat()


class Budget:
    """Bytes that some pools may take together: those of an attachment, and of others that share its budget.

    ``lock`` guards the bookkeeping of all of them. Pools are held weakly: what those of a dropped model took is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        self.lock = threading.RLock()
        self.pools: weakref.WeakSet[PagePool] = weakref.WeakSet()
        # In the order they were opened: processes that divide a model must evict alike.
        self.sessions: weakref.WeakKeyDictionary[PagedSession, None] = weakref.WeakKeyDictionary()

    @property
    def reserved(self) -> int:
        """Bytes booked by all pools."""
        return sum(pool.booked for pool in list(self.pools))

    @property
    def left(self) -> int:
        """Bytes that may still be booked."""
        return self.total - self.reserved


class PagePool:
    """The pages of the layers in one cache group: a page id means one page in every layer.

    ``layers`` may grow while the first forward pass meets new layers. ``limit`` is how many pages the budget allows.
    ``kv_format`` is hashable: the same tokens' pages in another format are other pages.
    """

    def __init__(
        self,
        name: str,
        page_size: int,
        backend: AttentionBackend,
        journal: Journal,
        budget: Budget,
        max_pages: int | None,
        emit: Callable[[str, object], None],
        kv_format: KVFormat = FULL_PRECISION,
    ) -> None:
        self.name = name
        self.kv_format = kv_format
        self.page_size = page_size
        self.layers: dict[int, LayerPages] = {}
        self.allocator = PageAllocator(journal)
        self.growths = 0
        self.moves = 0
        self.peak_used = 0
        self._backend = backend
        self.booked = 0
        self.budget = budget
        budget.pools.add(self)
        self.max_pages = max_pages
        self._emit = emit

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers known so far."""
        return sum(pages.page_bytes for pages in self.layers.values())

    @property
    def model_token_bytes(self) -> int:
        """Bytes a token's K/V would take in the model's own dtype, over all layers."""
        return sum(pages.spec.model_token_bytes() for pages in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(pages.nbytes for pages in self.layers.values())

    @property
    def limit(self) -> int:
        """Most pages this pool may come to have, given what other pools have taken."""
        limit = self.allocator.capacity + max(0, self.budget.left) // max(1, self.page_bytes)
        return limit if self.max_pages is None else min(limit, self.max_pages)

    def add_layer(self, index: int, pages: LayerPages) -> None:
        """Give a layer met for the first time its pages, as many as the others have.

        Raises OutOfPagesError or PoolGrowthError with nothing changed.
        """
        more = self.allocator.capacity * pages.page_bytes
        if more > self.budget.left:
            total = self.budget.total // (self.page_bytes + pages.page_bytes)
            raise OutOfPagesError(
                self.allocator.capacity, total - self.allocator.used, total, pages.page_bytes, self.page_size, "memory"
            )
        if self.allocator.capacity:
            self._resize_all({index: pages}, 0, self.allocator.capacity)
        self.layers[index] = pages
        self.book(more)

    def book(self, count: int) -> None:
        """Take ``count`` bytes more of the budget (negative: fewer)."""
        self.booked += count
        self.budget.peak = max(self.budget.peak, self.budget.reserved)

    def allocate(self, count: int, promised: int = 0) -> list[int]:
        """``count`` pages, growing if needed. ``promised``: bytes of the budget that other pools will need at once.

        Raises OutOfPagesError if the budget doesn't allow it and PoolGrowthError if the system doesn't have the
        memory; the pool is as before then.
        """
        if count > self.allocator.free:
            find_room([self], [count], last_try=True)
            self._grow(self.allocator.used + count, promised)
        pages = self.allocator.allocate(count)
        self.peak_used = max(self.peak_used, self.allocator.used)
        return pages

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move pages to free ids, in every layer; whoever lists them must be told. Not in a transaction.

        Raises PoolGrowthError as :meth:`copy_pages` does; no page has moved then.
        """
        self.copy_pages(sources, targets)
        self.allocator.move(sources, targets)
        self.moves += len(sources)

    def give_back(self, capacity: int) -> None:
        """Shrink to ``capacity`` pages, or to the last one with a holder. Not in a transaction.

        Raises PoolGrowthError with nothing changed.
        """
        old, new = self.allocator.capacity, max(capacity, self.allocator.end)
        if new < old:
            self._resize_all(self.layers, old, new)
            self.allocator.shrink(new)
            self.book((new - old) * self.page_bytes)
            log.info("pool %r: %d pages, %d before: another pool needs the memory", self.name, new, old)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages in every layer. Raises PoolGrowthError if the system doesn't have the memory for it."""
        for pages in self.layers.values():
            try:
                self._backend.copy_pages(pages, sources, targets)
            except (MemoryError, RuntimeError) as error:
                capacity = self.allocator.capacity
                raise PoolGrowthError(capacity, capacity, len(sources) * pages.page_bytes, str(error)) from None

    def _grow(self, wanted: int, promised: int) -> None:
        """Grow to ``wanted`` pages at least: ahead of need, but by no more than a fair share of what is left."""
        allocator, old = self.allocator, self.allocator.capacity
        start = -(-START_TOKENS // self.page_size)
        left = self.budget.left - promised - (wanted - old) * self.page_bytes
        share = max(0, left) // (max(1, self.page_bytes) * len(self.budget.pools))
        new = max(wanted, min(wanted + share, max(start, int(old * GROWTH))))
        if self.max_pages is not None:
            new = min(new, self.max_pages)
        self._resize_all(self.layers, old, new)
        allocator.resize(new)
        self.book((new - old) * self.page_bytes)
        self.growths += 1
        log.info("pool %r: %d pages, %d before (%s reserved)", self.name, new, old, format_bytes(self.nbytes))
        self._emit("tinykv_pool_grown", PoolGrown(self.name, old, new, self.nbytes))

    def _resize_all(self, layers: dict[int, LayerPages], old: int, new: int) -> None:
        """Layer by layer, so that the peak is one layer's arrays and not two pools."""
        resized = []
        for pages in layers.values():
            try:
                resized.append(pages)
                self._backend.resize(pages, new)
            except Exception as error:
                for done in resized:
                    self._backend.resize(done, old)
                if not isinstance(error, MemoryError | RuntimeError):
                    raise
                # Smaller arrays are made beside the old ones.
                more = (new - old if new > old else new) * pages.page_bytes
                raise PoolGrowthError(old, new, more, str(error)) from None
            finally:
                # The old arrays' buffers would otherwise stay in mlx's cache, next to the new ones.
                mx.clear_cache()


def allocate_each(pools: Sequence[PagePool], needed: Sequence[int]) -> list[list[int]]:
    """``needed`` pages of each pool, after :func:`find_room`: no pool grows into what another one needs.

    Raises PoolGrowthError; pages taken by then go back by the caller's transaction.
    """
    growth = [max(0, count - pool.allocator.free) * pool.page_bytes for count, pool in zip(needed, pools, strict=True)]
    return [
        pool.allocate(count, promised=sum(growth[index + 1 :])) if count else []
        for index, (count, pool) in enumerate(zip(needed, pools, strict=True))
    ]


def find_room(pools: Sequence[PagePool], needed: Sequence[int], last_try: bool) -> bool:
    """Whether ``needed`` pages of each pool fit into the budget as it is divided between the pools now.

    False if they would once no pool keeps pages that it doesn't use (:func:`~tinykv_plugin.compaction.compact`). Raises
    OutOfPagesError if they wouldn't, or if this is the ``last_try``.
    """
    if all(count <= pool.allocator.free for count, pool in zip(needed, pools, strict=True)):
        return True
    budget, wanted = pools[0].budget, dict(zip(pools, needed, strict=True))
    room = budget.left
    missing = [max(0, count - pool.allocator.free) * pool.page_bytes for pool, count in wanted.items()]
    if _fits(budget, wanted, evicting=False) and (sum(missing) <= room or not last_try):
        return sum(missing) <= room
    evictable = _fits(budget, wanted, evicting=True)
    for pool, count in wanted.items():
        limit = pool.max_pages
        if limit is not None and pool.allocator.used + count > limit:
            free = limit - pool.allocator.used
            raise OutOfPagesError(count, free, limit, pool.page_bytes, pool.page_size, "max_pages", evictable=evictable)
    would_fit = sum(
        (pool.allocator.used - pool.allocator.cached_only + wanted.get(pool, 0)) * pool.page_bytes
        for pool in [*budget.pools]
    )
    for (pool, count), lacking in zip(wanted.items(), missing, strict=True):
        if lacking > room:
            total = pool.allocator.capacity + room // pool.page_bytes
            free = total - pool.allocator.used
            raise OutOfPagesError(
                count, free, total, pool.page_bytes, pool.page_size, "memory", would_fit, evictable=evictable
            )
        room -= lacking
    raise AssertionError("something is missing, but nowhere")


def _fits(budget: Budget, wanted: Mapping[PagePool, int], evicting: bool) -> bool:
    """Whether all used pages and the ``wanted`` ones are within the limits, wherever they are.

    ``evicting``: without those that only a prefix cache holds.
    """
    total = 0
    for pool in [*budget.pools]:
        count = pool.allocator.used + wanted.get(pool, 0) - (pool.allocator.cached_only if evicting else 0)
        if pool.max_pages is not None and count > pool.max_pages and wanted.get(pool):
            return False
        total += count * pool.page_bytes
    return total <= budget.total
