"""PackedKVCache: a layer's quantized K/V in a prompt-cache file, where no class of mlx-lm can hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .kv_format import Affine
from .pages import LayerSpec

LAYOUT = 1
"""Version of the layout of ``state``."""

# One side: mlx's (packed, scales, biases), or its elements alone where it isn't quantized.
Side = tuple[mx.array, ...]


class PackedKVCache:
    """Tokens of a layer in the order of their positions; only for files.

    mlx-lm's QuantizedKVCache has one format for K and V and no window. ``max_size`` is the window (None: none) and
    ``keep`` the first tokens it doesn't drop, as in RotatingKVCache.
    """

    def __init__(self, keys: Side, values: Side, offset: int, formats: tuple[Affine | None, Affine | None]) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset
        self.formats = formats
        self.max_size: int | None = None
        self.keep = 0

    @property
    def state(self) -> list[Any]:
        """What a prompt-cache file keeps: numbers, then the packed arrays."""
        numbers = [number for packed in self.formats for number in _numbers(packed)]
        return [LAYOUT, self.offset, self.max_size or 0, self.keep, *numbers, list(self.keys), list(self.values)]

    @classmethod
    def from_state(cls, state: Any) -> PackedKVCache:
        """Raises ValueError if the file's layout isn't the one known here."""
        if state[0] != LAYOUT:
            raise ValueError(f"quantized K/V in layout {state[0]}, this version of tinykv reads layout {LAYOUT}")
        _, offset, max_size, keep, key_bits, key_group, value_bits, value_group, keys, values = state
        formats = _affine(key_bits, key_group), _affine(value_bits, value_group)
        cache = cls(tuple(keys), tuple(values), offset, formats)
        cache.max_size, cache.keep = max_size or None, keep
        return cache


# mlx-lm's loader looks class names up in its own module, those inside a CacheList too.
vars(mlx_cache).setdefault(PackedKVCache.__name__, PackedKVCache)


def quantized_cache(
    spec: LayerSpec, keys: mx.array, values: mx.array, offset: int, window: int | None, keep: int
) -> Any:
    """Stored K and V ``(1, kv_heads, tokens, elements)`` as a cache for a file: mlx-lm's class where it has one."""
    key_side = _split(spec.keys, keys, spec.key_dim, spec.dtype)
    value_side = _split(spec.values, values, spec.value_dim, spec.value_dtype)
    if window is None and spec.keys is not None and spec.keys == spec.values:
        cache = mlx_cache.QuantizedKVCache(group_size=spec.keys.group_size, bits=spec.keys.bits)
        cache.keys, cache.values, cache.offset = key_side, value_side, offset
        return cache
    packed = PackedKVCache(key_side, value_side, offset, (spec.keys, spec.values))
    packed.max_size, packed.keep = window, keep
    return packed


def is_quantized(cache: Any) -> bool:
    """Whether ``cache`` is what :func:`quantized_cache` returns."""
    return isinstance(cache, mlx_cache.QuantizedKVCache | PackedKVCache)


def stored_rows(cache: Any) -> tuple[LayerSpec, mx.array, mx.array]:
    """What :func:`quantized_cache` was given: the spec, and K and V as pages store them."""
    if isinstance(cache, PackedKVCache):
        (key_format, value_format), keys, values = cache.formats, cache.keys, cache.values
    else:
        key_format = value_format = Affine(cache.bits, cache.group_size)
        keys, values = cache.keys_and_values()
    key_rows, key_dim, dtype = _join(key_format, keys)
    value_rows, value_dim, value_dtype = _join(value_format, values)
    spec = LayerSpec(key_rows.shape[1], key_dim, value_dim, dtype, value_dtype)
    return replace(spec, keys=key_format, values=value_format), key_rows, value_rows


def _split(packed: Affine | None, rows: mx.array, dim: int, dtype: mx.Dtype) -> Side:
    return (rows,) if packed is None else packed.split(rows, dim, dtype)


def _join(packed: Affine | None, side: Any) -> tuple[mx.array, int, mx.Dtype]:
    """A side's rows, elements a head, and the model's dtype."""
    if packed is None:
        (rows,) = side
        return rows, rows.shape[-1], rows.dtype
    words, scales, biases = side
    return packed.join(words, scales, biases), words.shape[-1] * 32 // packed.bits, scales.dtype


def _numbers(packed: Affine | None) -> tuple[int, int]:
    return (0, 0) if packed is None else (packed.bits, packed.group_size)


def _affine(bits: int, group_size: int) -> Affine | None:
    return Affine(bits, group_size) if bits else None
