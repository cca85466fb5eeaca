"""Models that mix attention with recurrent layers, whose state doesn't grow: only the K/V are in pages."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import RECURRENT, FamilyAdapter, each

STATE = (RECURRENT,)
LATENT = {"direct": (), "gathered": {"full": "values.swapaxes"}, "latent": True}


class HybridAdapter(FamilyAdapter):
    """qwen3_next, qwen3_5, jamba, nemotron_h, granitemoehybrid, falcon_h1, lfm2, recurrent_gemma and their like."""

    name = "hybrid"
    models: ClassVar = {
        **each(
            "bailing_moe_linear granitemoehybrid jamba lfm2 lfm2-vl lfm2_moe olmo_hybrid prism_hadamard_qwen35 qwen3_5 "
            "qwen3_5_moe qwen3_next",
            own=STATE,
        ),
        **each("bailing_hybrid bailing_moe_v3 kimi_k3 kimi_linear", **LATENT, own=STATE),
        **each("gear", direct=("full", "window"), own=STATE),
        **each("recurrent_gemma", direct=("window",), own=STATE),
        # Both in every layer.
        **each("falcon_h1", own=STATE, per_layer=2),
        **each("baichuan_m1", direct=("full", "window"), own=STATE, per_layer=2),
        # Layers of feed-forward networks have no cache.
        **each("nemotron_h", own=STATE, per_layer=None),
    }


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [HybridAdapter()]
