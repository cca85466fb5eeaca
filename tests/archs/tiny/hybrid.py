"""Models that mix attention with recurrent layers, and those that are recurrent only."""

from __future__ import annotations

from .base import BASE, WINDOW, Config, text

_FOUR: Config = {"num_hidden_layers": 4}
_MAMBA: Config = {
    "conv_kernel": 4,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_proj_bias": False,
    "n_groups": 2,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 4,
    "use_conv_bias": True,
}
_KDA: Config = {
    "full_attn_layers": [2, 4],
    "head_dim": 16,
    "kda_layers": [1, 3],
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}
_LFM: Config = {
    "block_auto_adjust_ff_dim": False,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_dense_layers": 1,
    "use_expert_bias": True,
}
_QWEN35: Config = _FOUR | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "type": "default"}}

CONFIGS: dict[str, Config] = {
    "baichuan_m1": _FOUR | {"conv_window": 2, "sliding_window": WINDOW, "sliding_window_layers": [0, 2]},
    "bailing_hybrid": _FOUR | {"group_norm_size": 2, "layer_group_size": 2, "num_key_value_heads": 4},
    "bailing_moe_linear": _FOUR | {"group_norm_size": 2, "layer_group_size": 2},
    "bailing_moe_v3": _FOUR | {"layer_group_size": 2, "moe_shared_expert_intermediate_size": 32},
    "falcon_h1": _MAMBA | {"lm_head_multiplier": 1.0},
    "gear": _FOUR
    | {
        "conv_L_cache": 3,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention", "conv_mixer"],
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
    },
    "granitemoehybrid": _FOUR | _MAMBA | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32},
    "jamba": _FOUR
    | _MAMBA
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "kimi_k3": text(
        **_FOUR
        | {
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "linear_attn_config": _KDA,
            "num_experts_per_token": 2,
        }
    ),
    "kimi_linear": _FOUR | {"linear_attn_config": _KDA, "model_max_length": 512, "num_experts_per_token": 2},
    "lfm2": _FOUR | _LFM,
    "lfm2-vl": text(**_FOUR | _LFM | {"model_type": "lfm2"}),
    "lfm2_moe": _FOUR | _LFM,
    "nemotron_h": _FOUR | _MAMBA | {"hybrid_override_pattern": ["M", "*", "M", "-"], "n_group": None},
    "olmo_hybrid": _FOUR | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "plamo2": _FOUR
    | _MAMBA
    | {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_step": 2, "attention_window_size": WINDOW},
    "prism_hadamard_qwen35": text(**_QWEN35 | {"hidden_size": 128, "num_experts": 0})
    | {
        "modules": [{"block": 0, "dtype": "float16", "embedding": False, "path": "lm_head"}],
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
    },
    "qwen3_5": text(**_QWEN35 | {"num_experts": 0}),
    "qwen3_5_moe": text(**_QWEN35),
    "qwen3_next": _FOUR,
    "recurrent_gemma": _FOUR
    | {
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
    },
}

RECURRENT: dict[str, Config] = {
    "mamba": _MAMBA,
    "mamba2": _MAMBA | {"head_dim": 16, "num_heads": 8, "time_step_limit": (0.0, 100.0)},
    "rwkv7": {"a_low_rank_dim": 16, "decay_low_rank_dim": 16, "gate_low_rank_dim": 16, "v_low_rank_dim": 16},
}

assert "layer_types" not in BASE
