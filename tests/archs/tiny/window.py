"""Models some of whose layers look back on a sliding window, or on the current chunk."""

from __future__ import annotations

from typing import Any

from .base import BASE, LAYER_TYPES, SCALED_ROPE, VOCABULARY, WINDOW, WINDOWED, Config, text

_ROPE: dict[str, Any] = {
    kind: {"rope_theta": 1e4, "rope_type": "default", "type": "default"}
    for kind in ("sliding_attention", "full_attention")
}
_GEMMA3 = WINDOWED | {"query_pre_attn_scalar": 16}
_GEMMA4 = WINDOWED | {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 6,
    "layer_types": [*LAYER_TYPES, *LAYER_TYPES[:2]],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
}

CONFIGS: dict[str, Config] = {
    "afmoe": WINDOWED | {"num_dense_layers": 1},
    "cohere2": WINDOWED,
    "exaone4": WINDOWED | {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": WINDOWED | {"is_moe_layer": [False, True, True, True]},
    "gemma3": text(**_GEMMA3) | {"vocab_size": VOCABULARY},
    "gemma3_text": _GEMMA3,
    "gemma3n": text(
        **WINDOWED
        | {
            "activation_sparsity_pattern": [0.0] * 6,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_num_inputs": 2,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "layer_types": [*LAYER_TYPES, *LAYER_TYPES[:2]],
            "model_type": "gemma3n_text",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "rope_local_base_freq": 1e4,
            "vocab_size_per_layer_input": VOCABULARY,
        }
    ),
    "gemma4": text(**_GEMMA4 | {"model_type": "gemma4_text"}) | {"vocab_size": VOCABULARY},
    "gemma4_text": _GEMMA4,
    "gpt_oss": WINDOWED | {"intermediate_size": 64},
    "laguna": WINDOWED | {"rope_parameters": _ROPE, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "llama4": text(
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=128,
        model_type="llama4",
        num_experts_per_tok=1,
        num_hidden_layers=4,
        num_local_experts=2,
        rope_scaling=None,
        use_qk_norm=True,
    ),
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "mellum": WINDOWED | {"rope_parameters": _ROPE},
    "mimo_v2_flash": {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "num_hidden_layers": 4,
        "scoring_func": "sigmoid",
        "sliding_window_size": WINDOW,
        "swa_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 1e4,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
    },
    "ministral3": WINDOWED | {"rope_parameters": SCALED_ROPE},
    "muse_glimmer": WINDOWED,
    "muse_spark": text(
        **WINDOWED
        | {
            "final_logit_softcapping": 30.0,
            "layer_rope_theta": [1e4, 0, 1e4, 0],
            "moe_hidden_size": 32,
            "num_shared_experts": 0,
            "output_multiplier": 1.0,
            "post_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1e4},
        }
    ),
    "olmo3": WINDOWED,
    "plamo3": WINDOWED | {"window_size": WINDOW, "sliding_window": None},
    "spark2_5": WINDOWED | {"rope_parameters": _ROPE},
    "step3p5": WINDOWED
    | {
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "num_attention_groups": 2,
        "share_expert_dim": 32,
    },
}

assert BASE["num_hidden_layers"] == 2
