"""Attention by the kernels as they ship, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_case import TOLERANCE, Case, error, same_bits
from tinykv_plugin.metadata import PagedMask

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
EDGES = [0, 1, 15, 16, 17, 128, 511, 512, 513]


def close(case: Case, got: mx.array, **options: Any) -> None:
    assert got.dtype == case.dtype
    assert error(got, case.expected(**options)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("dtype", "dim", "page_size", "group", "contexts"),
    [
        (F32, 64, 16, 2, EDGES),
        (F16, 128, 32, 4, [700, 3]),
        (BF16, 80, 8, 1, [33, 0, 514]),
        (F32, 128, 32, 3, EDGES[:8]),
        (BF16, 64, 64, 7, EDGES[1:8]),
        (F16, 96, 256, 5, EDGES[2:3]),
        (F32, 112, 16, 1, [1, 200]),
        (BF16, 192, 128, 8, [600]),
        (F32, 256, 32, 4, [40, 513]),
        (F16, 512, 16, 2, [70]),
        (F32, 32, 8, 16, [25, 24]),
        (F32, 160, 20, 2, [61]),
        (F32, 16, 4, 2, [9]),
        (F32, 64, 1024, 1, [1025, 1023]),
        (F32, 64, 32, 1, [5000]),
    ],
)
def test_dtypes_dims_pages_and_groups(
    backend: Any, dtype: Any, dim: int, page_size: int, group: int, contexts: list[int]
) -> None:
    heads = 1 if max(contexts) > 1000 else 2
    case = Case(contexts, query_heads=heads * group, kv_heads=heads, key_dim=dim, page_size=page_size, dtype=dtype)
    close(case, case.fill(backend).attend(backend))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (576, 512)])
def test_values_of_another_dim(backend: Any, key_dim: int, value_dim: int) -> None:
    case = Case([65, 30], query_heads=3, kv_heads=1, key_dim=key_dim, value_dim=value_dim).fill(backend)
    close(case, case.attend(backend))


def test_batches_on_both_sides_of_eight_rows(backend: Any) -> None:
    """Inputs of fewer than 8 elements arrive in another address space; rows don't feel their neighbours."""
    contexts = [600, 5, 16, 40, 1, 17, 90, 33, 64]
    nine = Case(contexts).fill(backend)
    whole = nine.attend(backend)
    close(nine, whole)
    for batch in (1, 7, 8):
        part = Case(contexts).fill(backend)
        part.step = type(part.step)(part.step.tables[:batch], contexts[:batch], [1] * batch, 1)
        part.metadata = type(part.metadata)(nine.pages, part.step)
        part.q = nine.q[:batch]
        got = part.attend(backend)
        assert same_bits(got, whole[:batch])


@pytest.mark.parametrize("queries", [2, 5, 8])
def test_drafts(backend: Any, queries: int) -> None:
    """Several query tokens, fewer in some rows; one row begins with them."""
    case = Case([520, queries, 30], queries, [queries, queries, 1]).fill(backend)
    close(case, case.attend(backend))
    close(case, case.attend(backend, mask=None), mask=None)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [1, 24, 530])
def test_windows(backend: Any, window: int, queries: int) -> None:
    """Pages behind a window are gone: their entries of the block table are -1."""
    case = Case([1100, 24, 25, 3], queries, window=window).fill(backend)
    close(case, case.attend(backend))


def test_a_window_skips_the_parts_before_it(backend: Any, device: Any) -> None:
    case = Case([5000], window=40, kv_heads=1, query_heads=1).fill(backend)
    if device is not None:
        device.keep_launches = True
    close(case, case.attend(backend))
    if device is not None:
        (launch,) = (launch for launch in device.launches if launch.kernel == "tinykv_attend")
        assert launch.counts.threadgroups == 1


def test_a_window_of_the_mask(backend: Any) -> None:
    case = Case([70, 9], 2).fill(backend)
    mask = PagedMask(20)
    close(case, case.attend(backend, mask=mask), mask=mask)


def test_kept_tokens(backend: Any) -> None:
    case = Case([700, 40, 41, 3], window=40, keep=4).fill(backend)
    close(case, case.attend(backend))
    mask = PagedMask(20)  # a model that looks back less far than its cache
    close(case, case.attend(backend, mask=mask), mask=mask)


@pytest.mark.parametrize("queries", [1, 2])
def test_sinks(backend: Any, queries: int) -> None:
    """A row without a token has the sink alone, and a sink far above all scores leaves nothing for them."""
    case = Case([600, 20, 0], queries).fill(backend)
    sinks = mx.array([0.5, -3.0, 40.0, -90.0])
    close(case, case.attend(backend, sinks=sinks), sinks=sinks)
    short = Case([20], queries, query_heads=16, kv_heads=1).fill(backend)
    sinks = mx.arange(16, dtype=F32).astype(F16)
    close(short, short.attend(backend, sinks=sinks), sinks=sinks)


def test_softcap(backend: Any) -> None:
    case = Case([600, 20], 2).fill(backend)
    case.q = case.q * 30
    close(case, case.attend(backend, softcap=5.0), softcap=5.0)


@pytest.mark.parametrize("shape", [(3, 4, 2, 600), (3, 1, 2, 600), (1, 1, 1, 600), (2, 600)])
def test_masks(backend: Any, shape: tuple[int, ...]) -> None:
    """Added and boolean ones, broadcast along any axis; some queries see nothing."""
    case = Case([600, 17, 2], 2).fill(backend)
    rng = np.random.default_rng(5)
    added = rng.standard_normal(shape).astype(np.float32)
    boolean = rng.random(shape) < 0.5
    boolean[..., :3] = False
    for array in (added, boolean):
        mask = mx.array(array)
        close(case, case.attend(backend, mask=mask), mask=mask)


@pytest.mark.parametrize("layout", ["reversed", "shared"])
def test_layouts_of_pages(backend: Any, layout: str) -> None:
    case = Case([64, 100, 80], layout=layout).fill(backend)
    close(case, case.attend(backend))


def test_page_sizes_do_not_change_a_bit(backend: Any) -> None:
    """Where tokens lie decides nothing: parts and the order of sums depend on positions alone."""
    results = []
    for page_size in (8, 32, 64):
        case = Case([513, 90], page_size=page_size)
        keys = [mx.random.normal((2, 2, 513, 64), key=mx.random.key(seed)) for seed in range(2)]
        backend.resize(case.pages, case.num_pages)
        case.q = mx.random.normal((2, 4, 1, 64), key=mx.random.key(2))
        every = type(case.step)(case.step.tables, [513, 90], [513, 90], 513)
        backend.write(type(case.metadata)(case.pages, every), *keys)
        results.append(case.attend(backend))
    assert all(same_bits(a, b) for a, b in itertools.pairwise(results))


def test_strided_queries(backend: Any) -> None:
    """A model's queries are a transposed view of (batch, tokens, heads, dim)."""
    case = Case([40, 9], 2).fill(backend)
    case.q = mx.random.normal((2, 2, 4, 64)).transpose(0, 2, 1, 3)
    close(case, case.attend(backend))


def test_infinite_scores_are_the_same_as_in_mlx(backend: Any) -> None:
    """A mask of minus infinity is as if the token weren't there."""
    case = Case([20]).fill(backend)
    mask = mx.where(mx.arange(20) < 7, -mx.inf, 0.0)
    close(case, case.attend(backend, mask=mask), mask=mask)
