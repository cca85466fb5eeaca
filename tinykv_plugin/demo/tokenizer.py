"""The Hugging Face tokenizer files of a GGUF model, rebuilt from the GGUF's metadata."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tinykv_plugin.errors import DemoModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ids after which generation stops, the GGUF's own first, then the usual ends of turn and of document.

    Only tokens that the GGUF marks as control tokens count. Raises DemoModelError if metadata is missing.
    """
    tokens, types = _vocabulary(metadata)
    ends = [int(_get(metadata, "eos_token_id"))]
    control = {token: index for index, token in enumerate(tokens) if types[index] == _CONTROL}
    ends += [control[token] for token in _TURN_ENDS if token in control and control[token] not in ends]
    return ends


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, context_length: int) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` into the folder, loadable without a network.

    ``metadata`` is the GGUF's, with arrays turned into Python values; ``context_length`` counts tokens.
    Raises DemoModelError if the GGUF's tokenizer is of a kind that is not known here.
    """
    _write_json(folder / "tokenizer.json", _tokenizer(metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, context_length))


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``tokenizer.json``: byte-level BPE with the GGUF's pre-tokenizer."""
    kind, pre = str(_get(metadata, "model")), str(_get(metadata, "pre"))
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise DemoModelError(f"the GGUF's tokenizer is {kind}/{pre}; allowed: gpt2/{', gpt2/'.join(_PRE_TOKENIZERS)}")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise DemoModelError("the GGUF's tokenizer starts each text with a token, which the demonstration can't do")
    tokens, types = _vocabulary(metadata)
    merges = [merge.split(" ") for merge in _get(metadata, "merges")]
    if any(len(merge) != 2 for merge in merges):
        raise DemoModelError("the GGUF's tokenizer has a merge that is not of two tokens")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": types[index] != _USER_DEFINED,
            }
            for index, token in enumerate(tokens)
            if types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _tokenizer_config(metadata: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Returns the content of ``tokenizer_config.json``: named special tokens and the chat template."""
    tokens, _ = _vocabulary(metadata)
    config: dict[str, Any] = {
        # This class takes tokenizer.json as it is; the model families' own classes rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[int(index)]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    """Returns the tokens by id and their GGUF types. Raises DemoModelError if they don't match."""
    tokens: Sequence[str] = _get(metadata, "tokens")
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise DemoModelError(f"the GGUF's vocabulary is broken: {len(tokens)} tokens, {len(types)} types")
    return tokens, types


def _get(metadata: Mapping[str, Any], key: str) -> Any:
    """Returns ``tokenizer.ggml.<key>``. Raises DemoModelError if the GGUF has none."""
    name = f"tokenizer.ggml.{key}"
    if name not in metadata:
        raise DemoModelError(f"the GGUF has no {name}")
    return metadata[name]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
