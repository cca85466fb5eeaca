"""Which pages a layer writes to: those it was traced with, or others if it writes other shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import CacheStateError
from .pages import LayerPages, LayerSpec

if TYPE_CHECKING:
    from .layer import PagedLayer
    from .session import PagedSession


def pages_for(session: PagedSession, layer: PagedLayer, keys: mx.array, values: mx.array) -> LayerPages:
    """The pages of ``layer``; laid out anew if it writes for the first time or other shapes than the trace saw.

    Raises CacheStateError if the model's shapes changed while pages hold tokens.
    """
    if layer.pages is not None and _fits(layer.pages.spec, keys, values):
        return layer.pages
    spec = LayerSpec.of(keys, values).stored_as(session.kv_format)
    pool = session.pools[layer.group]
    if layer.pages is not None:
        if any(row.tokens for row in session.live_sequences()) or session.abandoned:
            raise CacheStateError(
                f"layer {layer.index} writes {spec}, its pages hold {layer.pages.spec}; after changing a model's "
                f"dtype or shapes drop its prompt caches, or detach and attach again"
            )
        session.prefix.index.clear()  # what they hold goes with their layout
        pool.book(-layer.pages.nbytes)
        del pool.layers[layer.index]
    layer.spec = spec
    layer.pages = None
    pages = LayerPages(spec, pool.page_size)
    pool.add_layer(layer.index, pages)
    layer.pages = pages
    return pages


def _fits(spec: LayerSpec, keys: mx.array, values: mx.array) -> bool:
    _, heads, _, key_dim = keys.shape
    return (
        heads == spec.kv_heads
        and key_dim == spec.key_dim
        and values.shape[3] == spec.value_dim
        and keys.dtype == spec.dtype
        and values.dtype == spec.value_dtype
    )
