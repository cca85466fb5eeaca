"""Multi-head latent attention (MLA): layers keep a latent vector per token in place of keys and values."""

from __future__ import annotations

from .base import SCALED_ROPE, Config, text

_SCALING = {"factor": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}
_LONGCAT: Config = {
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "num_layers": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
}
_INDEX: Config = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}

CONFIGS: dict[str, Config] = {
    "deepseek_v2": {"rope_scaling": _SCALING},
    "deepseek_v3": {},
    # The best 8 tokens of the context only: an indexer of its own, with a cache of its own.
    "deepseek_v32": _INDEX,
    "deepseek_v41": {
        "candidate_block_size": 4,
        "candidate_topk_blocks": 8,
        "compress_ratios": (0, 4),
        "head_dim": 32,
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "sliding_window": 8,
    }
    | _INDEX,
    "glm4_moe_lite": {},
    "glm_moe_dsa": _INDEX
    | {
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "type": "default"},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "kimi_k25": text(model_type="kimi_k25"),
    "kimi_vl": text(model_type="kimi_vl"),
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT | {"emb_neighbor_num": 2, "emb_split_num": 2, "ngram_vocab_size_ratio": 3},
    "minicpm3": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0, "num_key_value_heads": 4}
    | {"rope_scaling": {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 4096}},
    "mistral4": {"rope_parameters": SCALED_ROPE},
    "youtu_llm": {},
}

# Not latent, but with an indexer's cache beside keys and values too.
CONFIGS["minimax_m3_vl"] = text(
    dense_intermediate_size=128,
    index_block_size=4,
    index_head_dim=16,
    index_n_heads=2,
    index_topk_blocks=2,
    model_type="minimax_m3",
    moe_layer_freq=[0, 1],
    num_hidden_layers=2,
    rotary_dim=8,
    shared_intermediate_size=32,
    sparse_attention_freq=[0, 1],
)
