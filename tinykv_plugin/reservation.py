"""Reserving the pages of a forward pass for all its rows in all cache groups, or none."""

from __future__ import annotations

from collections.abc import Sequence

from .journal import Journal
from .pool import PagePool, allocate_each, find_room
from .sequence import PagedSequence
from .table import PageTable

# Pages to copy in one group before the pass writes: from, to.
Copies = tuple[list[int], list[int]]
# Tables to extend, their tokens, and how many tokens are added.
Writing = list[tuple[PageTable, int, int]]


def reserve(
    pools: Sequence[PagePool],
    journal: Journal,
    rows: Sequence[PagedSequence],
    query_lens: Sequence[int],
    commit: bool = True,
) -> list[Copies]:
    """Extend the tables of ``rows`` by ``query_lens`` tokens in every group; returns each group's copies.

    Raises OutOfPagesError or PoolGrowthError with nothing changed. Without ``commit`` everything is taken back anyway
    (but pools may have another size): a way to ask whether there is room.
    """
    copies = _reserve(pools, journal, rows, query_lens, commit, last_try=False)
    if copies is None:
        # Page ids that were given up can't be rolled back, so it is done between two tries.
        for pool in [*pools[0].budget.pools]:
            pool.give_back()
        copies = _reserve(pools, journal, rows, query_lens, commit, last_try=True)
        assert copies is not None
    return copies


def _reserve(
    pools: Sequence[PagePool],
    journal: Journal,
    rows: Sequence[PagedSequence],
    query_lens: Sequence[int],
    commit: bool,
    last_try: bool,
) -> list[Copies] | None:
    """One try; None if it takes what other groups grew ahead."""
    savepoint = journal.savepoint()
    done = False
    try:
        plans = [_plan(pool, group, rows, query_lens) for group, pool in enumerate(pools)]
        needed = [count for _, count in plans]
        if not find_room(pools, needed, last_try):
            return None
        fresh = allocate_each(pools, needed)
        copies = [_extend(writing, pages) for (writing, _), pages in zip(plans, fresh, strict=True)]
        done = commit
    finally:
        (journal.commit if done else journal.rollback)(savepoint)
    return copies


def _plan(pool: PagePool, group: int, rows: Sequence[PagedSequence], query_lens: Sequence[int]) -> tuple[Writing, int]:
    """Drop what can't be read any more; returns the tables that will be written and the pages that takes."""
    writing: Writing = []
    writers_of: dict[int, int] = {}
    needed = 0
    for row, count in zip(rows, query_lens, strict=True):
        if count:
            table = row.own(group)
            table.drop_unreadable(row.tokens)
            needed += table.pages_to_add(row.tokens + count)
            writing.append((table, row.tokens, count))
    for table, tokens, _ in writing:
        shared = table.tail_shared(tokens)
        if shared is not None:
            writers_of[shared] = writers_of.get(shared, 0) + 1
    # Of the holders of a shared page that write now, the last one may keep it if nobody else holds it.
    needed += sum(min(writers, pool.allocator.ref_count(page) - 1) for page, writers in writers_of.items())
    return writing, needed


def _extend(writing: Writing, fresh: list[int]) -> Copies:
    """Give the tables their new pages, shared ones that are written replaced."""
    taken = 0
    sources: list[int] = []
    targets: list[int] = []
    for table, tokens, count in writing:
        if table.tail_shared(tokens) is not None:
            targets.append(fresh[taken])
            sources.append(table.replace(tokens // table.page_size, fresh[taken]))
            taken += 1
        more = table.pages_to_add(tokens + count)
        if more:
            table.append(fresh[taken : taken + more])
            taken += more
    assert taken == len(fresh)
    return sources, targets
