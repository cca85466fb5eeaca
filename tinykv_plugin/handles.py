"""For adapters that replace a model's own code: attention over whatever a paged cache has returned."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .arrays import attend_arrays
from .layer import attend_handles
from .metadata import PagedKV, PagedMask
from .trace_cache import TraceCache
from .view import LayerView


def is_paged(cache: object) -> bool:
    """Whether ``cache`` is a paged one, of one request or a batch, or stands for one in the dry trace."""
    return isinstance(cache, LayerView | TraceCache)


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    *,
    scale: float,
    mask: mx.array | str | PagedMask | None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention of ``queries`` ``(batch, query_heads, tokens, head_dim)``; what a model's attention function does.

    ``keys`` and ``values`` are what ``update_and_fetch`` or ``newest`` of a paged cache returned, ``mask`` what its
    ``make_mask`` did. ``softcap``: scores are ``softcap * tanh(scores / softcap)`` before the softmax.
    """
    if isinstance(keys, PagedKV):
        return attend_handles(queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
    assert not isinstance(mask, PagedMask), "where attention gets arrays, masks are arrays"
    return attend_arrays(queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
