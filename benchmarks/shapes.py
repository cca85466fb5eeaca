"""The model whose caches are measured alone: the shapes of SmolLM2-135M."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import llama

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64


def make_model(layers: int = LAYERS) -> Any:
    """A llama whose weights are never used: only its caches and its module's attention are."""
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=HEADS * 2,
            head_dim=HEAD_DIM,
            num_hidden_layers=layers,
            intermediate_size=8,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            rms_norm_eps=1e-5,
            vocab_size=8,
        )
    )
