"""PageAllocator, Journal and PageTable on their own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.errors import InvariantError
from tinykv_plugin.journal import Journal
from tinykv_plugin.retention import Retention
from tinykv_plugin.table import PageTable


def make(capacity: int = 8) -> tuple[PageAllocator, Journal]:
    journal = Journal()
    allocator = PageAllocator(journal)
    allocator.resize(capacity)
    return allocator, journal


def state(allocator: PageAllocator) -> Any:
    return allocator._recycled[:], allocator._fresh, allocator._ref_counts[: allocator._fresh]


def test_pages_come_in_runs_and_recycled_ones_first() -> None:
    allocator, _ = make()
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(2) == [3, 4]
    allocator.release([0, 1, 2])
    assert allocator.allocate(4) == [0, 1, 2, 5]
    assert (allocator.used, allocator.free) == (6, 2)


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    allocator, _ = make()
    (page,) = allocator.allocate(1)
    allocator.share([page])
    assert allocator.ref_count(page) == 2
    assert allocator.release([page]) == 0
    assert allocator.release([page]) == 1
    assert allocator.free == 8


def test_misuse_is_caught() -> None:
    allocator, _ = make(2)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release([page])
    with pytest.raises(AssertionError, match="can't be shared"):
        allocator.share([page])
    with pytest.raises(AssertionError, match="3 pages asked of 2 free"):
        allocator.allocate(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda allocator: allocator._recycled.append(1), "is free"),
        (lambda allocator: allocator._recycled.extend([0, 0]), "twice"),
        (lambda allocator: allocator._ref_counts.__setitem__(0, 2), "ref_count 2 but 1 holders"),
        (lambda allocator: setattr(allocator, "_fresh", 99), "99 pages handed out of 8"),
    ],
)
def test_check_finds_damage(damage: Any, message: str) -> None:
    allocator, _ = make()
    allocator.allocate(3)
    allocator.release([2])
    allocator.check({0: 1, 1: 1})
    damage(allocator)
    with pytest.raises(InvariantError, match=message):
        allocator.check({0: 1, 1: 1})


def test_check_finds_a_holder_of_a_page_that_was_never_handed_out() -> None:
    allocator, _ = make()
    with pytest.raises(InvariantError, match="page 5 is held but was never handed out"):
        allocator.check({5: 1})


OPERATION = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 5)),
    st.tuples(st.just("share"), st.integers(0, 7)),
    st.tuples(st.just("release"), st.integers(0, 7)),
)


def perform(allocator: PageAllocator, operation: tuple[str, int]) -> None:
    kind, number = operation
    if kind == "allocate":
        allocator.allocate(min(number, allocator.free))
    elif allocator.ref_count(number):
        getattr(allocator, kind)([number])


@given(st.lists(OPERATION), st.lists(OPERATION), st.lists(OPERATION), st.booleans())
def test_rollback_restores_the_exact_state(
    before: list[Any], outer: list[Any], inner: list[Any], keep_inner: bool
) -> None:
    allocator, journal = make()
    for operation in before:
        perform(allocator, operation)
    at_start = state(allocator)
    outer_point = journal.savepoint()
    for operation in outer:
        perform(allocator, operation)
    in_between = state(allocator)
    inner_point = journal.savepoint()
    for operation in inner:
        perform(allocator, operation)
    if keep_inner:
        journal.commit(inner_point)
    else:
        journal.rollback(inner_point)
        assert state(allocator) == in_between
    journal.rollback(outer_point)
    assert state(allocator) == at_start
    assert not journal.is_open


def test_a_journal_costs_as_much_as_what_changed() -> None:
    allocator, journal = make(100_000)
    allocator.allocate(50_000)
    journal.savepoint()
    allocator.allocate(3)
    assert sum(len(args[0]) for _, args in journal._steps) <= 3


def table(page_size: int = 4, **retention: Any) -> tuple[PageTable, PageAllocator]:
    allocator, journal = make(64)
    return PageTable(allocator, journal, page_size, Retention(**retention)), allocator


def extend(pages: PageTable, allocator: PageAllocator, tokens: int) -> None:
    pages.append(allocator.allocate(pages.pages_to_add(tokens)))


def test_the_tail_page_is_filled_before_a_new_one_is_taken() -> None:
    pages, allocator = table(page_size=4)
    lengths = []
    tokens = 0
    for count in (3, 2, 4):
        tokens += count
        extend(pages, allocator, tokens)
        lengths.append([min(4, tokens - 4 * index) for index in range(len(pages.pages))])
    assert lengths == [[3], [4, 1], [4, 4, 1]]


@pytest.mark.parametrize(("page_size", "pages", "waste"), [(128, 8, 0.219), (16, 52, 0.038)])
def test_four_requests_of_200_tokens(page_size: int, pages: int, waste: float) -> None:
    per_request, allocator = table(page_size)
    extend(per_request, allocator, 200)
    assert 4 * len(per_request.pages) == pages
    assert 1 - 800 / (pages * page_size) == pytest.approx(waste, abs=0.0005)


def test_a_window_gives_whole_pages_back_but_for_kept_tokens_and_the_margin() -> None:
    pages, allocator = table(page_size=4, window=8, keep=4, rewind=3)
    extend(pages, allocator, 40)
    pages.drop_unreadable(40)
    # Next to the 4 kept tokens the one at position 40 reads from 37 on; the margin reaches back to 34, in page 8.
    assert [index for index, page in enumerate(pages.pages) if page >= 0] == [0, 8, 9]
    assert pages.first_position == 32
    pages.check(40, 64)
    assert allocator.used == 3


def test_sharers_of_a_table_are_counted_and_the_last_one_frees_it() -> None:
    pages, allocator = table()
    extend(pages, allocator, 9)
    pages.holders += 1
    copy = pages.owned()
    assert copy is not pages
    assert copy.pages == pages.pages
    assert (pages.holders, copy.holders) == (1, 1)
    assert copy.tail_shared(9) == copy.pages[2]
    assert pages.release() == 0
    assert copy.tail_shared(9) is None
    assert copy.release() == 3
    assert allocator.used == 0


def test_a_shared_table_must_not_be_changed() -> None:
    pages, allocator = table()
    pages.holders += 1
    with pytest.raises(AssertionError, match="shared table"):
        extend(pages, allocator, 1)


def test_opening_a_table_at_a_floor_holds_what_is_behind_it() -> None:
    pages, allocator = table(page_size=4, window=8, keep=4)
    pages.open_at(34, 40, allocator.allocate(pages.pages_from(34, 40)))
    assert [index for index, page in enumerate(pages.pages) if page >= 0] == [0, 8, 9]
    assert pages.first_position == 34
    assert allocator.used == 3
