"""A llama GGUF, converted into a folder that mlx-lm loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, cast

import mlx.core as mx

from tinykv_plugin.errors import DemoModelError

from .tokenizer import end_token_ids, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Dtype = Literal["float32", "quantized"]

CONVERSION_VERSION = 1
"""To be raised when the converted files change, so that folders made before are made again."""

_GROUP_SIZE = 32
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_dtype() -> Dtype:
    """Returns what runs fastest here: "quantized" on a GPU, "float32" on a CPU (where 4 bits run at 0.3 tokens/s)."""
    return "quantized" if mx.default_device().type == mx.DeviceType.gpu else "float32"


def convert_gguf(gguf: Path, folder: Path, dtype: Dtype, progress: Callable[[float], None] = lambda done: None) -> None:
    """Writes ``config.json``, ``model.safetensors`` and the tokenizer's files of the GGUF into the existing folder.

    gguf: a llama model whose matrices are quantized in groups of 32, or floating point.
    dtype: "float32" dequantizes everything; "quantized" keeps quantized matrices as they are, the rest as float16.
    progress: is called with the share of weights converted, 0 to 1.

    Raises DemoModelError if the GGUF is not a model that this can convert, OSError if a file can't be written.
    """
    try:
        loaded = mx.load(str(gguf), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise DemoModelError(f"{gguf} can't be read as a GGUF: {error}") from error
    arrays, raw = cast("tuple[dict[str, mx.array], dict[str, Any]]", loaded)
    metadata = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in raw.items()}
    config = _config(metadata, tied="output.weight" not in arrays)
    modules = sum(key.endswith(".weight") for key in arrays)
    weights: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {}
    for done, (name, parts) in enumerate(_by_module(arrays)):
        bits = _bits(name, parts)
        if dtype == "float32":
            parts = {"weight": _dequantized(parts, bits)}
        elif bits is None:
            parts = {"weight": parts["weight"].astype(mx.float16)}
        else:
            quantization[name] = {"group_size": _GROUP_SIZE, "bits": bits}
        mx.eval(parts)
        weights.update({f"{name}.{part}": array for part, array in parts.items()})
        progress((done + 1) / modules)
    if quantization:
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": 4, **quantization}
    try:
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    except RuntimeError as error:
        raise OSError(f"{folder}: {error}") from error
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    write_tokenizer(metadata, folder, config["max_position_embeddings"])


def _config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """Returns the content of ``config.json`` for mlx-lm's llama. Raises DemoModelError if metadata is missing."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise DemoModelError(f"the GGUF's architecture is {architecture}; allowed: llama")

    def get(key: str) -> Any:
        if f"llama.{key}" not in metadata:
            raise DemoModelError(f"the GGUF has no llama.{key}")
        return metadata[f"llama.{key}"]

    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise DemoModelError("the GGUF scales its rotary positions, which the conversion can't do")
    heads = get("attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", get("embedding_length") // heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise DemoModelError("the GGUF rotates a part of each head, which the conversion can't do")
    ends = end_token_ids(metadata)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": get("context_length"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        # A GGUF llama has the rows of its q and k permuted so that neighbours rotate together.
        "rope_traditional": True,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends,
    }


def _by_module(arrays: Mapping[str, mx.array]) -> Iterator[tuple[str, dict[str, mx.array]]]:
    """Yields mlx-lm's name of each module with its arrays: weight, and scales and biases where it is quantized.

    Raises DemoModelError at a tensor that mlx-lm's llama has no place for.
    """
    for key in arrays:
        stem, _, part = key.rpartition(".")
        if part in ("scales", "biases"):
            continue
        block, _, short = stem.rpartition(".")
        if part != "weight" or short not in _NAMES:
            raise DemoModelError(f"the GGUF has a tensor {key}, which the conversion doesn't know")
        prefix = f"model.layers.{block.removeprefix('blk.')}." if block else ""
        names = {part: f"{stem}.{part}" for part in ("weight", "scales", "biases")}
        yield prefix + _NAMES[short], {part: arrays[name] for part, name in names.items() if name in arrays}


def _bits(name: str, parts: Mapping[str, mx.array]) -> int | None:
    """Returns the bits of each weight, None for floating point. Raises DemoModelError at a broken shape."""
    if "scales" not in parts:
        return None
    packed, groups = parts["weight"].shape[-1], parts["scales"].shape[-1]
    # A group of 32 weights fills as many 32-bit words as a weight has bits.
    bits = packed // groups
    if packed % groups or bits not in (4, 8):
        raise DemoModelError(f"{name}: {packed} words for {groups} groups of {_GROUP_SIZE} weights")
    return bits


def _dequantized(parts: Mapping[str, mx.array], bits: int | None) -> mx.array:
    """Returns the module's weight in float32."""
    if bits is None:
        return parts["weight"].astype(mx.float32)
    scales, biases = (parts[part].astype(mx.float32) for part in ("scales", "biases"))
    return mx.dequantize(parts["weight"], scales, biases, group_size=_GROUP_SIZE, bits=bits)
