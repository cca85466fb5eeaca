"""PageTable: the pages of one sequence in one cache group, and the rules for extending, sharing and dropping them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .allocator import PageAllocator
from .errors import InvariantError
from .journal import Journal
from .retention import Retention


class PageTable:
    """Logical page to page_id; -1 where a window has passed. Shared by forked sequences until one of them writes.

    ``holders`` counts the sequences that share this table; the pages have one holder, the table. Whoever wants to
    change it takes :meth:`owned` first. All changes are journaled.
    """

    __slots__ = (
        "_allocator",
        "_journal",
        "dropped",
        "floor",
        "held_from",
        "holders",
        "page_size",
        "pages",
        "retention",
        "revision",
    )

    def __init__(self, allocator: PageAllocator, journal: Journal, page_size: int, retention: Retention) -> None:
        self._allocator = allocator
        self._journal = journal
        self.page_size = page_size
        self.retention = retention
        # An array and not a list: half the size, and copied into block tables at memory speed.
        self.pages = array("i")
        self.holders = 1
        # Logical pages before this one are dropped, but for those that hold kept tokens.
        self.dropped = 0
        # Of those, pages from this one on may be there until the next step: see leave_out().
        self.held_from = 0
        # Positions before this one were never filled (a cache loaded from a file that had dropped them).
        self.floor = 0
        # Counts changes other than appending pages and dropping old ones, for those who copy the table.
        self.revision = 0

    @property
    def first_position(self) -> int:
        """The oldest position still held after the kept tokens; 0 if nothing was dropped."""
        return max(self.floor, self.dropped * self.page_size if self.dropped > self.kept_pages else 0)

    @property
    def kept_pages(self) -> int:
        """Logical pages that hold tokens the window never drops."""
        return -(-self.retention.keep // self.page_size)

    def live_pages(self) -> Sequence[int]:
        """The page ids this table holds."""
        return [page for page in self.pages if page >= 0] if self.dropped else self.pages

    def filled_slots(self, tokens: int) -> int:
        """Slots of the held pages that hold one of ``tokens`` tokens."""
        dropped = max(0, self.dropped - self.kept_pages) * self.page_size
        return tokens - min(tokens, dropped)

    def view(self, first: int) -> PageTable:
        """A table of the pages from the logical page ``first`` on, for reading only: it holds no page."""
        page, start = self.retention.page, max(0, self.retention.start - first * self.page_size)
        view = PageTable(self._allocator, self._journal, self.page_size, Retention(page=page, start=start))
        view.pages = self.pages[first:]
        return view

    def owned(self) -> PageTable:
        """This table if one sequence holds it, else a copy for the caller, who gives up its share of this one."""
        if self.holders == 1:
            return self
        copy = PageTable(self._allocator, self._journal, self.page_size, self.retention)
        copy.pages = self.pages[:]
        copy.dropped = self.dropped
        copy.held_from = self.held_from
        copy.floor = self.floor
        self._allocator.share(self.live_pages())
        self.holders -= 1
        self._journal.record(self._undo_unshare)
        return copy

    def release(self) -> int:
        """One holder fewer; the last one's pages are freed. Returns how many pages are free now."""
        assert self.holders > 0
        self.holders -= 1
        return self._allocator.release(self.live_pages()) if not self.holders else 0

    def drop_unreadable(self, tokens: int) -> None:
        """Free the pages that no token from position ``tokens`` on can read, nor a rewind within the margin."""
        last = self.retention.first_kept(tokens) // self.page_size
        first = max(self.held_from, self.kept_pages)
        if last <= first:
            return
        pages = self.pages[first:last]
        self._changed(self._undo_drop, first, pages, self.dropped, self.held_from)
        self._allocator.release([page for page in pages if page >= 0])
        self.pages[first:last] = array("i", [-1]) * (last - first)
        self.dropped = max(last, self.dropped)
        self.held_from = last

    def missing(self, tokens: int) -> list[int]:
        """The logical pages that the next token after ``tokens`` reads, but which were dropped before a trim led back.

        Only an open group can miss any.
        """
        first = self.retention.first_needed(tokens) // self.page_size
        if not self.retention.page or self.dropped <= first:
            return []
        return [logical for logical in range(first, len(self.pages)) if self.pages[logical] < 0]

    def put_back(self, logicals: Sequence[int], pages: Sequence[int]) -> None:
        """Use ``pages``, which the caller has allocated, for those that are :meth:`missing`."""
        first = logicals[0]
        self.revision += 1
        self._changed(self._undo_put_back, logicals, self.dropped, self.held_from, self.floor)
        for logical, page in zip(logicals, pages, strict=True):
            self.pages[logical] = page
        self.dropped = min(self.dropped, first)
        self.held_from = min(self.held_from, first)
        self._reach_back()
        self.floor = min(self.floor, first * self.page_size)

    def only(self, logicals: Sequence[int]) -> PageTable:
        """A table of these pages alone, for filling them: it holds no page."""
        only = self.view(0)
        only.pages = array("i", [-1]) * len(self.pages)
        for logical in logicals:
            only.pages[logical] = self.pages[logical]
        only.dropped = logicals[0]
        return only

    def pages_to_add(self, tokens: int) -> int:
        """New pages needed to hold those of ``tokens`` tokens that are kept, at least the last one."""
        return max(0, -(-tokens // self.page_size) - max(len(self.pages), self._first_written(tokens)))

    def leave_out(self, tokens: int) -> None:
        """Before :meth:`append`: list no pages for those of ``tokens`` tokens that nobody can read after this step.

        Pages from before the step stay until the next one: it may break off.
        """
        first, length = self._first_written(tokens), len(self.pages)
        if first > length:
            self._changed(self._undo_leave_out, length, self.dropped)
            self.pages.extend([-1] * (first - length))
            self.dropped = first

    def _first_written(self, tokens: int) -> int:
        """The first logical page that has to be there after a step to ``tokens`` tokens."""
        if not self.retention.page or not tokens:
            return 0
        return min(self.retention.first_kept(tokens), tokens - 1) // self.page_size

    def append(self, pages: list[int]) -> None:
        """Add pages that the caller has allocated."""
        self._changed(self._undo_append, len(self.pages))
        self.pages.extend(pages)

    def pages_from(self, floor: int, tokens: int) -> int:
        """Pages needed to hold the tokens from ``floor`` to ``tokens``, and the kept ones."""
        total = -(-tokens // self.page_size)
        return total - max(0, floor // self.page_size - self.kept_pages)

    def open_at(self, floor: int, tokens: int, pages: list[int]) -> None:
        """Make an empty table that of ``tokens`` tokens of which only those from ``floor`` on are held, and kept ones.

        ``pages``: :meth:`pages_from` pages that the caller has allocated.
        """
        assert not self.pages
        self.revision += 1
        self._changed(self._undo_open)
        kept, first = self.kept_pages, floor // self.page_size
        self.pages = array("i", pages[:kept] + [-1] * max(0, first - kept) + pages[kept:])
        self.dropped = self.held_from = first if first > kept else 0
        self.floor = floor

    def tail_shared(self, tokens: int) -> int | None:
        """The page that the token at position ``tokens`` is written to, if it exists and has other holders too."""
        logical = tokens // self.page_size
        if logical < len(self.pages) and self.pages[logical] >= 0:
            return self.pages[logical] if self._allocator.ref_count(self.pages[logical]) > 1 else None
        return None

    def replace(self, logical: int, page: int) -> int:
        """Put ``page`` (allocated by the caller) in place of a shared one, which loses a holder and is returned."""
        old = self.pages[logical]
        self.revision += 1
        self._changed(self.pages.__setitem__, logical, old)
        self._allocator.release([old])
        self.pages[logical] = page
        return old

    def hand_over(self) -> None:
        """Another table lists these pages in place of this one; not in a transaction."""
        assert not self._journal.is_open
        self.pages = array("i")

    def follow(self, moved: Iterable[tuple[int, int]]) -> None:
        """Logical pages have moved: for each its new page. For all who share the table; between transactions only."""
        assert not self._journal.is_open
        self.revision += 1
        for logical, page in moved:
            self.pages[logical] = page

    def truncate(self, tokens: int) -> None:
        """Free the pages past the first ``tokens`` tokens."""
        length = -(-tokens // self.page_size)
        if length >= len(self.pages):
            return
        cut = self.pages[length:]
        self.revision += 1
        self._changed(self._undo_truncate, cut, self.dropped, self.held_from, self.floor)
        del self.pages[length:]
        self._allocator.release([page for page in cut if page >= 0])
        self.dropped = min(self.dropped, length)
        self.held_from = min(self.held_from, length)
        self.floor = min(self.floor, tokens)
        self._reach_back()

    def _reach_back(self) -> None:
        """Pages that :meth:`leave_out` has left before a gap are no longer dropped once there is none."""
        while self.dropped > self.held_from and self.pages[self.dropped - 1] >= 0:
            self.dropped -= 1

    def check(self, tokens: int, capacity: int) -> None:
        """Raise InvariantError unless exactly the pages of ``tokens`` tokens are listed, dropped ones as -1."""
        if len(self.pages) != -(-tokens // self.page_size):
            raise InvariantError(f"{len(self.pages)} pages of {self.page_size} for {tokens} tokens")
        kept = self.kept_pages
        for logical, page in enumerate(self.pages):
            there = not kept <= logical < self.dropped or (page >= 0 and logical >= self.held_from)
            if (page >= 0) != there or not -1 <= page < capacity:
                raise InvariantError(f"logical page {logical} is {page}; {self.dropped} dropped, {kept} kept")
        needed = self.retention.first_needed(tokens)
        if tokens and self.first_position > needed and not self.missing(tokens):
            raise InvariantError(f"position {needed} can be read but was dropped")

    def _changed(self, undo: Callable[..., Any], *args: Any) -> None:
        assert self.holders == 1, "a shared table was changed"
        self._journal.record(self._undo, undo, args)

    def _undo(self, undo: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.revision += 1
        undo(*args)

    def _undo_unshare(self) -> None:
        self.holders += 1

    def _undo_drop(self, first: int, pages: array[int], dropped: int, held_from: int) -> None:
        self.pages[first : first + len(pages)] = pages
        self.dropped, self.held_from = dropped, held_from

    def _undo_leave_out(self, length: int, dropped: int) -> None:
        del self.pages[length:]
        self.dropped = dropped

    def _undo_open(self) -> None:
        self.pages = array("i")
        self.dropped = self.held_from = self.floor = 0

    def _undo_put_back(self, logicals: Sequence[int], dropped: int, held_from: int, floor: int) -> None:
        for logical in logicals:
            self.pages[logical] = -1
        self.dropped, self.held_from, self.floor = dropped, held_from, floor

    def _undo_append(self, length: int) -> None:
        del self.pages[length:]

    def _undo_truncate(self, pages: array[int], dropped: int, held_from: int, floor: int) -> None:
        self.pages.extend(pages)
        self.dropped, self.held_from, self.floor = dropped, held_from, floor
