"""Tiny random models of many architectures, and greedy generation to compare paged and stock caches with."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

VOCABULARY = 97

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
_WINDOW = {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen2": _BASE | {"tie_word_embeddings": True},
    "gemma3_text": _BASE | _WINDOW | {"query_pre_attn_scalar": 16},
    "gpt_oss": _BASE
    | {
        "intermediate_size": 64,
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma2": _BASE
    | _WINDOW
    | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "deepseek_v3": _BASE
    | {
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "qwen3_next": _BASE
    | {
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "cohere2": _BASE | _WINDOW,
    "phi": _BASE
    | {"num_hidden_layers": 2, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "falcon_h1": _BASE
    | {
        "head_dim": 16,
        "num_hidden_layers": 2,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    },
    "llama4": {
        "text_config": _BASE
        | {
            "model_type": "llama4",
            "attention_bias": False,
            "attention_chunk_size": 8,
            "head_dim": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "jamba": _BASE
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "nemotron_h": _BASE
    | {
        "attention_bias": False,
        "conv_kernel": 4,
        "head_dim": 16,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "n_groups": 2,
        "ssm_state_size": 16,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "mamba": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


def make(kind: str, seed: int = 3, **fields: Any) -> Any:
    """A new model of an mlx-lm module, with ``fields`` of its configuration changed.

    The weights are perturbed, as fresh ones give nearly the same token everywhere.
    """
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    config = {"model_type": kind} | CONFIGS[kind] | fields
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    model.apply(lambda weight: weight + 0.3 * mx.random.normal(weight.shape) if _is_matrix(weight) else weight)
    mx.eval(model.parameters())
    return model


@functools.cache
def shared(kind: str, seed: int = 3, **fields: Any) -> Any:
    """The same model for the same arguments; tests attach to it one after the other and must not change it."""
    return make(kind, seed, **fields)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids, different for each seed from the first token on."""
    return [(5 * i + 7 * seed + i * i * (seed + 1)) % VOCABULARY for i in range(length)]


def greedy(model: Any, tokens: Sequence[int], count: int, cache: Any = None, **options: Any) -> list[int]:
    """The next ``count`` tokens by mlx-lm's own generation loop."""
    steps = generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=cache, **options)
    return [int(token) for token, _ in steps]


def batched(model: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
    """The next ``count`` tokens of each prompt by mlx-lm's batch generator, all in one batch."""
    generator = BatchGenerator(model, max_tokens=count, **options)
    ids = generator.insert([list(tokens) for tokens in prompts])
    found: dict[int, list[int]] = {one: [] for one in ids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(int(response.token))
    generator.close()
    return [found[one] for one in ids]


def logits(model: Any, tokens: Sequence[int], cache: Any) -> mx.array:
    """Evaluated logits ``(tokens, vocabulary)`` of one forward pass."""
    out = model(mx.array([tokens]), cache=cache)[0]
    mx.eval(out)
    return out


def largest_difference(a: mx.array, b: mx.array) -> float:
    """The largest absolute difference between two arrays of one shape."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(mx.abs(a - b).max()) if a.size else 0.0


def _is_matrix(weight: mx.array) -> bool:
    return weight.ndim > 1 and weight.dtype == mx.float32
