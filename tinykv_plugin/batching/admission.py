"""How many pages a request needs, and whether there is room for it beside those that run."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import OutOfPagesError, RequestTooLargeError
from ..retention import KEPT_TOKENS
from ..sequence import PagedSequence
from ..session import PagedSession


@dataclass(frozen=True)
class Footprint:
    """Pages per cache group."""

    pages: tuple[int, ...]

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(tuple(a + b for a, b in zip(self.pages, other.pages, strict=True)))


class Admission:
    """Page arithmetic for one session. ``chunk`` is the most tokens a request prefills in one step."""

    def __init__(self, session: PagedSession, chunk: int) -> None:
        self._session = session
        self._chunk = chunk
        self._groups = session.groups
        self.page_size = max((group.page_size for group in self._groups), default=1)

    def footprint(self, tokens: int, max_kv_size: int | None = None) -> Footprint:
        """The most pages a request holds on its way to ``tokens`` tokens."""
        pages = []
        for group in self._groups:
            if group.open:
                # The page being filled and what a trim may lead back into, after a step; and before it, perhaps with
                # all pages until a trim can't lead back into what is read in full precision.
                spare = 1 + -(-self._session.rewind // group.page_size)
                kept = spare + max(spare, -(-(self._session.kv_format.start + self._session.rewind) // group.page_size))
                pages.append(min(-(-tokens // group.page_size), kept))
                continue
            window = group.window or max_kv_size
            kept = 0
            held = tokens
            if window is not None:
                # Pages behind the window go back at the next step, so a step's own tokens come on top.
                kept = 0 if group.window else -(-KEPT_TOKENS // group.page_size)
                held = min(tokens, window + self._session.rewind + self._chunk)
            partial = 0 if held == tokens else 1  # a window starts anywhere in its first page
            pages.append(-(-held // group.page_size) + (kept + partial if held < tokens else 0))
        return Footprint(tuple(pages))

    def further(self, row: PagedSequence | None, tokens: int) -> Footprint:
        """The pages a request needs to reach ``tokens`` tokens beyond those that ``row`` holds."""
        if row is None:
            return self.nothing()
        need = self.footprint(tokens, row.max_kv_size)
        # A page that is shared and not full will be copied when it is written.
        held = [
            len(table.live_pages())
            - (row.tokens % table.page_size > 0 and (table.holders > 1 or table.tail_shared(row.tokens) is not None))
            for table in row.tables
        ]
        return Footprint(tuple(max(0, pages - have) for pages, have in zip(need.pages, held, strict=True)))

    def nothing(self) -> Footprint:
        """No pages."""
        return Footprint((0,) * len(self._groups))

    def require_possible(self, tokens: int, max_kv_size: int | None) -> None:
        """Raise RequestTooLargeError if a request of ``tokens`` tokens could not run even alone."""
        need = self.footprint(tokens, max_kv_size)
        total = sum(pages * group.page_bytes for pages, group in zip(need.pages, self._groups, strict=True))
        if total > self._session.budget.total:
            raise RequestTooLargeError(tokens, sum(need.pages), total, self._session.budget.total, "memory")
        for pages, group in zip(need.pages, self._groups, strict=True):
            limit = self._session.max_pages
            if limit is not None and pages > limit:
                raise RequestTooLargeError(
                    tokens, pages, pages * group.page_bytes, limit * group.page_bytes, "max_pages", limit
                )

    def no_room(self, need: Footprint) -> OutOfPagesError:
        """The error for a request that would have to wait."""
        group, pages = max(enumerate(need.pages), key=lambda item: item[1])
        pool = self._session.pools[group]
        limit = pool.limit
        setting = "max_pages" if limit == pool.max_pages else "memory"
        return OutOfPagesError(pages, limit - pool.allocator.used, limit, pool.page_bytes, pool.page_size, setting)

    def has_room(self, need: Footprint, promised: Footprint) -> bool:
        """Whether ``need`` fits beside what is used now and what is ``promised`` to running requests.

        Stored prompts that nobody uses give way to it.
        """
        with self._session.lock:
            self._session.collect()
            return self._session.prefix.eviction.make_room((need + promised).pages)
