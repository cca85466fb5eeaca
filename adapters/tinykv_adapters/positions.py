"""gpt_bigcode: learned positions, which mlx-lm looks up for one request only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter, Replacement

from .family import FamilyAdapter, each


class PositionsAdapter(FamilyAdapter):
    """Looks up a position for each row of a batch."""

    name = "positions"
    models: ClassVar = each("gpt_bigcode")

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """The model's call, which looks positions up."""
        return [Replacement(sys.modules[type(model).__module__].GPTBigCodeModel, "__call__", _model)]


def _model(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any, cache: Any = None) -> Any:
        offset = cache[0].offset if cache is not None else 0
        if not isinstance(offset, mx.array):
            return original(self, inputs, cache)
        hidden = self.wte(inputs) + self.wpe(offset[:, None] + mx.arange(inputs.shape[1]))
        mask = create_attention_mask(hidden, cache[0])
        for layer, layer_cache in zip(self.h, cache, strict=True):
            hidden = layer(hidden, mask, cache=layer_cache)
        return self.ln_f(hidden)

    return call


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [PositionsAdapter()]
