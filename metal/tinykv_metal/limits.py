"""What the kernels can serve, as reasons for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from .variant import DIM_STEP, MOST_DIM, MOST_QUERIES, PAGE_STEP

if TYPE_CHECKING:
    from tinykv_plugin.protocols import AttentionRequest


def reasons(request: AttentionRequest) -> list[str]:
    """Reasons why no kernel serves ``request``; empty if one does."""
    found = []
    if request.query_len > MOST_QUERIES:
        found.append(f"{request.query_len} query tokens per row: mlx's attention over gathered pages is faster there")
    if request.dtype not in (mx.float32, mx.bfloat16, mx.float16):
        found.append(f"dtype {request.dtype} (float32, bfloat16 and float16 are supported)")
    for what, dim in (("key", request.key_dim), ("value", request.value_dim)):
        if dim % DIM_STEP or not 0 < dim <= MOST_DIM:
            found.append(f"{what} dim {dim} (multiples of {DIM_STEP} up to {MOST_DIM} are supported)")
    if request.page_size % PAGE_STEP:
        found.append(f"page size {request.page_size} (multiples of {PAGE_STEP} are supported)")
    if request.query_heads % request.kv_heads:
        found.append(f"{request.query_heads} query heads don't share {request.kv_heads} kv heads evenly")
    if request.keep and request.query_len > 1:
        found.append(f"keep={request.keep} with {request.query_len} query tokens per row (one is supported)")
    if request.mask == "array" and request.window is not None:
        found.append("an array as mask together with a window")
    if request.open_page and request.query_len > 1 and request.mask != "causal":
        found.append(f"open pages with {request.query_len} query tokens per row that aren't causal")
    if request.open_page and request.keep > request.page_size:
        found.append(f"open pages of {request.page_size} tokens with keep={request.keep}")
    if request.window is not None and request.window <= request.keep:
        found.append(f"window {request.window} is not more than keep={request.keep}")
    return found
