"""phi3small: in some layers a query sees the nearest blocks of the context, and every n-th block before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from tinykv_plugin.errors import ConfigError
from tinykv_plugin.handles import attend, is_paged
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter, Replacement

from .family import FamilyAdapter, each


class BlockSparseAdapter(FamilyAdapter):
    """Masks by the positions of queries and keys, for each row of a batch.

    mlx-lm's own mask is exact for one token at a time. For the tokens of a prompt it lets each see later ones, and
    counts blocks from the prompt's end, so that the result depends on how the prompt was cut into chunks.
    """

    name = "block-sparse"
    models: ClassVar = each("phi3small")

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The attention layers' call."""
        return [Replacement(sys.modules[type(model).__module__].Attention, "__call__", _attention)]


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, x, mask, cache)
        if cache.window is not None:
            raise ConfigError("max_kv_size", "phi3small picks blocks of the whole context: leave it unset")
        batch, count, _ = x.shape
        offset, mask = cache.offset, cache.make_mask(count)
        # For each K/V head: the query heads that share it, its key, its value.
        parts = self.query_key_value(x).reshape(batch, count, self.n_kv_heads, self.n_q_per_kv + 2, self.head_dim)
        queries = parts[..., :-2, :].reshape(batch, count, self.n_heads, self.head_dim).transpose(0, 2, 1, 3)
        keys, values = (parts[..., place, :].transpose(0, 2, 1, 3) for place in (-2, -1))
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        if self.block_sparse:
            mask = _sparse_mask(self, offset, count, cache.size())
        out = attend(queries, keys, values, scale=self.scale, mask=mask)
        return self.dense(out.transpose(0, 2, 1, 3).reshape(batch, count, -1))

    return call


def _sparse_mask(attention: Any, offset: Any, count: int, columns: int) -> mx.array:
    """Boolean ``(rows, heads, count, columns)``; the column of a key is its position."""
    starts = offset.reshape(-1, 1, 1, 1) if isinstance(offset, mx.array) else offset
    queries, keys = starts + mx.arange(count).reshape(1, 1, count, 1), mx.arange(columns)
    size, stride = attention.blocksparse_block_size, attention.blocksparse_vert_stride
    near = queries // size - keys // size < attention.blocksparse_num_local_blocks
    heads = mx.arange(1, attention.n_heads + 1).reshape(1, -1, 1, 1)
    seen: mx.array = (keys <= queries) & (near | ((keys // size + heads) % stride == 0))
    return seen


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [BlockSparseAdapter()]
