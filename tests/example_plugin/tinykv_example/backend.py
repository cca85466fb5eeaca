"""An attention backend that uses nothing but the public arrays of PagedKVMetadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from tinykv_plugin.metadata import PagedKVMetadata, PagedMask

if TYPE_CHECKING:
    from tinykv_plugin.pages import LayerPages
    from tinykv_plugin.protocols import AttentionRequest


class ExampleBackend:
    """Looks pages up by the block table and attends with a mask of its own. Short, not fast."""

    name = "example"
    direct = False
    priority = -1

    def supports(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if request.mask == "array":
            reasons.append("masks given as arrays")
        if request.keep:
            reasons.append("max_kv_size")
        if request.sinks:
            reasons.append("attention sinks")
        return reasons

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        old = pages.num_pages
        key_shape, value_shape = pages.shape(num_pages)
        keys, values = mx.zeros(key_shape, pages.spec.dtype), mx.zeros(value_shape, pages.spec.value_dtype)
        if pages.keys is not None and pages.values is not None:
            kept = min(old, num_pages)
            keys[:kept], values[:kept] = pages.keys[:kept], pages.values[:kept]
        mx.eval(keys, values)
        pages.keys, pages.values = keys, values

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        slots = np.array(metadata.slot_mapping).reshape(-1)
        tokens = mx.array(np.flatnonzero(slots >= 0))
        page_ids, offsets = (mx.array(part) for part in np.divmod(slots[slots >= 0], metadata.page_size))
        pages = metadata.pages
        assert pages.keys is not None and pages.values is not None
        pages.keys[page_ids, :, offsets] = keys.swapaxes(1, 2).flatten(0, 1)[tokens]
        pages.values[page_ids, :, offsets] = values.swapaxes(1, 2).flatten(0, 1)[tokens]

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        if pages.keys is None or pages.values is None:
            return
        for source, target in zip(sources, targets, strict=True):
            pages.keys[target] = pages.keys[source]
            pages.values[target] = pages.values[source]

    def attend(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        *,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
    ) -> mx.array:
        table = metadata.block_table
        columns = mx.arange(table.shape[1] * metadata.page_size)
        contexts = metadata.context_lens[:, None]
        # Where a column holds a token; what else is in a page is stale, and may be NaN.
        held = (columns < contexts) & mx.repeat(table >= 0, metadata.page_size, axis=1)
        positions = contexts - metadata.query_lens[:, None] + mx.arange(queries.shape[2])
        behind = positions[:, :, None] - columns
        visible = held[:, None] & (behind >= 0 if mask is not None else True)
        windows = [metadata.window, mask.window if isinstance(mask, PagedMask) else None]
        for window in windows:
            if window is not None:
                visible = visible & (behind < window)
        keys, values = (
            mx.where(held[:, None, :, None], pages[mx.maximum(table, 0)].swapaxes(1, 2).flatten(2, 3), 0)
            for pages in metadata.pages.readable()
        )
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=visible[:, None])
