"""minimax_m3_vl: an indexer picks the blocks of the context that a query attends to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from tinykv_plugin.handles import is_paged
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter, Replacement

from .family import FamilyAdapter, each


class BlockSelectionAdapter(FamilyAdapter):
    """In a batch, blocks are counted from each row's own first token.

    mlx-lm counts them from the first column of the padded batch: a row's blocks depend on the others' lengths.
    """

    name = "block-selection"
    models: ClassVar = each("minimax_m3_vl", gathered={"full": "keys.shape"}, per_layer=None)

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The function that picks blocks."""
        return [Replacement(sys.modules[type(model).__module__].Attention, "_block_mask", _block_mask)]


def _block_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, x: Any, mask: Any, offset: Any, cache: Any) -> Any:
        if not is_paged(cache) or not isinstance(offset, mx.array):
            return original(self, x, mask, offset, cache)
        rows, count, _ = x.shape
        heads, dim, size = self.index_n_heads, self.index_head_dim, self.index_block_size

        def placed(projected: mx.array, norm: Any, number: int) -> mx.array:
            heads_first = norm(projected.reshape(rows, count, number, dim)).transpose(0, 2, 1, 3)
            rotated: mx.array = self.index_rope(heads_first, offset=offset)
            return rotated

        keys = placed(self.index_k_proj(x), self.index_k_norm, 1)
        keys, _ = cache.update_and_fetch(keys, mx.zeros((rows, 1, count, 0), keys.dtype))
        columns = keys.shape[2]
        blocks = -(-columns // size)
        if blocks <= self.index_topk_blocks:
            return mask
        queries = placed(self.index_q_proj(x), self.index_q_norm, heads)
        positions = (offset[:, None] + mx.arange(count))[:, None, :, None]
        seen = mx.arange(columns) <= positions  # (rows, 1, count, columns)
        scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        missing = [(0, 0)] * 3 + [(0, blocks * size - columns)]
        scores = mx.pad(mx.where(seen, scores, -mx.inf), missing, constant_values=-mx.inf)
        best = scores.reshape(rows, heads, count, blocks, size).max(axis=-1)
        if self.index_local_blocks > 0:
            own, block = positions // size, mx.arange(blocks)
            best = mx.where((block <= own) & (block > own - self.index_local_blocks), mx.inf, best)
        top = self.index_topk_blocks
        chosen = mx.stop_gradient(mx.argpartition(-best, kth=top - 1, axis=-1)[..., :top])
        kept = mx.put_along_axis(mx.zeros(best.shape, dtype=mx.bool_), chosen, mx.array(True), axis=-1)
        kept = mx.repeat(kept, size, axis=-1)[..., :columns] & seen
        return mx.repeat(kept, self.num_attention_heads // heads, axis=1)

    return call


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [BlockSelectionAdapter()]
