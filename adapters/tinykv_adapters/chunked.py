"""llama4: three of four layers see only their own chunk of the context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from tinykv_plugin.handles import attend, is_paged
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import LayerChoice, ModelAdapter, Replacement

from .family import FamilyAdapter, each
from .general import general_choice


class ChunkedAdapter(FamilyAdapter):
    """Pages the chunked layers as well; masks come from the caches, so that requests can be batched.

    mlx-lm's own code takes one position for all rows of a batch.
    """

    name = "chunked"
    models: ClassVar = each("llama4", direct=("full", "chunked"))

    def choose(self, model: Any, own: Sequence[Any]) -> Sequence[LayerChoice]:
        """Chunked pages for the chunked layers; the others as the general adapter has them."""
        return [
            LayerChoice("chunked", window=cache.chunk_size) if type(cache) is ChunkedKVCache else general_choice(cache)
            for cache in own
        ]

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The model's call, which makes the masks, and that of its attention layers."""
        code = sys.modules[type(model).__module__]
        return [Replacement(code.LlamaModel, "__call__", _model), Replacement(code.Attention, "__call__", _attention)]


def _model(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any, cache: Any = None) -> Any:
        if cache is None or not is_paged(cache[0]):
            return original(self, inputs, cache)
        hidden = self.embed_tokens(inputs)
        count = hidden.shape[1]
        # All layers of a kind have the same mask.
        masks = {kind: one.make_mask(count) for kind, one in ((chunk_of(one), one) for one in reversed(cache))}
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, masks[chunk_of(layer_cache)], cache=layer_cache)
        return self.norm(hidden)

    return call


def chunk_of(cache: Any) -> int | None:
    """A layer's window or chunk, None if it sees everything."""
    window: int | None = cache.window
    return window


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, x, mask, cache)
        batch, count, _ = x.shape

        def heads(projected: mx.array, number: int) -> mx.array:
            return projected.reshape(batch, count, number, -1).transpose(0, 2, 1, 3)

        queries, keys = heads(self.q_proj(x), self.n_heads), heads(self.k_proj(x), self.n_kv_heads)
        offset = cache.offset
        if self.use_rope:
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if self.use_qk_norm:
            queries, keys = (mx.fast.rms_norm(part, weight=None, eps=1e-6) for part in (queries, keys))
        if self.attn_temperature_tuning and not self.use_rope:
            # One position for each row, where it has one: (rows, 1, tokens, 1).
            positions = mx.reshape(offset, (-1, 1, 1, 1)) if isinstance(offset, mx.array) else offset
            positions = positions + mx.arange(1, count + 1)[:, None]
            sharpness = mx.log(mx.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
            queries = (queries * sharpness).astype(queries.dtype)
        keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x), self.n_kv_heads))
        out = attend(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, count, -1))

    return call


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [ChunkedAdapter()]
