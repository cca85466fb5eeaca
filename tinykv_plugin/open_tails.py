"""The tokens of open pages in a prompt-cache file: behind what mlx-lm's loader looks at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .cache import PagedKVCache
from .pages import LayerSpec
from .reading import open_tokens

# By layer: K and V of the tokens in its open page, as the model made them.
Tails = dict[int, tuple[mx.array, mx.array]]

_NAME = re.compile(r"(\d+)\.open(\d+)\.(keys|values)")


def tails_of(leaves: Sequence[Any]) -> Tails:
    """What the open pages of a request's caches hold."""
    tails: Tails = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, PagedKVCache) or leaf._session.kv_format.start > leaf.offset:
            continue  # the file is in full precision
        tokens = open_tokens(leaf._session, leaf._layer, leaf._row)
        if tokens is not None:
            tails[index] = tokens
    return tails


def named(tails: Tails, entries: int) -> dict[str, mx.array]:
    """The arrays by their names in a file of so many caches: mlx-lm takes them for those of one cache more."""
    return {
        f"{entries}.open{index}.{side}": array
        for index, sides in tails.items()
        for side, array in zip(("keys", "values"), sides, strict=True)
    }


def add_to_file(name: str, arrays: Mapping[str, mx.array]) -> None:
    """Write a safetensors file anew with more arrays."""
    loaded: Any = mx.load(name, return_metadata=True)
    there, metadata = loaded
    mx.eval(there)  # it is read while it is used, and about to be replaced
    mx.save_safetensors(name, {**there, **arrays}, metadata)


def read_tails(name: str) -> Tails:
    """What :func:`add_to_file` wrote."""
    arrays: Any = mx.load(name)
    sides: dict[int, dict[str, mx.array]] = {}
    for key, array in arrays.items():
        if match := _NAME.fullmatch(key):
            sides.setdefault(int(match[2]), {})[match[3]] = array
    return {index: (found["keys"], found["values"]) for index, found in sides.items() if len(found) == 2}


def is_tail(spec: LayerSpec, tail: tuple[mx.array, mx.array], keys: mx.array, values: mx.array) -> bool:
    """Whether the stored tokens ``keys`` and ``values`` end with those of ``tail``: a cache may have changed since."""
    count = tail[0].shape[2]
    if keys.shape[2] < count or LayerSpec.of(*tail) != spec.unpacked:
        return False
    rounded = spec.encode(*tail)
    return all(
        bool(mx.array_equal(mine, side[:, :, -count:])) for mine, side in zip(rounded, (keys, values), strict=True)
    )
