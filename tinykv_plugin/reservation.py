"""Reserving the pages of a forward pass for all its rows in all cache groups, or none."""

from __future__ import annotations

from collections.abc import Sequence

from .compaction import compact
from .errors import OutOfPagesError
from .journal import Journal
from .open_page import refill
from .pool import PagePool, allocate_each, find_room
from .sequence import PagedSequence
from .table import PageTable

# Tables to extend, their tokens, and how many tokens are added.
Writing = list[tuple[PageTable, int, int]]


def reserve(
    pools: Sequence[PagePool],
    journal: Journal,
    rows: Sequence[PagedSequence],
    query_lens: Sequence[int],
    commit: bool = True,
) -> int:
    """Extend the tables of ``rows`` by ``query_lens`` tokens in every group; copies shared pages that will be written.

    Returns how many these were. Raises OutOfPagesError or PoolGrowthError with all rows as long as before. Without
    ``commit`` everything is taken back anyway: a way to ask whether there is room. Either way pools may have another
    size then, and pages other places; where there is room only after that, or after an eviction, what no token can read
    any more is dropped for good.
    """
    try:
        copied = _reserve(pools, journal, rows, query_lens, commit, last_try=False)
    except OutOfPagesError as error:
        if error.evictable:
            _drop_unreadable(pools, journal, rows, query_lens)
        raise
    if copied is None:
        # Neither moved pages nor ids that were given up can be rolled back, so it is done between two tries.
        needed = _drop_unreadable(pools, journal, rows, query_lens)
        compact(pools[0].budget, dict(zip(pools, needed, strict=True)))
        copied = _reserve(pools, journal, rows, query_lens, commit, last_try=True)
        assert copied is not None
    return copied


def _drop_unreadable(
    pools: Sequence[PagePool], journal: Journal, rows: Sequence[PagedSequence], query_lens: Sequence[int]
) -> list[int]:
    """Begin to reserve, and let that stand; returns the pages needed of each pool."""
    savepoint = journal.savepoint()
    needed = [_plan(pool, group, rows, query_lens)[1] for group, pool in enumerate(pools)]
    journal.commit(savepoint)
    return needed


def _reserve(
    pools: Sequence[PagePool],
    journal: Journal,
    rows: Sequence[PagedSequence],
    query_lens: Sequence[int],
    commit: bool,
    last_try: bool,
) -> int | None:
    """One try; None if it takes what other groups don't use."""
    savepoint = journal.savepoint()
    done = False
    try:
        plans = [_plan(pool, group, rows, query_lens) for group, pool in enumerate(pools)]
        needed = [count for _, count in plans]
        reopened = [(row, gone) for row in rows if row.tables and (gone := row.tables[-1].missing(row.tokens))]
        if not find_room(pools, needed, last_try):
            return None
        fresh = allocate_each(pools, needed)
        copied = 0
        for pool, (writing, _), pages in zip(pools, plans, fresh, strict=True):
            sources, targets = _extend(writing, pages)
            copied += len(sources)
            if sources and commit:
                pool.copy_pages(sources, targets)
        if commit and reopened:
            refill(reopened)
        done = commit
    finally:
        (journal.commit if done else journal.rollback)(savepoint)
    return copied


def _plan(pool: PagePool, group: int, rows: Sequence[PagedSequence], query_lens: Sequence[int]) -> tuple[Writing, int]:
    """Drop what can't be read any more; returns the tables that will be written and the pages that takes."""
    writing: Writing = []
    writers_of: dict[int, int] = {}
    needed = 0
    for row, count in zip(rows, query_lens, strict=True):
        if count:
            table = row.own(group)
            table.drop_unreadable(row.tokens)
            needed += table.pages_to_add(row.tokens + count) + len(table.missing(row.tokens))
            writing.append((table, row.tokens, count))
    for table, tokens, _ in writing:
        shared = table.tail_shared(tokens)
        if shared is not None:
            writers_of[shared] = writers_of.get(shared, 0) + 1
    # Of the holders of a shared page that write now, the last one may keep it if nobody else holds it.
    needed += sum(min(writers, pool.allocator.ref_count(page) - 1) for page, writers in writers_of.items())
    return writing, needed


def _extend(writing: Writing, fresh: list[int]) -> tuple[list[int], list[int]]:
    """Give the tables their new pages, shared ones that are written replaced; returns those, and what replaces them."""
    taken = 0
    sources: list[int] = []
    targets: list[int] = []
    for table, tokens, count in writing:
        missing = table.missing(tokens)
        if missing:
            table.put_back(missing, fresh[taken : taken + len(missing)])
            taken += len(missing)
        if table.tail_shared(tokens) is not None:
            targets.append(fresh[taken])
            sources.append(table.replace(tokens // table.page_size, fresh[taken]))
            taken += 1
        more = table.pages_to_add(tokens + count)
        if more:
            table.leave_out(tokens + count)
            table.append(fresh[taken : taken + more])
            taken += more
    assert taken == len(fresh)
    return sources, targets
