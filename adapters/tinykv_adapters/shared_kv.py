"""afm7 and gemma3n: their last layers have no K/V of their own but attend to an earlier layer's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from mlx_lm.models.base import create_attention_mask

from tinykv_plugin.handles import attend, is_paged
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter, Replacement

from .family import FamilyAdapter, each
from .general import model_file


class SharedKVAdapter(FamilyAdapter):
    """The layers that share get the handles of the layer they share with."""

    name = "shared-kv"
    models: ClassVar = {**each("afm7", per_layer=None), **each("gemma3n", direct=("full", "window"), per_layer=None)}

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The call of the layers that share, or of what runs them."""
        code = sys.modules[type(model).__module__]
        if model_file(model) == "afm7":
            return [Replacement(code.AFMModel, "__call__", _afm_model)]
        return [Replacement(code.Gemma3nAttention, "__call__", _gemma3n_attention)]


def _afm_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any, cache: Any = None) -> Any:
        if cache is None or not is_paged(cache[0]):
            return original(self, inputs, cache)
        hidden = self.embedding(inputs)
        mask = create_attention_mask(hidden, cache[0])
        # mlx-lm takes the positions from the shape of the keys, which says nothing about the rows of a batch.
        positions = cache[0].offset
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, mask, cache=layer_cache)
        keys, values = cache[-1].newest()
        for layer in self.kv_reuse_layers:
            attended = _reuse(layer.self_attn, layer.input_layernorm(hidden), keys, values, mask, positions)
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.output_norm(hidden)

    return call


def _reuse(attention: Any, hidden: Any, keys: Any, values: Any, mask: Any, positions: Any) -> Any:
    batch, count, _ = hidden.shape
    queries = attention.q_proj(hidden).reshape(batch, count, attention.n_heads, -1).transpose(0, 2, 1, 3)
    queries = attention.q_norm(attention.rope(queries, offset=positions))
    out = attend(queries, keys, values, scale=attention.scale, mask=mask)
    return attention.out_proj(out.transpose(0, 2, 1, 3).reshape(batch, count, -1))


class _Newest:
    """A layer's cache as a layer that shares it sees it: with the K/V of the pass under way."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def keys_and_values(self) -> tuple[Any, Any]:
        newest: tuple[Any, Any] = self._cache.newest()
        return newest


def _gemma3n_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, x: Any, mask: Any = None, cache: Any = None, offset: Any = 0) -> Any:
        if self.is_kv_shared_layer and is_paged(cache):
            cache = _Newest(cache)
        return original(self, x, mask, cache, offset)

    return call


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [SharedKVAdapter()]
