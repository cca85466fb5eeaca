"""Batches of models that can run only one request at a time: their rows are run one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache

from .batch_cache import BatchPagedKVCache
from .layout import leaves, replace_leaves


class RowsCache:
    """mlx-lm's batch cache protocol for a layer without pages: the requests' own caches, next to each other."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        # Valid tokens still to come per row while a right-padded prompt is processed.
        self._lengths: list[int] | None = None

    def prepare(self, *, lengths: Sequence[int] | None = None, **_padding: Any) -> None:
        """Say how many of the tokens to come are each row's own; the others are padding and not run."""
        self._lengths = None if lengths is None else [int(length) for length in lengths]

    def finalize(self) -> None:
        """The padded prompt is processed."""
        self._lengths = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the given rows, in that order."""
        self.rows = [self.rows[index] for index in np.asarray(batch_indices).tolist()]

    def extend(self, other: RowsCache) -> None:
        """Take over the rows of ``other``, which must not be used further."""
        self.rows = self.rows + other.rows

    def extract(self, idx: int) -> Any:
        """A copy of one row's cache."""
        return copy.deepcopy(self.rows[idx])

    @property
    def state(self) -> list[Any]:
        """What the rows' caches have."""
        return [row.state for row in self.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.nbytes for row in self.rows)

    def empty(self) -> bool:
        """Whether no row has a token."""
        return all(row.empty() for row in self.rows)

    def is_trimmable(self) -> bool:
        """Never: what mlx-lm says of caches without pages is not to be relied on."""
        return False


# Of mlx-lm's classes those that say rightly whether tokens can be taken back; of others nobody knows.
_HONEST = (
    mlx_cache.ArraysCache,
    mlx_cache.ConcatenateKVCache,
    mlx_cache.KVCache,
    mlx_cache.QuantizedKVCache,
    mlx_cache.RotatingKVCache,
)


def guard(leaf: Any, separate: bool) -> None:
    """Make a cache that is kept as mlx-lm made it refuse what it would do wrong; modifies ``leaf``.

    With ``separate`` it can be merged with others of its kind.
    """
    if separate:
        leaf.merge = merge_rows
    if type(leaf) not in _HONEST:
        leaf.is_trimmable = _never


def _never() -> bool:
    return False


def merge_rows(caches: Sequence[Any]) -> RowsCache:
    """The batch form of copies of ``caches``; set as the ``merge`` of a request's cache without pages."""
    return RowsCache([copy.deepcopy(cache) for cache in caches])


def separately(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model's ``__call__`` that runs the rows of a batch one after the other, if their attachment asks for it."""

    def call(self: Any, inputs: mx.array, cache: Any = None, **more: Any) -> Any:
        batched = [] if cache is None else _asking(cache)
        if not batched:
            return original(self, inputs, cache=cache, **more)
        width = inputs.shape[1]
        counts = _counts(batched, inputs.shape[0], width)
        outputs = [
            original(self, inputs[row : row + 1, :count], cache=_row(cache, row), **more) if count else None
            for row, count in enumerate(counts)
        ]
        for leaf in batched:
            if leaf._lengths is not None:
                leaf._lengths = [max(0, length - width) for length in leaf._lengths]
        like = next(output for output in outputs if output is not None)
        blank = mx.zeros((1, width, *like.shape[2:]), like.dtype)
        padded = [
            blank if output is None else mx.concatenate([output, blank[:, output.shape[1] :]], axis=1)
            for output in outputs
        ]
        return mx.concatenate(padded, axis=0)

    return call


def _asking(caches: Sequence[Any]) -> list[RowsCache | BatchPagedKVCache]:
    """The batched leaves of ``caches`` if their rows are to be run one by one."""
    found = [leaf for leaf in leaves(caches) if isinstance(leaf, RowsCache | BatchPagedKVCache)]
    return found if any(isinstance(leaf, RowsCache) or leaf._session.separate for leaf in found) else []


def _counts(batched: Sequence[RowsCache | BatchPagedKVCache], rows: int, width: int) -> list[int]:
    """Valid tokens of each row among the ``width`` to come."""
    lengths = next((leaf._lengths for leaf in batched if leaf._lengths is not None), None)
    return [width] * rows if lengths is None else [min(width, length) for length in lengths]


def _row(caches: Sequence[Any], row: int) -> list[Any]:
    """One row's caches as those of a single request; what is written to them is written to the batch's."""
    views: Mapping[int, Any] = {
        index: leaf._session.single(leaf._layer, leaf._rows[row])
        if isinstance(leaf, BatchPagedKVCache)
        else leaf.rows[row]
        if isinstance(leaf, RowsCache)
        else leaf
        for index, leaf in enumerate(leaves(caches))
    }
    return replace_leaves(caches, views)
