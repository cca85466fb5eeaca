"""The fields that most of mlx-lm's configurations share, small; a model takes those it has (``from_dict``)."""

from __future__ import annotations

from typing import Any

VOCABULARY = 97
WINDOW = 8

Config = dict[str, Any]

# Attention and feed-forward network.
_COMMON: Config = {
    "attention_bias": False,
    "conv_bias": True,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "norm_eps": 1e-5,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "use_bias": False,
    "vocab_size": VOCABULARY,
}
_EXPERTS: Config = {
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "moe_topk": 2,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 32,
    "topk_group": 1,
}
_LATENT: Config = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_GRANITE: Config = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
_LINEAR: Config = {
    "full_attention_interval": 2,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}

BASE: Config = _COMMON | _EXPERTS | _LATENT | _GRANITE | _LINEAR

# Four layers, of which the first and third look back on a window.
LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
WINDOWED: Config = {
    "layer_types": LAYER_TYPES,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}

SCALED_ROPE: Config = {
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
    "rope_type": "default",
    "type": "default",
}


def text(**fields: Any) -> Config:
    """A configuration whose language model is one part of it."""
    return {"text_config": BASE | {"model_type": "text"} | fields}
