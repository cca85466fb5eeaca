"""The invariants of the bookkeeping, for ``kv.check()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvariantError

if TYPE_CHECKING:
    from .session import PagedSession
    from .table import PageTable


def audit(session: PagedSession) -> None:
    """Raise InvariantError at the first contradiction; the session's lock is held.

    Every table lists exactly its tokens' pages; a page's ref_count is the number of tables and prefix-cache entries
    that list it; free and used pages are disjoint and add up; every layer has as many pages as there are ids; bytes
    booked are bytes held.
    """
    if session.journal.is_open:
        raise InvariantError("a transaction was left open")
    held: list[dict[int, int]] = [{} for _ in session.pools]
    sharers: dict[int, tuple[PageTable, int]] = {}
    tables = [list(enumerate(tables)) for tables, _ in list(session.abandoned)]
    for row in session.live_sequences():
        for group, table in enumerate(row.tables):
            table.check(row.tokens + row.growing, session.pools[group].allocator.capacity)
        tables.append(list(enumerate(row.tables)))
    for group, table in (item for row_tables in tables for item in row_tables):
        _, count = sharers.get(id(table), (table, 0))
        sharers[id(table)] = (table, count + 1)
        if not count:
            for page in table.live_pages():
                held[group][page] = held[group].get(page, 0) + 1
    for table, count in sharers.values():
        if table.holders != count:
            raise InvariantError(f"a table has {table.holders} holders, {count} were found")
    for group, page in session.prefix.index.holders():
        held[group][page] = held[group].get(page, 0) + 1
        if not session.pools[group].allocator.is_kept(page):
            raise InvariantError(f"the prefix cache lists page {page}, which is not booked as its")
    for pool, pages in zip(session.pools, held, strict=True):
        pool.allocator.check(pages)
        for index, layer in pool.layers.items():
            if layer.num_pages != pool.allocator.capacity:
                raise InvariantError(f"layer {index} has {layer.num_pages} of {pool.allocator.capacity} pages")
    for pool in session.pools:
        if pool.booked != pool.nbytes:
            raise InvariantError(f"{pool.nbytes} bytes held by pool {pool.name!r}, {pool.booked} booked")
    if session.budget.left < 0:
        raise InvariantError(f"{session.budget.reserved} bytes booked, {session.budget.total} allowed")
