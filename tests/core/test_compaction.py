"""Pages move together: what one cache group doesn't use, wherever it lies, is there for another one."""

from __future__ import annotations

import copy
import random
from array import array
from typing import Any

import pytest
from bookkeeping import Fault, Faults, held, make_session, tensor
from crowded import check_alone, check_batch, small_model

from tinykv_plugin.compaction import compact
from tinykv_plugin.errors import OutOfPagesError, PoolGrowthError
from tinykv_plugin.pool import find_room
from tinykv_plugin.session import PagedSession

# Pages moved, pools shrunk and grown, pages allocated.
FAULT_POINTS = 10

PAGE = 32  # bytes of a page of one of make_session's layers


def append(caches: list[Any], tokens: list[int]) -> None:
    for cache in caches:
        cache.update_and_fetch(tensor([tokens]), tensor([tokens]))


def request(session: PagedSession, tokens: list[int]) -> list[Any]:
    caches = session.make_cache()
    append(caches, tokens)
    return caches


def long_request(session: PagedSession, stop: int, caches: list[Any] | None = None) -> list[Any]:
    """One of the tokens 100, 101 and so on, in chunks of 4: its window takes three pages at most."""
    caches = caches or session.make_cache()
    for start in range(100 + caches[0].offset, stop, 4):
        append(caches, list(range(start, start + 4)))
    return caches


def verify(caches: list[Any], tokens: list[int]) -> None:
    for cache in caches:
        assert cache.offset == len(tokens)
        first = cache._row.tables[cache._layer.group].retention.first_needed(len(tokens))
        assert [held(cache, position) for position in range(first, len(tokens))] == tokens[first:]


def scattered(faults: Faults | None = None) -> tuple[PagedSession, dict[int, list[Any]]]:
    """A session whose budget is booked, with live requests at high ids in both pools and free pages below them."""
    session = make_session(faults or Faults(), windows=(None, 6), max_pages=1000, memory=32 * PAGE, rewind=0)
    live = {start: request(session, list(range(start, start + 8))) for start in range(0, 80, 10)}
    for start in (0, 10, 20, 40, 60):
        del live[start]
    session.collect()
    assert session.budget.left == 0
    assert [pool.allocator.end for pool in session.pools] == [16, 16]
    assert [pool.allocator.used for pool in session.pools] == [6, 6]
    return session, live


def test_live_pages_move_to_low_ids_and_the_rest_goes_to_whom_needs_it() -> None:
    session, live = scattered()
    long = long_request(session, 140)  # ten pages without a window: what is free there
    assert session.stats().page_moves == 0
    long_request(session, 168, long)  # and all but the three that the window takes
    assert session.stats().page_moves > 0
    verify(long, list(range(100, 168)))
    assert [pool.allocator.used for pool in session.pools] == [6 + 17, 6 + 3]
    assert session.budget.left == 0, "to the last page"
    for start, caches in live.items():
        verify(caches, list(range(start, start + 8)))
    session.check()


