"""Plain transformers: every layer keeps all keys and values."""

from __future__ import annotations

from .base import BASE, SCALED_ROPE, VOCABULARY, Config, text

GPT: Config = {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_inner": 128, "n_layer": 2, "n_positions": 512}

CONFIGS: dict[str, Config] = {
    "apertus": {"post_norm": False, "qk_norm": True},
    "bitnet": {},
    "cohere": {},
    "ernie4_5": {},
    "exaone": {"num_layers": 2},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": GPT | {"rotary_dim": 8},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0}},
    "internlm2": {},
    "internlm3": {},
    "lille-130m": {"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2},
    "llama": {},
    "mimo": {},
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0},
    "mistral3": text(model_type="ministral3", rope_parameters=SCALED_ROPE),
    "nanbeige": {},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
        "num_hidden_layers": 4,
    },
    "olmo": {
        "d_model": 64,
        "embedding_size": VOCABULARY,
        "mlp_hidden_size": 128,
        "n_heads": 4,
        "n_layers": 2,
    },
    "olmo2": {},
    "openelm": {
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0, 1.0],
        "model_dim": 64,
        "num_kv_heads": [2, 2],
        "num_query_heads": [4, 4],
        "num_transformer_layers": 2,
    },
    "phi3": {},
    "pixtral": text(model_type="llama"),
    "qwen": {"kv_channels": 16},
    "qwen2": {},
    "qwen2_vl": text(),
    "qwen3": {},
    "qwen3_vl": text(),
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"norm_epsilon": 1e-5},
    "talkie": {},
    "telechat3": {},
}

# Models that use keys and values themselves, around attention or in place of it.
CONFIGS |= {
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16.0,
    },
    "phi": {"num_key_value_heads": 4},
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 128,
        "gegelu_limit": 20.0,
        "hidden_size": 128,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
    },
    "plamo": {"n_shared_head": 2},
    "stablelm": {"use_qkv_bias": True},
    # The last layers have no keys and values of their own but use an earlier layer's.
    "afm7": {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "num_kv_reuse_layers": 1, "num_layers": 3},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": 8},
}

assert not set(BASE) & {"n_embd", "n_layer"}
