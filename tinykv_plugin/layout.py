"""The shape of a model's cache list: leaves in order, and the same shape with other leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList


def leaves(own: Sequence[Any]) -> list[Any]:
    """The leaf caches of ``own``, what a model's ``make_cache()`` returns; a CacheList counts by its parts."""
    return [leaf for entry in own for leaf in _leaves(entry)]


def entries(own: Sequence[Any]) -> list[list[int]]:
    """For each entry of ``own`` the indices of its leaves."""
    found: list[list[int]] = []
    index = 0
    for entry in own:
        count = len(list(_leaves(entry)))
        found.append(list(range(index, index + count)))
        index += count
    return found


def replace_leaves(own: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """``own`` with the leaves at the indices of ``new`` replaced; its CacheLists are made anew."""
    position = iter(range(len(leaves(own))))
    return [_build(entry, new, position) for entry in own]


def _build(entry: Any, new: Mapping[int, Any], position: Iterator[int]) -> Any:
    # Not a nested function: a recursive closure is a reference cycle, and would keep the caches alive with it.
    if isinstance(entry, CacheList):
        return CacheList(*(_build(part, new, position) for part in entry.caches))
    return new.get(next(position), entry)


def _leaves(entry: Any) -> Iterator[Any]:
    if isinstance(entry, CacheList):
        for part in entry.caches:
            yield from _leaves(part)
    else:
        yield entry
