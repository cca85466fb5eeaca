"""A cache provider that leaves storage to mlx-lm and counts tokens."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinykv_plugin.protocols import LayerPlan
from tinykv_plugin.stats import PoolStats

if TYPE_CHECKING:
    from tinykv_plugin.protocols import AttachContext


class CountingProvider:
    """Chosen with ``cache="example"``."""

    name = "example"

    def open(self, context: AttachContext) -> CountingSession:
        return CountingSession(context)


class CountingSession:
    """The model's own caches, and how many tokens those still alive hold."""

    def __init__(self, context: AttachContext) -> None:
        self._context = context
        self._first_layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.plan: Sequence[LayerPlan] = [
            LayerPlan(layer, "dense", "dense", "mlx", "the example counts tokens in mlx-lm's own caches")
            for layer, _ in enumerate(context.own_cache())
        ]

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        caches = self._context.own_cache()
        self._first_layers.add(caches[0])
        return caches

    def stats(self) -> PoolStats:
        alive = list(self._first_layers)
        return PoolStats(sequences=len(alive), tokens=sum(cache.offset for cache in alive))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass
