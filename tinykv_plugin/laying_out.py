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
    if layer.pages is not None:
        pool = session.pools[layer.group]
        if any(row.tokens for row in session.live_sequences()) or session.abandoned:
            raise CacheStateError(
                f"layer {layer.index} writes {spec}, its pages hold {layer.pages.spec}; after changing a model's "
                f"dtype or shapes drop its prompt caches, or detach and attach again"
            )
        session.prefix.index.clear()  # what they hold goes with their layout
        for each in (pool, session.pools[-1]) if layer.pages.open is not None else (pool,):
            each.book(-each.layers.pop(layer.index).nbytes)
    layer.spec = spec
    layer.pages = None
    return lay_out(session, layer, spec)


def lay_out(session: PagedSession, layer: PagedLayer, spec: LayerSpec) -> LayerPages:
    """New pages for ``layer``, as many as its group has, and with them open ones if it ``opens``.

    Raises OutOfPagesError or PoolGrowthError, with the layer without pages.
    """
    pool = session.pools[layer.group]
    pages = LayerPages(spec, pool.page_size, layer.opens)
    pool.add_layer(layer.index, pages)
    if pages.open is not None:
        try:
            session.pools[-1].add_layer(layer.index, pages.open)
        except Exception:
            pool.book(-pool.layers.pop(layer.index).nbytes)
            raise
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
