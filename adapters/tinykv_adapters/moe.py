"""Mixtures of experts: their attention is a plain transformer's."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import FamilyAdapter, each


class MoEAdapter(FamilyAdapter):
    """mixtral, qwen3_moe, glm4_moe, olmoe and their like."""

    name = "moe"
    # hunyuan's layers may share K and V, which it does by handing on what attention was given.
    models: ClassVar = each(
        "Klear bailing_moe dbrx deepseek dots1 ernie4_5_moe glm4_moe granitemoe hunyuan minimax mixtral olmoe phimoe "
        "phixtral qwen2_moe qwen3_moe qwen3_vl_moe solar_open"
    )


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [MoEAdapter()]
