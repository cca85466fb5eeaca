"""The model whose caches are measured alone: the shapes of SmolLM2-135M; and tokens for its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
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


def tokens(count: int) -> mx.array:
    """K or V of ``count`` tokens."""
    made = mx.random.normal((1, KV_HEADS, count, HEAD_DIM))
    mx.eval(made)
    return made


def fill(request: Sequence[Any], count: int, chunk: int = 512) -> None:
    """Append ``count`` tokens to every layer's cache, as a prompt in chunks."""
    for start in range(0, count, chunk):
        new = tokens(min(chunk, count - start))
        for layer in request:
            layer.update_and_fetch(new, new)
        settle(request)


def settle(request: Sequence[Any]) -> None:
    """Evaluate every write."""
    mx.eval([layer.state for layer in request])
