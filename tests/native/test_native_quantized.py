"""Attention over quantized pages: dequantized on the way into the kernels, and never a copy of the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from native_case import TOLERANCE, Case, error, same_bits
from open_pages import CALLS, DECODE, PROMPTS, errors

from tinykv_plugin.kv_format import KVFormat

FORMATS = [
    KVFormat(8, 8),
    KVFormat(6, 6, 32),
    KVFormat(5, 5, 32),
    KVFormat(4, 4),
    KVFormat(8, 4, 32),
    KVFormat(None, 4),
]


@pytest.fixture(params=["avx512", "avx2", "base"])
def isa(request: pytest.FixtureRequest, native: Any) -> Any:
    if request.param not in native.isas():
        pytest.skip(f"this processor has no {request.param}")
    native.choose_isa(request.param)
    yield request.param
    native.choose_isa("")


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_every_format_and_dtype(isa: str, kv_format: KVFormat, dtype: mx.Dtype, backend: Any) -> None:
    for shape in (
        {"contexts": [150], "query_heads": 6},
        {"contexts": [70, 1, 33], "query_heads": 2},
        {"contexts": [40], "queries": 40, "query_heads": 8, "key_dim": 128, "value_dim": 64},
    ):
        case = Case(dtype=dtype, kv_format=kv_format, **shape)
        case.fill(backend)
        assert error(case.attend(backend), case.expected()) < TOLERANCE[dtype], shape


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_group_size(isa: str, group_size: int, backend: Any) -> None:
    for bits, queries in ((8, 1), (4, 1), (6, 30)):
        case = Case([150, 40], queries, key_dim=128, kv_format=KVFormat(bits, bits, group_size))
        case.fill(backend)
        assert error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32], (bits, queries)


def exact(packed: Sequence[mx.array], bits: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What ``mx.quantize`` returned, dequantized in float64."""
    words, scales, biases = packed
    elements = np.array(mx.dequantize(words, mx.ones_like(scales), mx.zeros_like(biases), 64, bits))
    scale, bias = (np.repeat(np.array(x).astype(np.float64), 64, axis=-1) for x in (scales, biases))
    return elements.astype(np.float64) * scale + bias


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_no_further_from_float64_than_mlx_lms_quantized_attention(isa: str, bits: int, backend: Any) -> None:
    """With the same numbers in the pages as in mlx-lm's cache, and keys that have large channels, as real ones do."""
    for queries in (1, 4, 70):
        mine, theirs = [], []
        for seed in range(3):
            case = Case([700], queries, query_heads=6, kv_format=KVFormat(bits, bits, 64), seed=seed)
            case.fill(backend)
            channels = mx.exp(1.5 * mx.random.normal((1, 2, 1, 64), key=mx.random.key(seed)))
            keys, values = case.keys * 0.3 + channels, case.values
            case.keys, case.q = keys, case.q / channels.mean()
            case._write(backend)
            packed = [mx.quantize(side, 64, bits) for side in (keys, values)]
            case.keys, case.values = (exact(side, bits) for side in packed)
            right = case.expected()
            stock = quantized_scaled_dot_product_attention(
                case.q + 0, *packed, scale=case.scale, mask="causal", group_size=64, bits=bits
            )
            for found, output in ((mine, case.attend(backend)), (theirs, stock)):
                found.append(np.sqrt(np.square(np.array(output) - right).mean() / np.square(right).mean()))
        assert 0 < np.mean(mine) <= np.mean(theirs) < 1e-5, queries


@pytest.mark.parametrize("kv_format", FORMATS[:1] + FORMATS[4:5], ids=str)
def test_long_contexts_windows_sinks_and_masks(kv_format: KVFormat, backend: Any) -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    case = Case([1700, 513], key_dim=96, kv_format=KVFormat(kv_format.key_bits, kv_format.value_bits))
    case.fill(backend)
    assert error(case.attend(backend, sinks=sinks), case.expected(sinks=sinks)) < 3e-5
    case = Case([900, 30], window=64, page_size=4, kv_format=kv_format)
    case.fill(backend)
    assert error(case.attend(backend), case.expected()) < 3e-5
    case = Case([90, 30], window=24, keep=4, kv_format=kv_format)
    case.fill(backend)
    assert error(case.attend(backend), case.expected()) < 3e-5
    case = Case([75], queries=7, kv_format=kv_format)
    case.fill(backend)
    mask = mx.random.uniform(shape=(1, 1, 7, 75)) < 0.5
    assert error(case.attend(backend, mask=mask), case.expected(mask=mask)) < 3e-5


def test_a_row_is_the_same_alone_and_in_a_batch(backend: Any) -> None:
    case = Case([600, 20, 1100], kv_format=KVFormat(8, 4))
    case.fill(backend)
    together = case.attend(backend)
    for index in range(3):
        alone = case.row(index)
        alone.refill(backend)
        # Quantizing what was dequantized may round once more.
        assert error(alone.attend(backend), alone.expected()) < 3e-5
        alone.metadata.pages = case.metadata.pages
        alone.metadata.block_table = case.metadata.block_table[index : index + 1]
        assert same_bits(alone.attend(backend), together[index : index + 1])


def test_pages_that_do_not_fit_the_format_are_refused(native: Any, backend: Any) -> None:
    case = Case([20], kv_format=KVFormat(8, 8))
    case.fill(backend)
    pages, metadata = case.metadata.pages, case.metadata
    for packing in (
        (4, 64, 64, mx.float32),
        (8, 32, 64, mx.float32),
        (8, 64, 64, mx.float16),
        (3, 64, 64, mx.float32),
        None,
    ):
        with pytest.raises(ValueError, match=r"paged attention: pages .* don't hold rows of|uint32 .* isn't float32"):
            native.attend(
                case.q, pages.keys, pages.values, metadata.block_table, metadata.context_lens, metadata.query_lens,
                scale=1.0, keys=packing, values=(8, 64, 64, mx.float32),
            )  # fmt: skip


@pytest.mark.parametrize("name", [*CALLS, *PROMPTS])
def test_a_querys_own_page_is_read_from_open_pages(backend: Any, name: str) -> None:
    assert max(errors(backend, {**CALLS, **PROMPTS}[name])) < 2e-5


def test_masks_that_are_not_causal_are_refused_with_open_pages(backend: Any) -> None:
    for changes, reason in (
        ({"mask": "array", "query_len": 3}, "open pages with 3 query tokens per row that aren't causal"),
        ({"window": 24, "keep": 4, "page_size": 2}, "open pages of 2 tokens with keep=4"),
    ):
        assert backend.supports(replace(DECODE, **changes)) == [reason]
