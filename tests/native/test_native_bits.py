"""A row's result is the same bit for bit alone, in any batch, with any number of threads and in any pages."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from native_case import Case, same_bits

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "base"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_and_in_a_batch(backend: Any, native: Any, isa: str, dtype: Any) -> None:
    if isa not in native.isas():
        pytest.skip(f"this processor or build has no {isa}")
    native.choose_isa(isa)
    for queries, query_lens in ((1, None), (6, [6, 1, 3, 6, 2]), (90, [90, 2, 90, 1, 17])):
        batch = Case([1500, 2, 513, 90, 600], queries, query_lens, 9, 3, dtype=dtype)
        batch.fill(backend)
        together = batch.attend(backend)
        for index in range(5):
            alone = batch.row(index)
            alone.refill(backend)
            assert same_bits(alone.attend(backend), together[index : index + 1, :, : alone.queries])


@pytest.mark.parametrize("queries", [1, 7, 100])
def test_any_number_of_threads(backend: Any, native: Any, queries: int) -> None:
    case = Case([3000, 600, 100], queries, None, 8, 2)
    case.fill(backend)
    results = []
    for threads in (1, 2, 3, 8):
        native.set_threads(threads)
        results.append(case.attend(backend))
        mx.eval(results[-1])
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("queries", [1, 40])
def test_any_page_size(backend: Any, queries: int) -> None:
    first = Case([1200, 77], queries, page_size=16)
    first.fill(backend)
    results = [first.attend(backend)]
    for page_size in (1, 100, 1024):
        case = Case([1200, 77], queries, page_size=page_size)
        case.fill(backend)
        case.q = first.q
        backend.write(case.metadata, first.keys, first.values)
        results.append(case.attend(backend))
    assert all(same_bits(results[0], other) for other in results[1:])
