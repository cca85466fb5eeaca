"""The block table of a running batch, kept from step to step while rows join, leave, fork, trim and change places.

After every step it must be the one made afresh; and what kernels of earlier steps may still have to read must stand
where it stood.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from bookkeeping import Faults, check_block_table, make_session
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinykv_plugin import block_table
from tinykv_plugin.block_table import BlockTable
from tinykv_plugin.errors import CacheStateError
from tinykv_plugin.sequence import PagedSequence
from tinykv_plugin.step import GroupStep

BITS = 0b111


@dataclasses.dataclass
class Pending:
    """What a step's kernels read, should they run only now: the arrays they got, and each row's page ids then."""

    page_ids: mx.array
    row_starts: mx.array
    rows: list[dict[int, int]]

    def verify(self) -> None:
        page_ids = np.array(self.page_ids)
        for start, row in zip(np.array(self.row_starts), self.rows, strict=True):
            assert {page: int(page_ids[start + page]) for page in row} == row


class BatchesMachine(RuleBasedStateMachine):
    """Two batches take turns, as prompts and running rows do."""

    def __init__(self) -> None:
        super().__init__()
        self.session = make_session(Faults(), windows=(None, 6, None), max_pages=400)
        self.batches: list[list[PagedSequence]] = [[], []]
        self.pending: list[Pending] = []
        self.paused: list[PagedSequence] = []

    @rule(which=st.integers(0, 1), tokens=st.integers(1, 60), at=st.integers(0, 20))
    def join(self, which: int, tokens: int, at: int) -> None:
        row = self.session.new_sequence(None)
        self.session.begin([row], [tokens], tokens).finish_layer(BITS)
        self.batches[which].insert(min(at, len(self.batches[which])), row)

    @rule(which=st.integers(0, 1), keep=st.lists(st.integers(0, 20), max_size=8, unique=True))
    def leave_and_reorder(self, which: int, keep: list[int]) -> None:
        rows = self.batches[which]
        self.batches[which] = [rows[index] for index in keep if index < len(rows)]
        self.paused = [row for row in rows if row not in self.batches[which]]

    @rule(which=st.integers(0, 1))
    def come_back(self, which: int) -> None:
        self.batches[which] += self.paused
        self.paused = []

    @rule(which=st.integers(0, 1), index=st.integers(0, 20), to=st.integers(0, 1))
    def fork(self, which: int, index: int, to: int) -> None:
        if index < len(self.batches[which]):
            self.batches[to].append(self.batches[which][index].fork(1))

    @rule(which=st.integers(0, 1), index=st.integers(0, 20))
    def change_batch(self, which: int, index: int) -> None:
        if index < len(self.batches[which]):
            self.batches[1 - which].append(self.batches[which].pop(index))

    @rule(which=st.integers(0, 1), index=st.integers(0, 20), count=st.integers(1, 9))
    def trim(self, which: int, index: int, count: int) -> None:
        if index < len(self.batches[which]):
            row = self.batches[which][index]
            try:
                for bit in (1, 2, 4):
                    row.trim(bit, count)
            except CacheStateError:
                row.heal()

    @precondition(lambda self: any(self.batches))
    @rule(which=st.integers(0, 1), lens=st.none() | st.lists(st.integers(0, 9), min_size=30, max_size=30))
    def step(self, which: int, lens: list[int] | None) -> None:
        rows = self.batches[which]
        if not rows or len(rows) > 30:
            return
        counts = [1] * len(rows) if lens is None else lens[: len(rows)]
        step = self.session.begin(rows, counts, max(1, *counts))
        for group in step.groups:
            check_block_table(group)
            slots = group.slots()
            for row, table, context, count in zip(slots, group.tables, group.context_lens, counts, strict=True):
                places = [table.pages[p // 4] * 4 + p % 4 for p in range(context - count, context)]
                assert row.tolist() == [*places, *[-1] * (len(row) - count)]
            reach = [
                table.retention.first_needed(row.tokens) // 4 for table, row in zip(group.tables, rows, strict=True)
            ]
            readable = [
                {page: table.pages[page] for page in range(first, -(-context // 4))}
                for first, table, context in zip(reach, group.tables, group.context_lens, strict=True)
            ]
            self.pending.append(Pending(group.page_ids(), group.row_starts(), readable))
        step.finish_layer(BITS)

    @invariant()
    def kernels_to_come_find_what_they_were_given(self) -> None:
        self.pending = self.pending[-8:]
        for pending in self.pending:
            pending.verify()

    def teardown(self) -> None:
        self.session.check()


TestBatches = BatchesMachine.TestCase
TestBatches.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def rows() -> tuple[Any, list[PagedSequence]]:
    session = make_session(Faults(), windows=(None,), max_pages=4000)
    rows = [session.new_sequence(None) for _ in range(50)]
    for index, row in enumerate(rows):
        session.begin([row], [40 + index], 40 + index).finish_layer(1)
    return session, rows


def decode(session: Any, rows: list[PagedSequence]) -> BlockTable:
    step = session.begin(rows, [1] * len(rows), 1)
    step.groups[0].page_ids()
    step.finish_layer(1)
    table = step.groups[0]._table
    assert table is not None
    return table


def test_a_row_that_joins_leaves_or_forks_moves_no_other(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, running = rows
    decode(session, running)
    written: list[int] = []
    write = BlockTable._write
    monkeypatch.setattr(BlockTable, "_write", lambda self, index: (written.append(index), write(self, index))[1])
    for _ in range(4):  # all have a page to write to now
        table = decode(session, running)
    written.clear()
    array = table.device_page_ids()
    running.pop(7)
    for row in running:
        row.slots = max(row.slots, 0)
    opening = [index for index, row in enumerate(running) if row.slots == 0]
    assert decode(session, running) is table
    assert sorted(written) == opening
    written.clear()
    running.append(running[3].fork(1))
    opening = [index for index, row in enumerate(running) if row.slots == 0]
    assert decode(session, running) is table
    assert sorted(written) == opening
    assert 3 in opening
    assert table.device_page_ids() is array


def test_rows_that_grow_to_many_pages_keep_their_places(rows: Any) -> None:
    """Rows outgrow their places, and all of them the memory, many times over."""
    session, running = rows
    for count in range(120):
        table = decode(session, running)
        for row in running[:: 1 + count % 7]:
            row.slots = 0  # as if it had been asked for anew
        if count % 10 == 0:
            check_block_table(
                GroupStep([row.tables[0] for row in running], [row.tokens for row in running], [1] * 50, 1, table)
            )


def test_a_gpu_gets_new_memory_when_something_changed(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, running = rows
    monkeypatch.setattr(block_table, "writes_in_place", lambda: False)
    table = decode(session, running)
    before, was = table.device_page_ids(), np.array(table.device_page_ids())
    for _ in range(4):
        decode(session, running)
    assert table.device_page_ids() is not before
    assert np.array_equal(np.array(before), was)


def test_a_row_that_comes_back_is_written_anew(rows: Any) -> None:
    session, running = rows
    decode(session, running)
    for row in running:
        row.slots = 4 - row.tokens % 4  # none needs a page
    away = running.pop(7)
    decode(session, running)
    running.append(away)
    step = session.begin(running, [1] * len(running), 1)
    check_block_table(step.groups[0])
    step.finish_layer(1)
