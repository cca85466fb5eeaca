"""The built-in provider "dense": mlx-lm's own caches, to compare with or to fall back on without uninstalling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models import cache as mlx_cache

from .errors import ConfigError
from .hookspecs import hookimpl
from .protocols import AttachContext, CacheProvider, CacheSession, LayerPlan
from .retention import KEPT_TOKENS
from .stats import PoolStats


class DenseSession:
    """Hands out what the model's own ``make_cache()`` makes."""

    def __init__(self, context: AttachContext) -> None:
        self._context = context

    @property
    def plan(self) -> Sequence[LayerPlan]:
        """Every layer as mlx-lm has it."""
        reason = "cache is set to 'dense'"
        return [LayerPlan(index, "dense", "dense", "mlx-lm", reason) for index in range(len(self._context.own_cache()))]

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """What mlx-lm would have made."""
        own = self._context.own_cache()
        if max_kv_size is None:
            return own
        limited = mlx_cache.RotatingKVCache
        return [limited(max_kv_size, keep=KEPT_TOKENS) if type(cache) is mlx_cache.KVCache else cache for cache in own]

    def stats(self) -> PoolStats:
        """All zero: there is no pool."""
        return PoolStats()

    def check(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Nothing to close."""


class DenseProvider:
    """mlx-lm's own caches."""

    name = "dense"

    def check(self, context: AttachContext) -> None:
        """Raise ConfigError for settings that only pages have."""
        for field in ("bits", "key_bits", "value_bits"):
            if getattr(context.config, field) is not None:
                raise ConfigError(
                    field, "is for pages, and cache is set to 'dense'; give mlx-lm its own kv_bits (its flag --kv-bits)"
                )

    def open(self, context: AttachContext) -> CacheSession:
        """A session that changes nothing."""
        return DenseSession(context)


@hookimpl
def tinykv_providers() -> list[CacheProvider]:
    """This module's provider."""
    return [DenseProvider()]
