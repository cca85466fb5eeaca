"""PagePool: one cache group's pages, allocated all or nothing, growing from a small start to the budget."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from .allocator import PageAllocator
from .errors import OutOfPagesError, PoolGrowthError
from .hookspecs import PoolGrown
from .journal import Journal
from .pages import LayerPages
from .protocols import AttentionBackend
from .units import format_bytes

log = logging.getLogger("tinykv")

START_TOKENS = 256
GROWTH = 1.5


class Budget:
    """Bytes that all pools of an attachment may take together."""

    __slots__ = ("peak", "reserved", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self.peak = 0

    @property
    def left(self) -> int:
        return self.total - self.reserved

    def reserve(self, count: int) -> None:
        """Book ``count`` bytes more (negative: fewer)."""
        self.reserved += count
        self.peak = max(self.peak, self.reserved)


class PagePool:
    """The pages of the layers in one cache group: a page id means one page in every layer.

    ``layers`` may grow while the first forward pass meets new layers. ``limit`` is how many pages the budget allows.
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
    ) -> None:
        self.name = name
        self.page_size = page_size
        self.layers: dict[int, LayerPages] = {}
        self.allocator = PageAllocator(journal)
        self.growths = 0
        self.peak_used = 0
        self._backend = backend
        self._budget = budget
        self.max_pages = max_pages
        self._emit = emit

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers known so far."""
        return sum(pages.page_bytes for pages in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(pages.nbytes for pages in self.layers.values())

    @property
    def limit(self) -> int:
        """Most pages this pool may come to have, given what other pools have taken."""
        limit = self.allocator.capacity + max(0, self._budget.left) // max(1, self.page_bytes)
        return limit if self.max_pages is None else min(limit, self.max_pages)

    def add_layer(self, index: int, pages: LayerPages) -> None:
        """Give a layer met for the first time its pages, as many as the others have.

        Raises OutOfPagesError or PoolGrowthError with nothing changed.
        """
        more = self.allocator.capacity * pages.page_bytes
        if more > self._budget.left:
            total = self._budget.total // (self.page_bytes + pages.page_bytes)
            raise OutOfPagesError(
                self.allocator.capacity, total - self.allocator.used, total, pages.page_bytes, self.page_size, "memory"
            )
        if self.allocator.capacity:
            self._resize_all({index: pages}, 0, self.allocator.capacity)
        self.layers[index] = pages
        self._budget.reserve(more)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages, growing if needed.

        Raises OutOfPagesError if the budget doesn't allow it and PoolGrowthError if the system doesn't have the
        memory; the pool is as before then.
        """
        if count > self.allocator.free:
            self._grow(count)
        pages = self.allocator.allocate(count)
        self.peak_used = max(self.peak_used, self.allocator.used)
        return pages

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages in every layer."""
        for pages in self.layers.values():
            self._backend.copy_pages(pages, sources, targets)

    def _grow(self, count: int) -> None:
        allocator = self.allocator
        limit = self.limit
        wanted = allocator.used + count
        if wanted > limit:
            by_pages = limit == self.max_pages
            raise OutOfPagesError(
                count,
                limit - allocator.used,
                limit,
                self.page_bytes,
                self.page_size,
                "max_pages" if by_pages else "memory",
            )
        old = allocator.capacity
        start = -(-START_TOKENS // self.page_size)
        new = min(limit, max(wanted, start, int(old * GROWTH)))
        self._resize_all(self.layers, old, new)
        allocator.resize(new)
        self._budget.reserve((new - old) * self.page_bytes)
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
            except (MemoryError, RuntimeError) as error:
                for done in resized:
                    self._backend.resize(done, old)
                raise PoolGrowthError(old, new, (new - old) * pages.page_bytes, str(error)) from None
            finally:
                # The old arrays' buffers would otherwise stay in mlx's cache, next to the new ones.
                mx.clear_cache()
