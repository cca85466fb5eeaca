"""Mixtures of experts with plain attention."""

from __future__ import annotations

from .base import Config, text

CONFIGS: dict[str, Config] = {
    "Klear": {},
    "bailing_moe": {},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "n_heads": 4,
        "n_layers": 2,
    },
    "deepseek": {},
    "dots1": {},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "glm4_moe": {"rope_scaling": None, "use_qk_norm": True},
    "granitemoe": {},
    "hunyuan": {
        "cla_share_factor": 2,
        "num_shared_expert": 1,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
        "use_cla": True,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
    },
    "minimax": {"rotary_dim": 8, "shared_intermediate_size": 64},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {
        "rope_scaling": {"long_factor": [1.0] * 8, "long_mscale": 1.0, "short_factor": [1.0] * 8, "short_mscale": 1.0}
    },
    "phixtral": {"model_dim": 64, "num_heads": 4, "num_layers": 2, "num_vocab": 97, "rotary_dim": 8},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_vl_moe": text(),
    "solar_open": {},
}
