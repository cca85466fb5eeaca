"""Plain transformers: every layer keeps all K and V of its own and leaves them to attention."""

from __future__ import annotations

from typing import ClassVar

from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.protocols import ModelAdapter

from .family import VARIES, FamilyAdapter, each

PLAIN = """
apertus bitnet cohere ernie4_5 exaone gemma glm glm4 gpt2 gpt_neox gptj granite helium hunyuan_v1_dense internlm2
internlm3 lille-130m llama4_text mimo minicpm nanbeige nanochat nemotron olmo2 openelm phi phi3 qwen qwen2 qwen2_vl
qwen3 qwen3_vl seed_oss smollm3 stablelm starcoder2 talkie telechat3
"""


class LlamaLikeAdapter(FamilyAdapter):
    """llama, qwen2, qwen3, phi3, smollm3, olmo2, glm4, granite, cohere and their like."""

    name = "llama-like"
    models: ClassVar = {
        **each(PLAIN),
        # Checkpoints may give some of their layers a window.
        **each("llama pixtral", direct=("full", "window")),
        # Of its language models one has latent attention: mistral4.
        **each("mistral3", direct=("full", "window"), gathered={"full": VARIES}, latent=True),
        # Some of its blocks have no attention, others a cache and no use for it.
        **each("nemotron-nas", unused=True, per_layer=None),
    }


@hookimpl
def tinykv_model_adapters() -> list[ModelAdapter]:
    """This module's adapter."""
    return [LlamaLikeAdapter()]
