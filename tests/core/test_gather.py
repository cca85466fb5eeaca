"""The gather backend against attention written out in float64 numpy, with every unused slot poisoned."""

from __future__ import annotations

from array import array
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tinykv_plugin import columns
from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.block_table import BlockTable
from tinykv_plugin.columns import MAX_RUNS
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.journal import Journal
from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.retention import Retention
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 16, 8


ALL = Retention()


class Case:
    """Rows of random K/V in shuffled pages; slots that hold no token hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        page_size: int = 4,
        dtype: mx.Dtype = mx.float32,
        retention: Retention = ALL,
        jumps: int | None = None,
    ) -> None:
        """``jumps``: places where a page doesn't follow the one before (None: a random order)."""
        rng = np.random.default_rng(sum(lengths) + page_size)
        self.backend = GatherBackend()
        spec = LayerSpec(KV_HEADS, KEY_DIM, VALUE_DIM, dtype, dtype)
        self.pages = LayerPages(spec, page_size)
        journal = Journal()
        allocator = PageAllocator(journal)
        total = sum(-(-length // page_size) for length in lengths) + 3
        allocator.resize(total)
        self.backend.resize(self.pages, total)
        assert self.pages.keys is not None
        assert self.pages.values is not None
        self.pages.keys = mx.full(self.pages.keys.shape, float("nan"), dtype)
        self.pages.values = mx.full(self.pages.values.shape, float("nan"), dtype)
        shuffled = rng.permutation(allocator.allocate(total)).tolist()
        if jumps is not None:
            shuffled = [page for part in np.array_split(range(total), jumps + 1) for page in reversed(part)]
        self.tables, self.keys, self.values = [], [], []
        for length in lengths:
            table = PageTable(allocator, journal, page_size, retention)
            count = -(-length // page_size)
            table.pages = array("i", [shuffled.pop() for _ in range(count)])
            self.tables.append(table)
            self.keys.append(rng.standard_normal((KV_HEADS, length, KEY_DIM)))
            self.values.append(rng.standard_normal((KV_HEADS, length, VALUE_DIM)))
            if length:
                self.write(table, length, length, mx.array(self.keys[-1])[None], mx.array(self.values[-1])[None])
        self.rng = rng

    def write(self, table: PageTable, context: int, count: int, keys: mx.array, values: mx.array) -> None:
        step = GroupStep([table], [context], [count], count)
        dtype = self.pages.spec.dtype
        self.backend.write(PagedKVMetadata(self.pages, step), keys.astype(dtype), values.astype(dtype))

    def step(self, query_lens: list[int], width: int) -> GroupStep:
        return GroupStep(self.tables, [keys.shape[1] for keys in self.keys], query_lens, width)


def reference(
    case: Case,
    queries: np.ndarray[Any, Any],
    query_lens: list[int],
    limit: int | None,
    sinks: np.ndarray[Any, Any] | None,
) -> np.ndarray[Any, Any]:
    """Attention of each row and head by the definition; padding queries are left as zeros."""
    out = np.zeros((*queries.shape[:3], VALUE_DIM))
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        start = keys.shape[1] - query_lens[row]
        for head in range(HEADS):
            for i in range(query_lens[row]):
                first = 0 if limit is None else max(0, start + i + 1 - limit)
                seen = slice(first, start + i + 1)
                scores = keys[head // 2, seen] @ queries[row, head, i] * 0.25
                logits = scores if sinks is None else np.append(scores, sinks[head])
                weights = np.exp(logits - logits.max())
                weights = (weights / weights.sum())[: len(scores)]
                out[row, head, i] = weights @ values[head // 2, seen]
    return out


LENGTHS = [[1], [7], [16], [5, 5], [1, 9, 16, 3], [300, 2, 5, 290, 70, 1], [64] * 5 + [200]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_decode(lengths: list[int], limit: int | None, sinks: bool, page_size: int) -> None:
    case = Case(lengths, page_size, retention=Retention(limit))
    queries = case.rng.standard_normal((len(lengths), HEADS, 1, KEY_DIM))
    sink = case.rng.standard_normal(HEADS) if sinks else None
    ones = [1] * len(lengths)
    out = case.backend.attend(
        mx.array(queries.astype(np.float32)),
        PagedKVMetadata(case.pages, case.step(ones, 1)),
        scale=0.25,
        mask=None,
        sinks=None if sink is None else mx.array(sink.astype(np.float32)),
    )
    np.testing.assert_allclose(np.array(out), reference(case, queries, ones, limit, sink), atol=2e-6)


@pytest.mark.parametrize("jumps", [0, 1, 5, MAX_RUNS - 1, MAX_RUNS])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("limit", [None, 21])
@pytest.mark.parametrize("length", [73, 80])
def test_pages_in_runs(
    monkeypatch: pytest.MonkeyPatch, jumps: int, large: bool, limit: int | None, length: int
) -> None:
    if large:
        monkeypatch.setattr(columns, "FLAT", 0)
    case = Case([length], 4, retention=Retention(limit), jumps=jumps)
    queries = case.rng.standard_normal((1, HEADS, 1, KEY_DIM))
    out = case.backend.attend(
        mx.array(queries.astype(np.float32)),
        PagedKVMetadata(case.pages, case.step([1], 1)),
        scale=0.25,
        mask=None,
        sinks=None,
    )
    np.testing.assert_allclose(np.array(out), reference(case, queries, [1], limit, None), atol=2e-6)


def test_where_pages_lie_is_found_anew_when_they_change() -> None:
    case = Case([12], 4, jumps=0)
    table = BlockTable()
    table.update(case.tables, ())
    queries = case.rng.standard_normal((1, HEADS, 1, KEY_DIM))
    for _ in range(2):
        step = GroupStep(case.tables, [12], [1], 1, table)
        out = case.backend.attend(
            mx.array(queries.astype(np.float32)), PagedKVMetadata(case.pages, step), scale=0.25, mask=None, sinks=None
        )
        np.testing.assert_allclose(np.array(out), reference(case, queries, [1], None, None), atol=2e-6)
        # The same tokens elsewhere; the pages they were in are poisoned.
        old = case.tables[0].pages[1]
        new = next(page for page in range(case.pages.num_pages) if page not in case.tables[0].pages)
        case.backend.copy_pages(case.pages, [old], [new])
        assert case.pages.keys is not None
        case.pages.keys[old] = float("nan")
        case.tables[0].pages[1] = new
        case.tables[0].revision += 1
        table.update(case.tables, [0])


@pytest.mark.parametrize("lengths", [lengths for lengths in LENGTHS if min(lengths) > 1 or len(lengths) > 1], ids=str)
@pytest.mark.parametrize("mask", ["causal", "window mask", "window cache"])
def test_prefill_with_padded_rows(lengths: list[int], mask: str) -> None:
    limit = None if mask == "causal" else 6
    case = Case(lengths, 4, retention=Retention(limit if mask == "window cache" else None))
    query_lens = [min(length, 1 + 3 * row) for row, length in enumerate(lengths)]
    width = max(query_lens)
    queries = case.rng.standard_normal((len(lengths), HEADS, width, KEY_DIM))
    out = case.backend.attend(
        mx.array(queries.astype(np.float32)),
        PagedKVMetadata(case.pages, case.step(query_lens, width)),
        scale=0.25,
        mask="causal" if mask == "causal" else PagedMask(6),
        sinks=None,
    )
    got = np.array(out)
    assert np.isfinite(got).all()
    expected = reference(case, queries, query_lens, limit, None)
    for row, count in enumerate(query_lens):
        np.testing.assert_allclose(got[row, :, :count], expected[row, :, :count], atol=2e-6)


def test_a_row_without_tokens_is_finite_and_disturbs_nobody() -> None:
    case = Case([0, 9], 4)
    queries = case.rng.standard_normal((2, HEADS, 2, KEY_DIM))
    out = case.backend.attend(
        mx.array(queries.astype(np.float32)),
        PagedKVMetadata(case.pages, case.step([0, 2], 2)),
        scale=0.25,
        mask="causal",
        sinks=None,
    )
    assert np.isfinite(np.array(out)).all()
    expected = reference(case, queries, [0, 2], None, None)
    np.testing.assert_allclose(np.array(out)[1], expected[1], atol=2e-6)


def test_array_masks_of_a_model_are_taken_row_by_row() -> None:
    case = Case([200, 6, 9], 4)
    queries = case.rng.standard_normal((3, HEADS, 1, KEY_DIM))
    mask = np.zeros((3, 1, 1, 200), dtype=np.float32)
    mask[:, :, :, 2] = -1e9
    for row, length in enumerate((200, 6, 9)):
        mask[row, :, :, length:] = -1e9
    out = case.backend.attend(
        mx.array(queries.astype(np.float32)),
        PagedKVMetadata(case.pages, case.step([1, 1, 1], 1)),
        scale=0.25,
        mask=mx.array(mask),
        sinks=None,
    )
    expected = np.zeros((3, HEADS, 1, VALUE_DIM))
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        seen = [position for position in range(keys.shape[1]) if position != 2]
        for head in range(HEADS):
            scores = keys[head // 2, seen] @ queries[row, head, 0] * 0.25
            weights = np.exp(scores - scores.max())
            expected[row, head, 0] = weights / weights.sum() @ values[head // 2, seen]
    np.testing.assert_allclose(np.array(out), expected, atol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 2e-3), (mx.bfloat16, 2e-2)])
def test_half_types(dtype: mx.Dtype, tolerance: float) -> None:
    case = Case([40, 3], 8, dtype)
    queries = case.rng.standard_normal((2, HEADS, 1, KEY_DIM))
    out = case.backend.attend(
        mx.array(queries).astype(dtype),
        PagedKVMetadata(case.pages, case.step([1, 1], 1)),
        scale=0.25,
        mask=None,
        sinks=None,
    )
    assert out.dtype == dtype
    expected = reference(case, queries, [1, 1], None, None)
    # Inputs, scores and output are each rounded to the half type.
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, atol=4 * tolerance)


def test_copied_pages_are_equal() -> None:
    case = Case([8], 4)
    assert case.pages.keys is not None
    source = case.tables[0].pages[0]
    target = next(page for page in range(case.pages.num_pages) if page not in case.tables[0].pages)
    case.backend.copy_pages(case.pages, [source], [target])
    assert mx.array_equal(case.pages.keys[source], case.pages.keys[target])
    assert not mx.any(mx.isnan(case.pages.keys[target]))
