"""Models some of whose layers look back on a sliding window: their pages go back to the pool behind it."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import FamilyAdapter, each

BOTH = ("full", "window")


class WindowAdapter(FamilyAdapter):
    """gemma3, gemma4, gpt_oss, cohere2, exaone4, ministral3, olmo3 and their like."""

    name = "window"
    models: ClassVar = {
        **each(
            "afmoe cohere2 exaone4 exaone_moe gemma3 gemma3_text gpt_oss laguna mellum mimo_v2_flash ministral3 "
            "muse_glimmer muse_spark olmo3 plamo3 spark2_5 step3p5",
            direct=BOTH,
        ),
        # The last layers attend to an earlier layer's K and V, which are handed to them.
        **each("gemma4 gemma4_text", direct=BOTH, per_layer=None),
        # Each layer is run more than once, with a cache each time.
        **each("iquestloopcoder", direct=BOTH, per_layer=None),
    }


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [WindowAdapter()]
