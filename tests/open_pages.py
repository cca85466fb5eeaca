"""Calls of attention in which a query's own page is read from open pages, and what they must give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from rounding import attend_open

from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.protocols import AttentionBackend, AttentionRequest
from tinykv_plugin.selftest.sample import Sample

FORMAT = KVFormat(4, 4, 32)
DECODE = AttentionRequest(
    4, 2, 64, 32, mx.float32, 16, 1, "none", None, 0, False,
    keys=FORMAT.keys(64), values=FORMAT.values(32), open_page=True,
)  # fmt: skip

# By name: what differs from a decode step.
CALLS: dict[str, dict[str, Any]] = {
    "decode": {},
    "keys only quantized": {"values": None},
    "drafts": {"query_len": 3, "mask": "causal"},
    "window": {"window": 24},
    "window, kept tokens": {"window": 24, "keep": 4},
    "window below a page, drafts": {"window": 9, "query_len": 5, "mask": "causal"},
    "sinks, drafts": {"sinks": True, "query_len": 3, "mask": "causal"},
    "softcap": {"softcap": 3.0},
    "mask": {"mask": "array"},
    "large pages": {"page_size": 48, "query_len": 2, "mask": "causal"},
    "full precision at the start": {"full_until": 38, "query_len": 4, "mask": "causal"},
    "full precision at the start, window": {"full_until": 530, "window": 24},
    "many query heads": {"query_heads": 40, "query_len": 4, "mask": "causal"},
}
PROMPTS: dict[str, dict[str, Any]] = {
    "prompt": {"query_len": 40, "mask": "causal"},
    "prompt, full precision at the start": {"full_until": 25, "query_len": 40, "mask": "causal"},
    "prompt, window": {"query_len": 40, "window": 24, "mask": "causal"},
}
# Only gather serves these.
OTHERS: dict[str, dict[str, Any]] = {
    "mask, drafts": {"mask": "array", "query_len": 3},
    "chunk": {"chunk": 48, "query_len": 20, "mask": "causal"},
}


def errors(backend: AttentionBackend, differences: dict[str, Any]) -> Iterator[float]:
    """The largest error of ``backend`` with each of a call's masks, alone and in a batch."""
    differences = dict(differences)
    full_until = differences.pop("full_until", 0)
    request = replace(DECODE, **differences)
    assert not backend.supports(request)
    for contexts in ([40], [530, 1, 16, 17, 7, 40, 2, 100, 32]):
        sample = Sample(request, contexts, full_until=full_until)
        pages = sample.pages(backend)
        sample.write(backend, pages)
        for mask in sample.masks():
            got = sample.attend(backend, pages, mask)
            for row in range(len(contexts)):
                right = _expected(sample, row, mask, full_until)
                yield float(mx.abs(got[row : row + 1, :, : right.shape[2]] - right).max())


def _expected(sample: Sample, row: int, mask: Any, full_until: int) -> mx.array:
    request, context = sample.request, sample.contexts[row]
    count = min(request.query_len, context)
    queries, places = np.arange(context - count, context)[:, None], np.arange(context)[None]
    seen = np.ones((count, context), bool) if mask is None else places <= queries
    if request.window is not None:
        behind = places > queries - (request.window - request.keep)
        seen = seen & (behind | (places < request.keep) | (queries < request.window))
    if request.chunk is not None:
        seen = seen & (places // request.chunk == queries // request.chunk)
    visible = mx.array(seen)
    if isinstance(mask, mx.array):
        shape = (len(sample.contexts), request.query_heads, request.query_len, mask.shape[-1])
        visible = mx.broadcast_to(mask, shape)[row : row + 1, :, :count, :context]
    tokens = sample.tokens()
    keys, values, *rounded = (
        side[row : row + 1, :, :context]
        for side in (*tokens, *sample.spec.decode(*sample.spec.encode(*tokens), mx.float32))
    )
    own = mx.array((queries // request.page_size == places // request.page_size) | (queries < full_until))
    return attend_open(
        sample.queries[row : row + 1, :, :count], keys, values, (rounded[0], rounded[1]), own, sample.scale, visible,
        sample.sinks, request.softcap,
    )  # fmt: skip
