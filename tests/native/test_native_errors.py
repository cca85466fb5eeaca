"""Wrong arguments are Python exceptions that say what is wrong, with the numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from native_case import Case, error


@pytest.fixture
def case(backend: Any) -> Case:
    case = Case([40, 20])
    case.fill(backend)
    return case


def ints(values: Any) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def test_a_block_table_entry_that_is_no_page(case: Case, backend: Any) -> None:
    table = case.metadata.block_table.tolist()
    for wrong in (-1, 1 << 20):
        table[1][1] = wrong
        case.metadata.block_table = ints(table)
        with pytest.raises(IndexError, match=rf"block_table\[1\]\[1\] is {wrong}, .* row 1 reads positions 0 to 19"):
            case.attend(backend)


def test_an_entry_nobody_reads_may_be_anything(case: Case, backend: Any) -> None:
    table = case.metadata.block_table.tolist()
    table[1][2] = 1 << 20
    case.metadata.block_table = ints(table)
    assert error(case.attend(backend), case.expected()) < 3e-5


@pytest.mark.parametrize(
    ("contexts", "query_lens", "message"),
    [
        ([1000, 20], [1, 1], r"context_lens\[0\] is 1000, but a block table of 8 pages of 16 tokens has room for "),
        ([-1, 20], [1, 1], r"context_lens\[0\] is -1"),
        ([40, 20], [1, 2], r"query_lens\[1\] is 2, but there are 1 queries"),
        ([40, 0], [1, 1], r"query_lens\[1\] is 1, but there are 1 queries and 0 tokens of context"),
    ],
)
def test_lengths_that_do_not_fit(case: Case, backend: Any, contexts: Any, query_lens: Any, message: str) -> None:
    case.metadata.context_lens, case.metadata.query_lens = ints(contexts), ints(query_lens)
    with pytest.raises(IndexError, match=message):
        case.attend(backend)


@pytest.mark.parametrize(
    ("table", "starts", "kind", "message"),
    [
        ("flat", [0, 9], IndexError, r"row_starts\[1\] is 9, but there are 8 page ids"),
        ("flat", [-1, 4], IndexError, r"row_starts\[0\] is -1, but there are 8 page ids"),
        ("flat", [0, 7], IndexError, r"context_lens\[1\] is 20, but a block table of 1 pages of 16 tokens has room"),
        ("flat", None, ValueError, r"block_table must be \(batch, max_pages\)"),
        ("rows", [0, 4], ValueError, r"with row_starts block_table must be \(page_ids,\)"),
    ],
)
def test_rows_that_begin_nowhere(
    case: Case, native: Any, table: str, starts: list[int] | None, kind: type[Exception], message: str
) -> None:
    metadata = case.metadata
    with pytest.raises(kind, match=message):
        native.attend(
            case.q, metadata.pages.keys, metadata.pages.values,
            metadata.page_ids if table == "flat" else metadata.block_table, metadata.context_lens, metadata.query_lens,
            scale=1.0, row_starts=None if starts is None else ints(starts),
        )  # fmt: skip


def test_numbers_only_known_at_evaluation(case: Case, backend: Any) -> None:
    """An index that is itself still to be computed is checked when it is there; the next call works again."""
    right, table = case.expected(), case.metadata.block_table
    case.metadata.block_table, case.metadata.known = table - 100, False
    output = case.attend(backend)
    with pytest.raises(RuntimeError, match=r"block_table\[0\]\[0\] is -"):
        mx.eval(output)
    case.metadata.pages.last_read = None
    case.metadata.block_table = table + 0
    assert error(case.attend(backend), right) < 3e-5


def test_slots_outside_the_pages(case: Case, backend: Any) -> None:
    slots = case.metadata.slot_mapping
    for wrong in (-2, 1 << 20):
        bad = slots.tolist()
        bad[1][3] = wrong
        case.metadata.slot_mapping = ints(bad)
        with pytest.raises(IndexError, match=rf"slot_mapping\[1\]\[3\] is {wrong}, but 7 pages of 16 tokens"):
            backend.write(case.metadata, case.keys, case.values)
    case.metadata.slot_mapping = slots + 1000
    backend.write(case.metadata, case.keys, case.values)
    with pytest.raises(RuntimeError, match=r"slot_mapping\[0\]\[0\] is \d+"):
        mx.eval(case.metadata.pages.written)


@pytest.mark.parametrize(("sources", "targets"), [([0], [7]), ([-1], [0])])
def test_pages_that_do_not_exist(case: Case, backend: Any, sources: Any, targets: Any) -> None:
    with pytest.raises(IndexError, match=r"page id (7|-1) at index 0 isn't one of pages 0 to 6"):
        backend.copy_pages(case.metadata.pages, sources, targets)
    with pytest.raises(ValueError, match="1 sources, but 0 targets"):
        backend.copy_pages(case.metadata.pages, sources, [])


def test_shapes_that_do_not_fit(case: Case, backend: Any) -> None:
    q = case.q
    for wrong, message in (
        (q[..., :56], r"same head_dim \(queries \(2,4,1,56\), key pages \(7,2,16,64\)"),
        (q[:, :3], r"multiple of kv heads \(queries \(2,3,1,64\)"),
        (q[:1], r"row_starts \(2\) must be \(batch,\)"),
        (q[0], r"queries must be"),
    ):
        case.q = wrong
        with pytest.raises(ValueError, match=message):
            case.attend(backend)
    case.q = q
    with pytest.raises(ValueError, match=r"sinks \(3\) must be one per head"):
        case.attend(backend, sinks=mx.zeros((3,)))
    with pytest.raises(ValueError, match="mask 'full' is not known"):
        case.attend(backend, "full")
    with pytest.raises(IndexError, match=r"the mask has 39 positions, but context_lens\[0\] is 40"):
        case.attend(backend, mx.zeros((1, 39)))
    with pytest.raises(ValueError, match=r"keys \(2,2,40,56\), values \(2,2,40,64\) and slot_mapping \(2,40\)"):
        backend.write(case.metadata, case.keys[..., :56], case.values)


def test_dtypes_without_kernels(case: Case, backend: Any) -> None:
    case.q = case.q.astype(mx.int32)
    with pytest.raises(ValueError, match=r"int32 \(2,4,1,64\) isn't float32, bfloat16 or float16"):
        case.attend(backend)


def test_kept_tokens_need_one_query(backend: Any) -> None:
    case = Case([40], queries=2, window=20, keep=4)
    case.fill(backend)
    with pytest.raises(IndexError, match=r"keep=4 needs one query per row, but query_lens\[0\] is 2"):
        case.attend(backend)


def test_an_instruction_set_that_is_not_there(native: Any) -> None:
    with pytest.raises(ValueError, match=r"there are no kernels for 'mmx' here; there are: .*base"):
        native.choose_isa("mmx")
