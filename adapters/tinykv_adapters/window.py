"""plamo3: its masks look back one token further than the caches that mlx-lm gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import RotatingKVCache

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import LayerChoice, ModelAdapter

from .general import GeneralAdapter, general_choice, model_file


class WiderWindowAdapter(GeneralAdapter):
    """A window as wide as the mask says: what a token sees doesn't depend on how its prompt was cut into chunks.

    In mlx-lm the first token of a chunk sees one token fewer than the others do.
    """

    name = "wider-window"

    def matches(self, model: Any) -> bool:
        """Whether ``model`` is a plamo3."""
        return model_file(model) == "plamo3"

    def choose(self, model: Any, own: Sequence[Any]) -> Sequence[LayerChoice]:
        """Windows of one token more than the model's own caches."""
        return [
            LayerChoice("window", window=cache.max_size + 1)
            if type(cache) is RotatingKVCache
            else general_choice(cache)
            for cache in own
        ]


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [WiderWindowAdapter()]
