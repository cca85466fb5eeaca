"""Reserving the pages of a forward pass for all its rows in all cache groups, or none."""

from __future__ import annotations

from collections.abc import Sequence

from .journal import Journal
from .pool import PagePool
from .sequence import PagedSequence

# Pages to copy in one group before the pass writes: from, to.
Copies = tuple[list[int], list[int]]


def reserve(
    pools: Sequence[PagePool],
    journal: Journal,
    rows: Sequence[PagedSequence],
    query_lens: Sequence[int],
    commit: bool = True,
) -> list[Copies]:
    """Extend the tables of ``rows`` by ``query_lens`` tokens in every group; returns each group's copies.

    Raises OutOfPagesError or PoolGrowthError with nothing changed. Without ``commit`` everything is taken back anyway
    (but for pools that grew): a way to ask whether there is room.
    """
    savepoint = journal.savepoint()
    done = False
    try:
        copies = [_reserve_group(pool, group, rows, query_lens) for group, pool in enumerate(pools)]
        done = commit
    finally:
        (journal.commit if done else journal.rollback)(savepoint)
    return copies


def _reserve_group(pool: PagePool, group: int, rows: Sequence[PagedSequence], query_lens: Sequence[int]) -> Copies:
    writing = []
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
    fresh = pool.allocate(needed) if needed else []
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
