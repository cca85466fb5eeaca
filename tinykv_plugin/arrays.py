"""Attention over K and V that are plain arrays."""

from __future__ import annotations

import mlx.core as mx

from .masks import causal_array


def attend_arrays(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of ``queries`` ``(batch, query_heads, tokens, head_dim)`` over K and V ``(batch, kv_heads, …)``.

    mlx's own where it can; with ``softcap`` scores are ``softcap * tanh(scores / softcap)`` before the softmax.
    """
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    assert sinks is None, "no model has both"
    batch, heads, count, dim = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads, count, dim)
    scores = softcap * mx.tanh(grouped @ mx.expand_dims(keys, 2).swapaxes(-1, -2) / softcap)
    if isinstance(mask, str):
        mask = causal_array(count, columns - count, None)
    if mask is not None:
        mask = mx.expand_dims(mask, -3) if mask.ndim > 2 else mask
        lowest = mx.array(-mx.inf, scores.dtype)
        scores = mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else scores + mask
    out = mx.softmax(scores, axis=-1, precise=True) @ mx.expand_dims(values, 2)
    return out.reshape(batch, heads, count, values.shape[-1])
