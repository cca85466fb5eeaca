"""Every kind of call against gather on the same tokens, and against mlx-lm's own attention on each row alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from tinykv_plugin.arrays import attend_arrays
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.selftest.sample import Sample

ALLOWED = {mx.float32: 3e-5, mx.bfloat16: 3e-2, mx.float16: 4e-3}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

USUAL = AttentionRequest(
    query_heads=6, kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32, page_size=16, query_len=1, mask="causal",
    window=None, keep=0, sinks=False,
)  # fmt: skip

# Rows of unlike lengths, one of them empty; where there are several queries, shorter rows skip some.
KINDS: dict[str, dict[str, Any]] = {
    "decode": {},
    "drafts": {"query_len": 4},
    "prefill": {"query_len": 70},
    "one head for all": {"query_heads": 5, "kv_heads": 1},
    "a head each": {"query_heads": 3, "kv_heads": 3, "query_len": 3},
    "dims 8 and 24": {"key_dim": 8, "value_dim": 24},
    "dims 24": {"key_dim": 24, "value_dim": 24, "query_len": 30},
    "dims 104 and 40": {"key_dim": 104, "value_dim": 40, "query_len": 2},
    "dims 256": {"key_dim": 256, "value_dim": 256, "query_len": 9},
    "page size 1": {"page_size": 1},
    "page size 7": {"page_size": 7, "query_len": 40},
    "page size 256": {"page_size": 256},
    "window": {"window": 50},
    "window, drafts": {"window": 50, "query_len": 5},
    "window, prefill": {"window": 50, "query_len": 90},
    "kept tokens": {"window": 60, "keep": 4},
    "sinks": {"sinks": True},
    "sinks, window, prefill": {"sinks": True, "window": 50, "query_len": 40},
    "softcap": {"softcap": 5.0, "query_len": 3},
    "mask": {"mask": "array"},
    "mask, prefill": {"mask": "array", "query_len": 40},
    "no mask": {"mask": "none", "query_len": 6},
}
CONTEXTS = [600, 1, 33, 0, 128]


def stock(sample: Sample, mask: Any, row: int) -> mx.array:
    """What mlx-lm computes for the row alone, whose K and V its own cache would hold in one piece."""
    request, context = sample.request, sample.contexts[row]
    count = min(request.query_len, context)
    keys, values = (x[row : row + 1, :, :context] for x in sample.tokens())
    queries = sample.queries[row : row + 1, :, :count]
    if request.keep and request.window is not None and context > request.window:
        newest = context - (request.window - request.keep)
        keys, values = (mx.concatenate([x[:, :, : request.keep], x[:, :, newest:]], axis=2) for x in (keys, values))
        mask = None
    elif isinstance(mask, mx.array):
        mask = mask[row : row + 1, ..., :context]
    elif request.window is not None:
        mask = create_causal_mask(count, context - count, window_size=request.window)
    sinks = sample.sinks
    if request.softcap is not None:
        return attend_arrays(queries, keys, values, scale=sample.scale, mask=mask, softcap=request.softcap)
    return scaled_dot_product_attention(queries, keys, values, None, scale=sample.scale, mask=mask, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gather_and_stock_agree(backend: Any, kind: str, dtype: mx.Dtype) -> None:
    request = dataclasses.replace(USUAL, dtype=dtype, **KINDS[kind])
    assert backend.supports(request) == []
    sample, gather = Sample(request, CONTEXTS), GatherBackend()
    for mask in sample.masks():
        results = []
        for one in (backend, gather):
            pages = sample.pages(one)
            sample.write(one, pages)
            results.append(sample.valid(sample.attend(one, pages, mask)))
        got, by_gather = results
        assert got.dtype == dtype
        assert mx.abs(got - by_gather).max().item() < ALLOWED[dtype]
        for row, context in enumerate(CONTEXTS):
            if context:
                right = stock(sample, mask, row)
                assert mx.abs(got[row : row + 1, :, : right.shape[2]] - right).max().item() < ALLOWED[dtype]
            else:
                assert not got[row].any().item()
