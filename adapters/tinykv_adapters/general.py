"""The general adapter: any mlx-lm model, by what its own ``make_cache()`` returns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mlx_lm.models import cache as mlx_cache

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import LayerChoice, ModelAdapter

ATTENTION = "scaled_dot_product_attention"


def model_file(model: Any) -> str:
    """The name of the file of ``mlx_lm.models`` that ``model`` is from; empty for a model from elsewhere."""
    package, _, name = type(model).__module__.rpartition(".")
    return name if package == "mlx_lm.models" else ""


class GeneralAdapter:
    """Pages plain and rotating K/V caches; leaves everything else as mlx-lm made it, with the reason."""

    name = "general"

    def matches(self, model: Any) -> bool:
        """Whether ``model`` has caches at all."""
        return callable(model) and (hasattr(model, "make_cache") or hasattr(model, "layers"))

    def attention_modules(self, model: Any) -> Sequence[ModuleType]:
        """The modules of the model's class and of its layers that have an attention function."""
        names = {type(part).__module__ for part in (model, *model.modules())}
        found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        return [module for module in found if hasattr(module, ATTENTION) and module.__name__ != "mlx_lm.models.base"]

    def choose(self, model: Any, own: Sequence[Any]) -> Sequence[LayerChoice]:
        """Full pages for plain caches, window pages for rotating ones, others as they are."""
        return [general_choice(cache) for cache in own]


def general_choice(cache: Any) -> LayerChoice:
    """What to do with one of mlx-lm's own caches. The exact types only: a subclass may keep more than K and V."""
    kind = type(cache)
    if kind is mlx_cache.KVCache:
        return LayerChoice("full")
    if kind is mlx_cache.RotatingKVCache and cache.keep == 0:
        return LayerChoice("window", window=cache.max_size)
    if kind is mlx_cache.ArraysCache:
        return LayerChoice("dense", reason="recurrent state, which doesn't grow with the context")
    return LayerChoice("dense", reason=f"{kind.__name__} is kept as mlx-lm made it")


@hookimpl(trylast=True)
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter; asked after all others, as it serves any model."""
    return [GeneralAdapter()]
