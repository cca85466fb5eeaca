"""PrefixEviction: stored prompts give way to requests, and to their own share of the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from .errors import OutOfPagesError, PoolGrowthError
from .pool import find_room

if TYPE_CHECKING:
    from .prefix_index import PrefixIndex
    from .sequence import PagedSequence
    from .session import PagedSession

T = TypeVar("T")


class PrefixEviction:
    """Who of the stored prompts goes, when and how far; ``share`` of the budget is what they may hold (0: nothing)."""

    def __init__(self, session: PagedSession, index: PrefixIndex, share: float) -> None:
        self.share = share
        self._session = session
        self._index = index

    def keep_within(self) -> None:
        """Evict what is beyond the cache's share of the budget; not in a transaction."""
        if self._session.journal.is_open:
            return
        limit = int(self.share * self._session.budget.total)
        while self._index.evictable_bytes > limit and self._index.evict(1):
            pass

    def make_room(self, needed: Sequence[int]) -> bool:
        """Evict until ``needed`` pages of each group fit into the budget; False, with nothing evicted, if they can't.

        The session's lock is held and no transaction is open.
        """
        try:
            self.with_room(lambda: find_room(self._session.pools, needed, last_try=False))
        except OutOfPagesError:
            return False
        return True

    def with_room(self, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns; pages are evicted, a few at a time, for as long as it runs out of them.

        Raises what it raises when there is nothing left to evict, or when that wouldn't do. No transaction is open.
        """
        while True:
            try:
                return attempt()
            except OutOfPagesError as error:
                if not error.evictable or not self._give_way(max(1, error.needed - error.free)):
                    raise
            except PoolGrowthError:
                if not self._give_way(1):
                    raise

    def with_room_for(self, rows: Sequence[PagedSequence], attempt: Callable[[], T]) -> T:
        """As :meth:`with_room`; at last those prompts give way that share the page in which one of ``rows`` ends.

        Such a page would have to be copied.
        """
        try:
            return self.with_room(attempt)
        except OutOfPagesError:
            tails = [
                (group, table.pages[row.tokens // table.page_size])
                for row in rows
                for group, table in enumerate(row.tables)
                if row.tokens // table.page_size < len(table.pages)
            ]
            if not self._index.let_go(tails):
                raise
            return self.with_room(attempt)

    def _give_way(self, count: int) -> bool:
        """Evict pages, of other models that share the budget if there are none here; False if none were."""
        others = (session.prefix.index for session in [*self._session.budget.sessions] if session is not self._session)
        return any(index.evict(count) for index in (self._index, *others))

    def evict(self, count: int) -> int:
        """Free ``count`` pages that nobody else holds, or what there is; returns how many."""
        with self._session.lock:
            return self._index.evict(count)

    def evict_prompt(self) -> bool:
        """Evict the least recently used prompt, up to where others branch off; False if nothing was stored."""
        with self._session.lock:
            return self._index.evict_prompt()
