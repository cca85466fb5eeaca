"""Multi-head latent attention (MLA): a latent vector for each token in place of keys and values."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import RECURRENT, VARIES, FamilyAdapter, each

# The model multiplies the latent vectors into its scores and values itself, so that they are gathered for it.
ABSORBED = {"direct": (), "gathered": {"full": "values.swapaxes"}, "latent": True}
# Beside the latent vectors the keys of an indexer, which picks the tokens to attend to.
INDEXED = {"direct": (), "gathered": {"full": "keys.shape"}, "latent": True, "per_layer": 2}


class LatentAdapter(FamilyAdapter):
    """deepseek_v2, deepseek_v3, deepseek_v32, minicpm3, kimi_vl, longcat_flash and their like."""

    name = "latent"
    models: ClassVar = {
        # They write out the heads' keys and values.
        **each("deepseek_v2 minicpm3 youtu_llm"),
        **each("deepseek_v3 glm4_moe_lite kimi_k25 kimi_vl", **ABSORBED),
        **each("mistral4", direct=(), gathered={"full": VARIES}, latent=True),
        **each("longcat_flash", **ABSORBED, per_layer=2),
        **each("longcat_flash_ngram", **ABSORBED, own=(RECURRENT,), per_layer=None),
        **each("deepseek_v32 glm_moe_dsa", **INDEXED),
        # A window of latent vectors, and compressed groups of them behind it, in a cache of the model's own.
        **each("deepseek_v41", direct=(), own=("LayerCache",)),
    }


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [LatentAdapter()]
