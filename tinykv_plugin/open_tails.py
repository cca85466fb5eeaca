"""The tokens of open pages in a prompt-cache file: behind what mlx-lm's loader looks at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .cache import PagedKVCache
from .pages import LayerSpec
from .reading import open_tokens


@dataclass(frozen=True)
class Tail:
    """K and V ``(1, kv_heads, tokens, head_dim)`` of the tokens before position ``end``, as the model made them."""

    end: int
    keys: mx.array
    values: mx.array


# By layer: what its open pages held.
Tails = dict[int, Tail]

_NAME = re.compile(r"(\d+)\.open(\d+)\.(keys|values)")


def tails_of(leaves: Sequence[Any]) -> Tails:
    """What the open pages of a request's caches hold."""
    tails: Tails = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, PagedKVCache) or leaf._session.kv_format.start > leaf.offset:
            continue  # the file is in full precision
        tokens = open_tokens(leaf._session, leaf._layer, leaf._row, rewind=True)
        if tokens is not None:
            tails[index] = Tail(leaf.offset, *tokens)
    return tails


def named(tails: Tails, entries: int) -> dict[str, mx.array]:
    """The arrays by their names in a file of so many caches: mlx-lm takes them for those of one cache more."""
    return {
        f"{entries}.open{index}.{side}": array
        for index, tail in tails.items()
        for side, array in (("keys", tail.keys), ("values", tail.values))
    }


def add_to_file(name: str, arrays: Mapping[str, mx.array]) -> None:
    """Write a safetensors file anew with more arrays."""
    loaded: Any = mx.load(name, return_metadata=True)
    there, metadata = loaded
    mx.eval(there)  # it is read while it is used, and about to be replaced
    mx.save_safetensors(name, {**there, **arrays}, metadata)


def read_tails(name: str, ends: Sequence[int]) -> Tails:
    """What :func:`add_to_file` wrote; ``ends`` are the lengths of all layers."""
    arrays: Any = mx.load(name)
    sides: dict[int, dict[str, mx.array]] = {}
    for key, array in arrays.items():
        if match := _NAME.fullmatch(key):
            sides.setdefault(int(match[2]), {})[match[3]] = array
    return {
        index: Tail(ends[index], found["keys"], found["values"])
        for index, found in sides.items()
        if len(found) == 2 and index < len(ends)
    }


def as_made(
    spec: LayerSpec, stop: int, stored: tuple[mx.array, mx.array], tail: Tail | None
) -> tuple[mx.array, mx.array]:
    """``stored`` K and V of the tokens before position ``stop`` as the model made them, as far as ``tail`` has them.

    The others as they are in the pages. A cache may have changed since the tail was written: it counts where it is
    stored as the cache has it.
    """
    full = spec.decode(*stored)
    if tail is None or LayerSpec.of(tail.keys, tail.values) != spec.unpacked:
        return full
    first, last = stop - stored[0].shape[2], min(stop, tail.end)
    begin = max(first, tail.end - tail.keys.shape[2], 0)
    if begin >= last:
        return full
    place = slice(begin - first, last - first)
    made = [side[:, :, begin - tail.end + side.shape[2] :][:, :, : last - begin] for side in (tail.keys, tail.values)]
    alike = [
        (rows == side[:, :, place]).all(axis=(1, 3), keepdims=True)
        for rows, side in zip(spec.encode(made[0], made[1]), stored, strict=True)
    ]
    same = alike[0] & alike[1]
    keys, values = (
        mx.concatenate(
            [side[:, :, : place.start], mx.where(same, mine, side[:, :, place]), side[:, :, place.stop :]], axis=2
        )
        for side, mine in zip(full, made, strict=True)
    )
    return keys, values
