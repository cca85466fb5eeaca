"""Writing and copying pages in place, and copying tokens out of them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_case import TOLERANCE, Case, error, new_tokens, wide
from tinykv_plugin.columns import visible
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.metadata import PagedKVMetadata
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.step import GroupStep

pytestmark = pytest.mark.checked


def held(pages: LayerPages) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What is in the pools after everything that was asked for."""
    mx.eval(pages.state())
    return wide(pages.keys), wide(pages.values)


def step_of(case: Case, query_lens: list[int], width: int) -> PagedKVMetadata:
    return PagedKVMetadata(case.pages, GroupStep(case.step.tables, list(case.contexts), query_lens, width))


def expected_pools(case: Case, query_lens: list[int], keys: mx.array, values: mx.array) -> list[np.ndarray[Any, Any]]:
    pools = list(held(case.pages))
    for row, (context, count) in enumerate(zip(case.contexts, query_lens, strict=True)):
        for new in range(count):
            position = context - count + new
            page = case.full_tables[row][position // case.page_size]
            for pool, tensor in zip(pools, (keys, values), strict=True):
                pool[page, :, position % case.page_size] = wide(tensor)[row, :, new]
    return pools


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim"), [(mx.float32, 64, 64), (mx.bfloat16, 80, 48), (mx.float16, 64, 128)]
)
def test_writes_are_in_place(backend: Any, dtype: Any, key_dim: int, value_dim: int) -> None:
    """Tokens of padded rows in their slots, everything else as it was, in the arrays that were there."""
    case = Case([20, 5, 33], 4, [4, 1, 3], key_dim=key_dim, value_dim=value_dim, dtype=dtype).fill(backend)
    keys, values = new_tokens(case, 4)
    right = expected_pools(case, [4, 1, 3], keys, values)
    before = case.pages.keys, case.pages.values
    backend.write(step_of(case, [4, 1, 3], 4), keys, values)
    assert (case.pages.keys, case.pages.values) == before
    for pool, expected in zip(held(case.pages), right, strict=True):
        np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_decode_steps_write_one_token_per_row(backend: Any, rows: int) -> None:
    case = Case(list(range(1, rows + 1)), page_size=8).fill(backend)
    keys, values = new_tokens(case, 1)
    right = expected_pools(case, [1] * rows, keys, values)
    backend.write(case.metadata, keys, values)
    for pool, expected in zip(held(case.pages), right, strict=True):
        np.testing.assert_array_equal(pool, expected)


def test_a_step_without_tokens_writes_nothing(backend: Any) -> None:
    case = Case([20, 5], 2, [2, 2]).fill(backend)
    before, _ = held(case.pages)
    keys, values = new_tokens(case, 2)
    nothing = step_of(case, [0, 0], 2)
    backend.write(nothing, keys, values)
    np.testing.assert_array_equal(held(case.pages)[0], before)
    assert case.pages.written is not None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_copies_of_pages(backend: Any, dtype: Any) -> None:
    """In order: a page that was a target is a source afterwards, and is overwritten once more."""
    case = Case([64, 48], dtype=dtype, value_dim=32, key_dim=64).fill(backend)
    sources, targets = [0, 1, 2, 4, 0], [1, 2, 3, 0, 4]
    pools = held(case.pages)
    for pool in pools:
        for source, target in zip(sources, targets, strict=True):
            pool[target] = pool[source]
    backend.copy_pages(case.pages, sources, targets)
    for pool, expected in zip(held(case.pages), pools, strict=True):
        np.testing.assert_array_equal(pool, expected)


def test_pools_grow_and_shrink_with_what_is_in_them(backend: Any) -> None:
    case = Case([40, 40], layout="reversed").fill(backend)
    case.contexts = [40]
    before = wide(case.pages.keys)
    for size in (20, 3, 3, 9):
        backend.resize(case.pages, size)
        assert case.pages.num_pages == size
        np.testing.assert_array_equal(wide(case.pages.keys)[: min(size, 3)], before[: min(size, 3)])
        mx.eval(case.pages.keys)
        assert np.asarray(memoryview(case.pages.keys)).flags.c_contiguous
    backend.resize(case.pages, 0)
    assert case.pages.keys is None and case.pages.num_pages == 0


@pytest.mark.parametrize("options", [{}, {"window": 24}, {"window": 24, "keep": 4}])
def test_gather_copies_what_the_queries_may_see(backend: Any, options: dict[str, int]) -> None:
    """As the gather backend's own operations do, zeros where a row has no more tokens."""
    case = Case([50, 3, 0, 26], 1 if options.get("keep") else 2, **options).fill(backend)
    spans = [visible(case.step, row) for row in range(4)]
    keys, values = case.pages.copy_out(case.metadata, spans)
    for row, parts in enumerate(spans):
        positions = [position for start, stop in parts for position in range(start, stop)]
        for got, right in zip((keys, values), case.row(row), strict=True):
            np.testing.assert_array_equal(wide(got)[row, :, : len(positions)], right[:, positions])
            assert not np.any(wide(got)[row, :, len(positions) :])


@pytest.mark.parametrize("options", [{}, {"window": 24}])
def test_prefill_is_gathered_from_pages_written_in_place(backend: Any, options: dict[str, int]) -> None:
    case = Case([50, 20], 20, **options).fill(backend)
    got = case.attend(GatherBackend())
    assert error(got, case.expected()) < TOLERANCE[mx.float32]
    assert case.pages.last_read is not None


def test_the_gather_kernel_serves_rows_alone(backend: Any) -> None:
    case = Case([50], 30).fill(backend)
    assert error(case.attend(GatherBackend()), case.expected()) < TOLERANCE[mx.float32]


def test_keys_without_values(backend: Any) -> None:
    """A model that reads its values out of the keys stores none."""
    case = Case([20, 5], 2).fill(backend)
    pages = LayerPages(LayerSpec(2, 64, 0, mx.float32, mx.float32), 16)
    backend.resize(pages, case.num_pages)
    metadata = PagedKVMetadata(pages, GroupStep(case.step.tables, [20, 5], [20, 5], 20))
    keys = mx.random.normal((2, 2, 20, 64))
    backend.write(metadata, keys, mx.zeros((2, 2, 20, 0)))
    backend.copy_pages(pages, [case.full_tables[1][0]], [case.full_tables[0][1]])
    got, values = pages.copy_out(metadata, [[(0, 20)], [(0, 5)]])
    right = wide(keys)
    right[0, :, 16:20] = right[1, :, :4]
    np.testing.assert_array_equal(wide(got)[0], right[0])
    np.testing.assert_array_equal(wide(got)[1, :, :5], right[1, :, :5])
    assert values.shape == (2, 2, 20, 0)
