"""Attention over pages against float64: dtypes, dims, heads, page sizes, lengths, windows, masks, sinks."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from native_case import TOLERANCE, Case, error, same_bits

from tinykv_plugin.metadata import PagedMask

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
NAMES = {mx.float32: "float32", mx.bfloat16: "bfloat16", mx.float16: "float16"}
# Every dim with every dtype, the page sizes, heads and numbers of queries in turn.
SIZES = itertools.cycle((1, 16, 48, 64, 256, 1024, 7))
HEADS = itertools.cycle(((1, 1), (4, 1), (9, 3), (8, 8), (14, 2)))
QUERIES = itertools.cycle((1, 1, 2, 5, 40))
DIMS = ((32, 0), (40, 0), (64, 0), (72, 64), (80, 0), (96, 128), (128, 0), (192, 128), (256, 0), (576, 512))
GRID = [
    pytest.param(dim, dtype, next(SIZES), next(HEADS), next(QUERIES), id=f"{dim[0]}-{NAMES[dtype]}")
    for dim in DIMS
    for dtype in DTYPES
]


def check(case: Case, backend: Any, mask: Any = "causal", sinks: Any = None, **more: Any) -> None:
    case.fill(backend)
    got = case.attend(backend, mask, sinks, **more)
    assert got.dtype == case.dtype
    assert error(got, case.expected(mask, sinks, **more)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(("dims", "dtype", "page_size", "heads", "queries"), GRID)
def test_shapes(backend: Any, dims: Any, dtype: Any, page_size: int, heads: Any, queries: int) -> None:
    check(Case([77, 1, 300], queries, None, *heads, *dims, page_size, dtype), backend)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "base"])
def test_instruction_sets(backend: Any, native: Any, isa: str) -> None:
    if isa not in native.isas():
        pytest.skip(f"this processor or build has no {isa}")
    native.choose_isa(isa)
    for dtype, queries in itertools.product(DTYPES, (1, 3, 30)):
        check(Case([130, 40], queries, None, 6, 2, 72, 40, 16, dtype), backend)


@pytest.mark.parametrize("contexts", [[0], [1, 0, 16], [511, 512, 513], [5000], [64, 63, 65, 128]])
@pytest.mark.parametrize("queries", [1, 4])
def test_lengths(backend: Any, contexts: list[int], queries: int) -> None:
    check(Case(contexts, queries), backend)


@pytest.mark.parametrize("queries", [1, 2, 8, 100])
@pytest.mark.parametrize("window", [1, 16, 100, 600])
def test_windows(backend: Any, queries: int, window: int) -> None:
    check(Case([700, 100, 1300], queries, window=window), backend)


def test_a_mask_narrows_the_window(backend: Any) -> None:
    check(Case([300, 50], 20, window=100), backend, PagedMask(30))
    check(Case([300, 50], 20), backend, PagedMask(30))
    check(Case([300, 50], 1, window=30), backend, PagedMask(100))
    check(Case([300, 50], 1, window=60, keep=4), backend, PagedMask(30))


@pytest.mark.parametrize("keep", [1, 4, 17])
@pytest.mark.parametrize("context", [20, 60, 61, 700, 1600])
def test_kept_tokens(backend: Any, keep: int, context: int) -> None:
    check(Case([context, 3], window=60, keep=keep), backend, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("queries", [1, 30])
def test_sinks(backend: Any, dtype: Any, queries: int) -> None:
    sinks = mx.array([-3.0, 0.0, 2.5, 30.0]).astype(dtype)
    check(Case([100, 31], queries, dtype=dtype), backend, sinks=sinks)


def test_softcap(backend: Any) -> None:
    for queries in (1, 30):
        check(Case([100, 31], queries), backend, softcap=0.7)
        check(Case([100, 31], queries), backend, softcap=50.0)


def test_rows_may_begin_anywhere(backend: Any, native: Any) -> None:
    """A block table as a rectangle, and its rows in any order with gaps between them: the same bits."""
    case = Case([600, 20, 33], queries=2)
    case.fill(backend)
    metadata, pages = case.metadata, case.metadata.pages
    counts = [38, 2, 3]
    flat, starts = np.full(100, -1, dtype=np.int32), [60, 3, 57]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        flat[start : start + count] = np.array(metadata.block_table)[row, :count]
    options = {"scale": case.scale, "causal": True}
    lens = metadata.context_lens, metadata.query_lens
    expected, _ = native.attend(case.q, pages.keys, pages.values, metadata.block_table, *lens, **options)
    got, _ = native.attend(
        case.q, pages.keys, pages.values, mx.array(flat), *lens, row_starts=mx.array(starts, dtype=mx.int32), **options
    )
    assert same_bits(got, expected)


def test_padding_gives_zeros(backend: Any) -> None:
    case = Case([100, 31, 7], 9, query_lens=[9, 2, 0])
    check(case, backend)
    got = case.attend(backend)
    assert not got[1, :, 2:].any().item()
    assert not got[2].any().item()


@pytest.mark.parametrize("queries", [1, 3, 30])
def test_without_causality(backend: Any, queries: int) -> None:
    check(Case([100, 31], queries), backend, None)


@pytest.mark.parametrize("shape", [(2, 4, 30, 100), (1, 1, 30, 120), (30, 100), (2, 1, 1, 100)])
def test_array_masks(backend: Any, shape: tuple[int, ...]) -> None:
    additive = mx.random.normal(shape, key=mx.random.key(1))
    boolean = additive > 0
    for mask in (additive, boolean, mx.where(boolean, additive, -mx.inf)):
        check(Case([100, 60], 30), backend, mask)
    check(Case([100, 60], 30), backend, mx.zeros(shape, mx.bool_))


def test_large_scores_stay_finite(backend: Any) -> None:
    for queries, factor in itertools.product((1, 30), (1e2, -1e2)):
        case = Case([600], queries)
        case.fill(backend)
        case.q, case.keys = case.q * factor, case.keys * 1e2
        backend.write(case.metadata, case.keys, case.values)
        assert error(case.attend(backend), case.expected()) < 2e-3


def test_a_nan_that_is_seen_shows(backend: Any) -> None:
    for queries in (1, 30):
        case = Case([100, 100], queries)
        case.fill(backend)
        case.keys[0, 0, 50, 3] = mx.nan
        backend.write(case.metadata, case.keys, case.values)
        got = case.attend(backend)
        assert mx.all(mx.isnan(got[0, :2])).item()
        assert mx.all(mx.isfinite(got[0, 2:])).item()
        assert mx.all(mx.isfinite(got[1])).item()


def test_queries_may_have_any_strides_and_dtype(backend: Any) -> None:
    case = Case([100, 31], 5)
    case.fill(backend)
    right = case.expected()
    q = case.q
    for other in (q.transpose(0, 2, 1, 3), q.transpose(0, 1, 3, 2), q.transpose(3, 2, 1, 0)):
        axes = {2: (0, 2, 1, 3), 3: (0, 1, 3, 2), 0: (3, 2, 1, 0)}
        key = 2 if other.shape == (2, 5, 4, 64) else 3 if other.shape == (2, 4, 64, 5) else 0
        case.q = mx.contiguous(other).transpose(*axes[key])
        assert error(case.attend(backend), right) < 3e-5
    case.q = q.astype(mx.bfloat16)
    assert case.attend(backend).dtype == mx.bfloat16
    assert error(case.attend(backend), case.expected()) < 1.6e-2
