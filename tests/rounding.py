"""What quantized pages must give: mlx-lm's own caches and attention, with K and V rounded where pages round them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import make_prompt_cache
from models import greedy

from tinykv_plugin.layout import leaves, replace_leaves

GROUP_SIZE = 32

# Models that compute attention in a way of their own, on K and V that are rounded alike for all queries.
CLOSED = ("deepseek_v3",)


def generated(
    model: Any,
    tokens: list[int],
    count: int,
    bits: tuple[int, int],
    page_size: int,
    max_kv_size: int | None = None,
    start: int = 0,
) -> list[int]:
    """What ``model`` generates after ``tokens`` where pages have so many bits for keys and for values."""
    if (min(bits) >= 8 and not start) or type(model).__module__.endswith(CLOSED):
        return greedy(model, tokens, count, cache=rounded(model, *bits, max_kv_size))
    with open_pages(model, *bits, page_size, start):
        return greedy(model, tokens, count, cache=placed(model, max_kv_size))


def loses(bits: int, x: mx.array) -> mx.array:
    """What pages with so many bits keep of ``x``."""
    return mx.dequantize(*mx.quantize(x, group_size=GROUP_SIZE, bits=bits), group_size=GROUP_SIZE, bits=bits)


def rounded(model: Any, key_bits: int, value_bits: int, max_kv_size: int | None = None) -> list[Any]:
    """The model's own caches, but K and V lose in them what quantized pages lose."""

    def update(self: Any, keys: mx.array, values: mx.array) -> Any:
        return super(type(self), self).update_and_fetch(loses(key_bits, keys), loses(value_bits, values))

    return _own(model, update, max_kv_size)


def placed(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """The model's own caches, in which each key's last element is its position; for :func:`open_pages`."""

    def update(self: Any, keys: mx.array, values: mx.array) -> Any:
        places = mx.arange(self.offset, self.offset + keys.shape[2], dtype=keys.dtype)
        places = mx.broadcast_to(places[None, None, :, None], (*keys.shape[:3], 1))
        return super(type(self), self).update_and_fetch(mx.concatenate([keys, places], axis=3), values)

    return _own(model, update, max_kv_size)


@contextmanager
def open_pages(model: Any, key_bits: int, value_bits: int, page_size: int, start: int = 0) -> Iterator[None]:
    """A model on :func:`placed` caches reads its K and V rounded, but for those of the query's own page.

    Queries before position ``start`` read nothing rounded.
    """

    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys, places = keys[..., :-1], keys[0, 0, :, -1]
        own = mx.arange(cache.offset - queries.shape[2], cache.offset)[:, None]
        return attend_open(
            queries, keys, values, (loses(key_bits, keys), loses(value_bits, values)),
            (own // page_size == places // page_size) | (own < start), scale, causal(mask, own, places), sinks,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(model).__module__], "scaled_dot_product_attention", attention)
        yield


def causal(mask: Any, own: mx.array, places: mx.array) -> mx.array:
    """``mask`` of any kind as a boolean array."""
    if mask is None:
        return mx.ones((own.shape[0], places.shape[0]), dtype=mx.bool_)
    return own >= places if isinstance(mask, str) else mask


def attend_open(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rounded: tuple[mx.array, mx.array],
    own: mx.array,
    scale: float,
    mask: mx.array,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """Attention over ``keys`` and ``values`` where ``own`` says so, ``(queries, columns)``, else over ``rounded``."""

    def for_queries(x: mx.array) -> mx.array:
        return mx.repeat(x, queries.shape[1] // x.shape[1], axis=1)

    def scores_with(x: mx.array) -> mx.array:
        return queries * scale @ for_queries(x).swapaxes(2, 3)

    scores = mx.where(own, scores_with(keys), scores_with(rounded[0]))
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        beside = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, beside], axis=3)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., : keys.shape[2]]
    return mx.where(own, 0, weights) @ for_queries(rounded[1]) + mx.where(own, weights, 0) @ for_queries(values)


def _own(model: Any, update: Callable[..., Any], max_kv_size: int | None) -> list[Any]:
    def changed(cache: Any) -> Any:
        kind = type(cache)
        if kind not in (mlx_cache.KVCache, mlx_cache.RotatingKVCache):
            return cache
        if kind is mlx_cache.KVCache and max_kv_size is not None:
            cache, kind = mlx_cache.RotatingKVCache(max_kv_size, keep=4), mlx_cache.RotatingKVCache
        cache.__class__ = type("Changed", (kind,), {"update_and_fetch": update})
        return cache

    own = make_prompt_cache(model)
    return replace_leaves(own, {index: changed(leaf) for index, leaf in enumerate(leaves(own))})
