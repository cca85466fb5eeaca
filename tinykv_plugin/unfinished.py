"""What a thread that ended in the middle of a step has left: writes that no other thread can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import PagedSession

LOST = (
    "its keys and values were never computed: the thread that ran the model ended before they were evaluated; "
    "make a new prompt cache"
)


def discard_unfinished(session: PagedSession) -> None:
    """Give all layers new pages, and mark the requests that had any as lost; stored prompts go too.

    What was evaluated before can't be told from what wasn't. The session's lock is held.
    """
    for pool in session.pools:
        for pages in pool.layers.values():
            count = pages.num_pages
            pages.written = pages.last_read = None
            pages.due = []
            session.writer.resize(pages, 0)
            if count:
                session.writer.resize(pages, count)
    for row in session.live_sequences():
        row.heal()
        row.lost = bool(row.tokens)
        row.slots = 0
    session.prefix.index.clear()