def test_only_pages_beyond_the_new_end_move() -> None:
    session, live = scattered()
    full, window = session.pools
    before = {start: [table.pages[:] for table in caches[0]._row.tables] for start, caches in live.items()}
    compact(session.budget, {full: 14})
    # 26 pages are needed, and of the 6 that are left each pool gets its share.
    assert (full.allocator.capacity, window.allocator.capacity) == (16, 6 + 6 * 6 // 26)
    for start, caches in live.items():
        now = [table.pages for table in caches[0]._row.tables]
        assert now[0] == before[start][0]
        assert all((a == b) == (b < 7) for a, b in zip(now[1], before[start][1], strict=True))
    assert (full.moves, window.moves) == (0, 5)
    session.check()
    compact(session.budget, {full: 14})
    assert session.stats().page_moves == 5, "there is nothing left to move"


def test_stored_prompts_give_way_to_some_room_before_pools_are_resized() -> None:
    """Else the pools of a full prefix cache would be resized at every other step."""
    session = make_session(Faults(), windows=(None, 6), max_pages=1000, memory=320 * PAGE, rewind=0)
    for start in range(0, 2000, 10):
        session.prefix.insert(list(range(start, start + 8)), request(session, list(range(start, start + 8))))
    session.collect()
    full, window = session.pools
    assert session.budget.left < 2 * PAGE
    sizes = full.allocator.capacity, window.allocator.capacity
    compact(session.budget, {full: full.allocator.free + 4})
    assert (full.allocator.capacity, window.allocator.capacity) == sizes, "eviction did"
    needed = full.allocator.free + 40
    compact(session.budget, {full: needed})
    assert window.allocator.capacity < sizes[1]
    assert find_room([full], [needed], last_try=True)
    session.check()


def test_every_holder_follows() -> None:
    session, live = scattered()
    fork = copy.deepcopy(live[50])
    apart = copy.deepcopy(live[70])
    append(apart, [1, 2, 3])
    session.prefix.insert(list(range(50, 58)), live[50])
    session.prefix.insert(list(range(30, 38)), live[30])
    kept = [pool.allocator.kept for pool in session.pools]
    batch = [caches[0].merge(list(caches)) for caches in zip(live[30], live[50], strict=True)]
    append_rows(batch, [[38], [58]])
    compact(session.budget, {session.pools[0]: 20})
    assert session.stats().page_moves > 0
    session.check()
    append_rows(batch, [[39], [59]])
    for row, tokens in ((0, [*range(30, 40)]), (1, [*range(50, 60)])):
        verify([cache.extract(row) for cache in batch], tokens)
    verify(fork, list(range(50, 58)))
    verify(apart, [*range(70, 78), 1, 2, 3])
    assert [pool.allocator.kept for pool in session.pools] == kept
    found, rest = session.prefix.fetch([*range(50, 58), 0])
    assert rest == [0]
    verify(found, list(range(50, 58)))


def append_rows(batch: list[Any], tokens: list[list[int]]) -> None:
    for cache in batch:
        cache.update_and_fetch(tensor(tokens), tensor(tokens))


def test_a_pass_under_way_goes_on_in_the_new_places() -> None:
    """Two requests whose passes overlap, as those of two threads may: the second one needs pages to be moved."""
    session, live = scattered()
    first, second = live[70]
    first.update_and_fetch(tensor([[78]]), tensor([[78]]))
    step = first._row.step
    slots = [group.slots().tolist() for group in step.groups]
    tables = [group.block_rows().tolist() for group in step.groups]
    compact(session.budget, {session.pools[0]: 20})
    assert [group.slots().tolist() for group in step.groups] != slots
    assert [group.block_rows().tolist() for group in step.groups] != tables
    second.update_and_fetch(tensor([[78]]), tensor([[78]]))
    verify(live[70], list(range(70, 79)))
    session.check()


def test_rows_of_running_batches_are_read_from_their_new_places() -> None:
    """Also those that open no page in the step that moves them, and batches that pause meanwhile."""
    session, live = scattered()
    append(live[70], [78])
    append(live[50], [58])
    compact(session.budget, {session.pools[0]: 20})
    for start in (70, 50):
        append(live[start], [start + 9])
        verify(live[start], list(range(start, start + 10)))
        groups = live[start][0]._row.tables
        batches = [batch for batch in session.batches.recent if batch.rows[0]() is live[start][0]._row]
        for group, table in enumerate(groups):
            assert batches[0].block_tables[group].rectangle()[0].tolist() == table.pages.tolist()


def test_another_models_pages_move_too() -> None:
    """A model and its draft model share a budget; what a detached one still holds stays, but for its unused end."""
    session, live = scattered()
    target = make_session(Faults(), windows=(None,), max_pages=1000, budget=session.budget)
    append(long := target.make_cache(), list(range(100, 164)))  # 16 of the 20 free pages
    verify(long, list(range(100, 164)))
    assert session.stats().page_moves > 0
    for start, caches in live.items():
        verify(caches, list(range(start, start + 8)))
    session.check()
    session.close()
    moves = session.stats().page_moves
    del live[70]
    session.collect()
    end = session.pools[0].allocator.end
    append(long, list(range(164, 180)))
    assert (session.stats().page_moves, session.pools[0].allocator.capacity) == (moves, end)
    with pytest.raises(OutOfPagesError):
        append(long, list(range(180, 280)))
    verify(long, list(range(100, 180)))
    target.check()


def test_pages_that_somebody_unknown_holds_stay() -> None:
    session, live = scattered()
    full, window = session.pools
    page = live[70][0]._row.tables[0].pages[0]
    full.allocator.share([page])
    compact(session.budget, {window: 20})
    assert live[70][0]._row.tables[0].pages == array("i", [page, 0])
    assert full.allocator.capacity == full.allocator.end == page + 1
    full.allocator.release([page])
    session.check()
    for start, caches in live.items():
        verify(caches, list(range(start, start + 8)))


@pytest.mark.parametrize("at", range(FAULT_POINTS + 1))
def test_a_failure_on_the_way_leaves_everything_readable(at: int) -> None:
    """At each page that is copied, at each pool that shrinks and at the growth that it is all for."""
    faults = Faults()
    session, live = scattered(faults)
    long = long_request(session, 140)
    faults.at = at
    try:
        long_request(session, 144, long)
        failed = False
    except (PoolGrowthError, Fault):
        failed = True
    assert failed == (faults.at is None), "a failure was swallowed"
    faults.at = None
    session.check()
    assert failed == (at < FAULT_POINTS)
    verify(long, list(range(100, 140 if failed else 144)))
    for start, caches in live.items():
        verify(caches, list(range(start, start + 8)))
    long_request(session, 168, long)
    verify(long, list(range(100, 168)))
    session.check()


def test_a_failing_copy_on_write_takes_the_pass_back() -> None:
    faults = Faults()
    session = make_session(faults, prefix_cache=0.0)
    caches = request(session, list(range(6)))
    fork = copy.deepcopy(caches)
    used = session.stats().pages_used
    faults.at = 2 * len(session.pools) - 1  # after the allocations of all groups, in the middle of the copies
    with pytest.raises(PoolGrowthError, match="can't go from"):
        append(caches, [6])
    session.check()
    assert session.stats().pages_used == used
    append(caches, [6])
    append(fork, [7])
    verify(caches, [*range(7)])
    verify(fork, [*range(6), 7])


@pytest.mark.parametrize("seed", range(40))
def test_what_fits_alone_fits_whatever_is_stored(seed: int) -> None:
    """With an empty prefix cache a budget is just enough: then it is whatever is cached, and wherever it lies."""
    rng = random.Random(seed)
    windows: Any = rng.choice([(None, 6), (None, None, 6), (None, 6, 6, 6), (6, 10, None), (None, 4, 20)])
    tokens = list(range(1000, 1000 + rng.randrange(5, 90)))
    chunk = rng.choice([3, 7, 100])
    memory = least_bytes(windows, tokens, chunk) + rng.choice([0, 0, 1, 64, 200])
    session = make_session(Faults(), windows=windows, max_pages=10**6, memory=memory)
    for stored in range(rng.randrange(1, 14)):
        known = tokens[: rng.randrange(1, len(tokens) + 1)] if rng.random() < 0.4 else []
        more = [5000 + 100 * stored + rng.randrange(50) for _ in range(rng.randrange(40))]
        fill_and_store(session, known + more, rng)
    caches, rest = session.prefix.fetch(tokens) if rng.random() < 0.7 else (session.make_cache(), tokens)
    for start in range(0, len(rest), chunk):
        append(caches, rest[start : start + chunk])
    verify(caches, tokens)
    session.check()


def fill_and_store(session: PagedSession, tokens: list[int], rng: random.Random) -> None:
    if not tokens:
        return
    caches, rest = session.prefix.fetch(tokens)
    try:
        chunk = rng.choice([1, 4, 100])
        for start in range(0, len(rest), chunk):
            append(caches, rest[start : start + chunk])
            if rng.random() < 0.3:
                session.prefix.insert(tokens[: caches[0].offset], caches)
    except OutOfPagesError:
        pass
    session.prefix.insert(tokens[: caches[0].offset], caches)


def least_bytes(windows: Any, tokens: list[int], chunk: int) -> int:
    """The smallest budget that ``tokens`` fit into in chunks, wherever these begin."""

    def fits(memory: int) -> bool:
        for first in range(1, min(chunk, len(tokens)) + 1) if chunk < 100 else [len(tokens)]:
            session = make_session(Faults(), windows=windows, max_pages=10**6, memory=memory)
            caches = session.make_cache()
            try:
                append(caches, tokens[:first])
                for start in range(first, len(tokens), chunk):
                    append(caches, tokens[start : start + chunk])
            except OutOfPagesError:
                return False
        return True

    low, high = 0, 1 << 14
    assert fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("gemma3_text", {}), ("gpt_oss", {}), ("gemma3_text", {"bits": 8, "fields": {"head_dim": 32}})],
)
def test_a_request_that_fits_alone_passes_beside_stored_prompts(kind: str, settings: dict[str, Any]) -> None:
    model = small_model(kind, **settings.pop("fields", {}))
    check_alone(model, attention="gather", **settings)


def test_a_batch_beside_stored_prompts_gets_the_same_tokens() -> None:
    check_batch(small_model("gemma3_text"), attention="gather")
