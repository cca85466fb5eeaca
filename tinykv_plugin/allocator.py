"""PageAllocator: which page ids are free and how many holders the others have."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import repeat

from .errors import InvariantError
from .journal import Journal


class PageAllocator:
    """Free list and ref counts of one cache group's pages, ids 0 to ``capacity`` - 1; O(1) a page.

    Holders are page tables and the prefix cache, which holds a page once (:meth:`keep`). Every change but the prefix
    cache's is journaled, so that a transaction can be rolled back to the exact state before it, free-list order
    included.
    """

    __slots__ = ("_fresh", "_journal", "_kept", "_recycled", "_ref_counts", "cached_only", "capacity", "kept")

    def __init__(self, journal: Journal) -> None:
        self.capacity = 0
        self._journal = journal
        self._ref_counts = array("i")
        # Pages given back, taken last-in first-out: the pool's used part stays dense and in cache.
        self._recycled: list[int] = []
        # Ids from here on were never used; they cost no list entry, so a large pool starts at no cost.
        self._fresh = 0
        # 1 for the pages that the prefix cache holds; ``kept`` counts them, ``cached_only`` those nobody else holds.
        self._kept = bytearray()
        self.kept = 0
        self.cached_only = 0

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return self.capacity - self._fresh + len(self._recycled)

    @property
    def used(self) -> int:
        """Pages with at least one holder."""
        return self._fresh - len(self._recycled)

    def ref_count(self, page: int) -> int:
        """Holders of ``page``."""
        return self._ref_counts[page] if page < self._fresh else 0

    def is_kept(self, page: int) -> bool:
        """Whether the prefix cache holds ``page``."""
        return page < len(self._kept) and bool(self._kept[page])

    def keep(self, page: int) -> None:
        """The prefix cache is one more holder of ``page``; not in a transaction."""
        assert not self._journal.is_open
        assert self._ref_counts[page] > 0, f"page {page} is free and can't be kept"
        self._kept.extend(bytes(len(self._ref_counts) - len(self._kept)))
        assert not self._kept[page], f"page {page} is kept twice"
        self._kept[page] = 1
        self.kept += 1
        self._ref_counts[page] += 1

    def unkeep(self, page: int) -> bool:
        """The prefix cache gives ``page`` up; not in a transaction. Returns whether it is free now."""
        assert not self._journal.is_open
        assert self._kept[page], f"page {page} is not kept"
        self._kept[page] = 0
        self.kept -= 1
        self.cached_only -= self._ref_counts[page] == 1
        return bool(self.release([page]))

    def ref_counts(self) -> array[int]:
        """A copy of the holders of every page up to the last that was ever handed out."""
        return self._ref_counts[: self._fresh]

    def resize(self, capacity: int) -> None:
        """More page ids; not journaled (a rolled-back transaction may leave a larger pool)."""
        assert capacity >= self.capacity
        self.capacity = capacity

    @property
    def end(self) -> int:
        """Pages from here on have no holder."""
        end = self._fresh
        while end and not self._ref_counts[end - 1]:
            end -= 1
        return end

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The holders of ``sources`` hold ``targets`` instead, which were free, and the sources are free.

        Not journaled, and so for use between transactions only. Afterwards the lowest free ids are taken first.
        """
        assert not self._journal.is_open
        taken = set(targets)
        assert len(taken) == len(sources)
        self._kept.extend(bytes(len(self._ref_counts) - len(self._kept)))
        for source, target in zip(sources, targets, strict=True):
            assert self._ref_counts[source] > 0, f"page {source} is free and can't be moved"
            assert self._ref_counts[target] == 0, f"page {target} is held and can't be moved to"
            self._ref_counts[target], self._ref_counts[source] = self._ref_counts[source], 0
            self._kept[target], self._kept[source] = self._kept[source], 0
        self._recycled = sorted({*self._recycled, *sources} - taken, reverse=True)

    def shrink(self, capacity: int) -> None:
        """Give up the ids from ``capacity`` on, which have no holder; not journaled, as :meth:`move` isn't."""
        assert not self._journal.is_open
        assert self.end <= capacity <= self.capacity
        self.capacity = capacity
        self._fresh = min(self._fresh, capacity)
        self._recycled = [page for page in self._recycled if page < capacity]

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one holder each; the caller has made sure that they are free."""
        assert 0 <= count <= self.free, f"{count} pages asked of {self.free} free"
        cut = max(0, len(self._recycled) - count)
        recycled = self._recycled[cut:][::-1]
        del self._recycled[cut:]
        fresh = range(self._fresh, self._fresh + count - len(recycled))
        if fresh:
            self._fresh = fresh.stop
            self._ref_counts.extend(repeat(0, fresh.stop - len(self._ref_counts)))
        pages = recycled + list(fresh)
        for page in pages:
            assert self._ref_counts[page] == 0
            self._ref_counts[page] = 1
        self._journal.record(self._undo_allocate, recycled, len(fresh))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``."""
        shared = list(pages)
        for page in shared:
            assert self._ref_counts[page] > 0, f"page {page} is free and can't be shared"
            self._ref_counts[page] += 1
            if self._ref_counts[page] == 2 and self.is_kept(page):
                self.cached_only -= 1
        self._journal.record(self._undo_share, shared)

    def release(self, pages: Sequence[int]) -> int:
        """One holder fewer for each of ``pages``; returns how many are free now."""
        freed = []
        # Backwards, so that the last-in first-out list hands a run of pages out in its old order.
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} is freed twice"
            self._ref_counts[page] -= 1
            if not self._ref_counts[page]:
                freed.append(page)
            elif self._ref_counts[page] == 1 and self.is_kept(page):
                self.cached_only += 1
        self._recycled.extend(freed)
        self._journal.record(self._undo_release, list(pages), len(freed))
        return len(freed)

    def check(self, holders: dict[int, int]) -> None:
        """Raise InvariantError unless ``holders`` (page to number of holders) is exactly what is booked."""
        if not 0 <= self._fresh <= self.capacity:
            raise InvariantError(f"{self._fresh} pages handed out of {self.capacity}")
        free = set(self._recycled)
        if len(free) != len(self._recycled):
            raise InvariantError("a page is on the free list twice")
        for page in range(self._fresh):
            count = self._ref_counts[page]
            if (count == 0) != (page in free):
                raise InvariantError(f"page {page} has {count} holders and is {'' if page in free else 'not '}free")
            if count != holders.get(page, 0):
                raise InvariantError(f"page {page} has ref_count {count} but {holders.get(page, 0)} holders")
        only = sum(self.is_kept(page) and self._ref_counts[page] == 1 for page in range(self._fresh))
        if only != self.cached_only:
            raise InvariantError(f"{only} pages are only cached, {self.cached_only} are booked so")
        for page in holders:
            if not 0 <= page < self._fresh:
                raise InvariantError(f"page {page} is held but was never handed out")

    def _undo_allocate(self, recycled: list[int], fresh: int) -> None:
        self._fresh -= fresh
        for page in recycled:
            self._ref_counts[page] = 0
        for page in range(self._fresh, self._fresh + fresh):
            self._ref_counts[page] = 0
        self._recycled.extend(reversed(recycled))

    def _undo_share(self, pages: list[int]) -> None:
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 1 and self.is_kept(page):
                self.cached_only += 1

    def _undo_release(self, pages: list[int], freed: int) -> None:
        if freed:
            del self._recycled[-freed:]
        for page in pages:
            self._ref_counts[page] += 1
            if self._ref_counts[page] == 2 and self.is_kept(page):
                self.cached_only -= 1
