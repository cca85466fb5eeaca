"""UnusedCache: stands where a model has a cache that it never writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from .errors import CacheStateError


class UnusedCache:
    """Empty for ever, for one request or a batch; mlx-lm's own empty caches can't be taken apart again.

    In a list of caches its answers must not stand in the way of the others': it can be trimmed by any number.
    """

    offset = 0
    nbytes = 0

    @property
    def state(self) -> list[Any]:
        """Nothing."""
        return []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> NoReturn:
        """Not possible. Raises CacheStateError."""
        raise CacheStateError("the model writes a cache that it didn't use when the plan was made; attach it again")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """As an empty cache of mlx-lm's answers."""
        mask: mx.array | str | None = create_attention_mask(N, 0, return_array, window_size)
        return mask

    def is_trimmable(self) -> bool:
        """Always."""
        return True

    def trim(self, n: int) -> int:
        """As if there were ``n`` tokens to take."""
        return n

    def size(self) -> int:
        """0."""
        return 0

    def empty(self) -> bool:
        """Always."""
        return True

    @classmethod
    def merge(cls, caches: Sequence[UnusedCache]) -> UnusedCache:
        """One for all."""
        return cls()

    def extend(self, other: UnusedCache) -> None:
        """Nothing to take over."""

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Nothing to drop."""

    def extract(self, idx: int) -> UnusedCache:
        """One of its own."""
        return UnusedCache()

    def prepare(self, **lengths: Any) -> None:
        """Nothing to come."""

    def finalize(self) -> None:
        """Nothing came."""

    def stock(self) -> KVCache:
        """The cache that mlx-lm would have here."""
        return KVCache()
