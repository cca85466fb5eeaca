"""Recurrent models: a state that doesn't grow with the context, so there is nothing to page."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import RECURRENT, FamilyAdapter, each


class RecurrentAdapter(FamilyAdapter):
    """mamba, mamba2 and rwkv7."""

    name = "recurrent"
    models: ClassVar = each("mamba mamba2 rwkv7", direct=(), own=(RECURRENT,))


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [RecurrentAdapter()]
