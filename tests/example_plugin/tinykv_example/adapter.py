"""A model adapter for the models of :mod:`tinykv_example.model`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tinykv_plugin.protocols import LayerChoice


class ExampleAdapter:
    """Keeps the last layer in mlx-lm's own cache, so that its work is seen in ``kv.plan``."""

    name = "example"

    def matches(self, model: Any) -> bool:
        return type(model).__module__ == "tinykv_example.model"

    def attention_modules(self, model: Any) -> Sequence[ModuleType]:
        return [importlib.import_module("mlx_lm.models.llama")]

    def choose(self, model: Any, own: Sequence[Any]) -> Sequence[LayerChoice]:
        paged = [LayerChoice("full") for _ in own[:-1]]
        return [*paged, LayerChoice("dense", reason="the example keeps its last layer dense")]
