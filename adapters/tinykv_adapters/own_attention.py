"""Models that compute attention themselves, or change keys and values on the way to it: gemma2, olmo, plamo, plamo2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from tinykv_plugin.handles import attend, is_paged
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter, Replacement

from .family import RECURRENT, FamilyAdapter, each
from .general import model_file


class OwnAttentionAdapter(FamilyAdapter):
    """Their attention layers are replaced by ones that hand keys and values to attention as they are."""

    name = "own-attention"
    models: ClassVar = {**each("gemma2 olmo plamo"), **each("plamo2", own=(RECURRENT,))}

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The attention layers' call."""
        owner, name, call = _ATTENTION[model_file(model)]
        return [Replacement(getattr(sys.modules[type(model).__module__], owner), name, call)]


def _gemma2(original: Callable[..., Any]) -> Callable[..., Any]:
    """Its scores are capped before the softmax."""

    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, x, mask, cache)
        mask, offset = cache.make_mask(x.shape[1]), cache.offset
        queries = self.rope(_heads(self.q_proj(x), self.n_heads), offset=offset)
        keys = self.rope(_heads(self.k_proj(x), self.n_kv_heads), offset=offset)
        keys, values = cache.update_and_fetch(keys, _heads(self.v_proj(x), self.n_kv_heads))
        cap = self.attn_logit_softcapping
        return self.o_proj(_joined(attend(queries, keys, values, scale=self.scale, mask=mask, softcap=cap)))

    return call


def _olmo(original: Callable[..., Any]) -> Callable[..., Any]:
    """It adds its mask to the scores, and a prompt's is no array: mlx-lm can run single tokens only."""

    def attend_paged(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, x, mask, cache)
        offset = cache.offset
        queries, keys, values = (_heads(part, self.n_heads) for part in mx.split(self.att_proj(x), 3, axis=-1))
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        keys, values = cache.update_and_fetch(keys, values)
        return self.attn_out(_joined(attend(queries, keys, values, scale=self.scale, mask=mask)))

    return attend_paged


def _plamo(original: Callable[..., Any]) -> Callable[..., Any]:
    """It repeats all its K/V heads as often as needed: query head ``i`` goes with K/V head ``i % k_num_heads``.

    Attention shares a K/V head between neighbouring query heads, so the query heads change places.
    """

    def call(self: Any, hidden_states: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, hidden_states, attention_mask, cache)
        offset, shared = cache.offset, self.k_num_heads
        queries = self.rotary_emb(_heads(self.q_proj(hidden_states), self.q_num_heads), offset=offset)
        keys = self.rotary_emb(_heads(self.k_proj(hidden_states), shared), offset=offset)
        keys, values = cache.update_and_fetch(keys, _heads(self.v_proj(hidden_states), shared))
        queries = _regroup(queries, self.q_num_heads // shared, shared)
        out = attend(queries, keys, values, scale=self.scale, mask=attention_mask)
        return self.o_proj(_joined(_regroup(out, shared, self.q_num_heads // shared)))

    return call


def _plamo2(original: Callable[..., Any]) -> Callable[..., Any]:
    """It calls mlx's attention and not mlx-lm's, past the function that reads pages."""

    def call(self: Any, hidden_states: Any, mask: Any = None, cache: Any = None) -> Any:
        if not is_paged(cache):
            return original(self, hidden_states, mask, cache)
        offset = cache.offset
        sizes = [self.q_proj_dim, self.q_proj_dim + self.k_proj_dim]
        queries, keys, values = mx.split(self.qkv_proj(hidden_states), sizes, axis=-1)
        queries = self.rope(_normed(_heads(queries, self.q_num_heads), self.q_weight), offset=offset)
        keys = self.rope(_normed(_heads(keys, self.k_num_heads), self.k_weight), offset=offset)
        keys, values = cache.update_and_fetch(keys, _heads(values, self.v_num_heads))
        return self.o_proj(_joined(attend(queries, keys, values, scale=self.scale, mask=mask)))

    return call


def _normed(heads: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(heads, weight=None, eps=1e-6) * weight[:, None]


def _heads(projected: mx.array, count: int) -> mx.array:
    """``(batch, tokens, heads * dim)`` as ``(batch, heads, tokens, dim)``."""
    batch, tokens, _ = projected.shape
    return projected.reshape(batch, tokens, count, -1).transpose(0, 2, 1, 3)


def _joined(heads: mx.array) -> mx.array:
    """``(batch, heads, tokens, dim)`` as ``(batch, tokens, heads * dim)``."""
    batch, _, tokens, _ = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)


def _regroup(heads: mx.array, outer: int, inner: int) -> mx.array:
    """Head ``o * inner + i`` moves to place ``i * outer + o``."""
    batch, _, tokens, dim = heads.shape
    return heads.reshape(batch, outer, inner, tokens, dim).swapaxes(1, 2).reshape(batch, -1, tokens, dim)


_ATTENTION: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "gemma2": ("Attention", "__call__", _gemma2),
    "olmo": ("TransformerBlock", "attend", _olmo),
    "plamo": ("Attention", "__call__", _plamo),
    "plamo2": ("Attention", "__call__", _plamo2),
}


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [OwnAttentionAdapter()]
