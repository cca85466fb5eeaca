"""From a GGUF to a folder that mlx-lm loads: the weights, the tokenizer, and the real model's answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load, load_model
from tiny_model import SPECIAL, TinyGGUF

from tinykv_plugin.demo import gguf
from tinykv_plugin.demo.gguf import convert_gguf, default_dtype
from tinykv_plugin.errors import DemoModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = [
    "",
    "Hello  world\n\n\tdef f(x):\n    return x ** 2  ",
    "2024-12-31, 3.14159 and 1,000,000; ½ ²³ ٣٤",
    "héllo ünïcödé 日本語 Привет नमस्ते",
    "emoji 😀👩‍👩‍👧‍👦🇫🇷 and \u200b\ufeff",
    "I'm sure they've said we'll go, don't they?",
    "<|im_start|>user\nhi <|im_end|>\n<|endoftext|>",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    def convert(parts: TinyGGUF, dtype: Any = "float32") -> Path:
        folder = tmp_path / f"model-{dtype}"
        folder.mkdir()
        convert_gguf(parts.write(tmp_path / "tiny.gguf"), folder, dtype)
        return folder

    return convert


@pytest.mark.parametrize("which", ["tiny", "untied"])
def test_the_converted_model_computes_the_same(
    which: str, request: pytest.FixtureRequest, convert: Callable[..., Path]
) -> None:
    parts: TinyGGUF = request.getfixturevalue(which)
    model, config = load_model(convert(parts))
    tokens = mx.array([[4, 8, 15, 16, 23, 42]])
    assert mx.allclose(model(tokens), parts.model(tokens), atol=1e-5)
    assert config["tie_word_embeddings"] is (which == "tiny")
    assert (config["head_dim"], config["rope_theta"], config["max_position_embeddings"]) == (8, 5000.0, 256)
    assert config["eos_token_id"] == [2, 0]


def test_floating_point_weights_become_float16_on_a_gpu(tiny: TinyGGUF, convert: Callable[..., Path]) -> None:
    folder = convert(tiny, "quantized")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.float16}
    assert "quantization" not in json.loads((folder / "config.json").read_text())


def test_the_default_type_follows_the_device() -> None:
    assert default_dtype() == ("quantized" if mx.default_device() == mx.Device(mx.gpu) else "float32")


def test_progress_ends_at_one(tiny: TinyGGUF, tmp_path: Path) -> None:
    seen: list[float] = []
    convert_gguf(tiny.write(tmp_path / "tiny.gguf"), tmp_path, "float32", seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma", "architecture is gemma; allowed: llama"),
        ("llama.block_count", None, "the GGUF has no llama.block_count"),
        ("llama.rope.scaling.type", "yarn", "scales its rotary positions"),
        ("llama.rope.dimension_count", mx.array(4, mx.uint32), "rotates a part of each head"),
        ("tokenizer.ggml.tokens", None, "the GGUF has no tokenizer.ggml.tokens"),
        ("tokenizer.ggml.tokens", ["a", "b"], "vocabulary is broken: 2 tokens, 266 types"),
        ("tokenizer.ggml.model", "llama", "tokenizer is llama/smollm; allowed: gpt2/smollm"),
        ("tokenizer.ggml.pre", "qwen2", "tokenizer is gpt2/qwen2; allowed: gpt2/smollm"),
        ("tokenizer.ggml.add_bos_token", mx.array(True), "starts each text with a token"),
        ("tokenizer.ggml.merges", ["a b c"], "a merge that is not of two tokens"),
    ],
)
def test_what_can_not_be_converted_is_an_error(
    tiny: TinyGGUF, convert: Callable[..., Path], key: str, value: Any, message: str
) -> None:
    tiny.metadata[key] = value
    if value is None:
        del tiny.metadata[key]
    with pytest.raises(DemoModelError, match=message):
        convert(tiny)


def test_an_unknown_tensor_is_an_error(tiny: TinyGGUF, convert: Callable[..., Path]) -> None:
    tiny.arrays["blk.0.attn_q.bias"] = mx.zeros((32,))
    with pytest.raises(DemoModelError, match=r"a tensor blk\.0\.attn_q\.bias"):
        convert(tiny)


def test_weights_of_a_broken_shape_are_an_error() -> None:
    parts = {"weight": mx.zeros((32, 7), mx.uint32), "scales": mx.zeros((32, 2), mx.float16)}
    with pytest.raises(DemoModelError, match="q_proj: 7 words for 2 groups of 32 weights"):
        gguf._bits("q_proj", parts)


def test_a_file_that_is_no_gguf_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model" * 100)
    with pytest.raises(DemoModelError, match="can't be read as a GGUF"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, "float32")


def test_the_tokenizer_splits_digits_and_knows_special_tokens(tiny: TinyGGUF, convert: Callable[..., Path]) -> None:
    _, tokenizer = load(str(convert(tiny)))
    # "12" is a merge of the vocabulary, but digits stand alone.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12 hello")) == ["1", "2", "Ġ", "hello"]
    assert tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("<|im_start|><tool>"), skip_special_tokens=True) == "<tool>"
    assert tokenizer.eos_token_ids == {0, 2}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>user\nhello<|im_end|>\n"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_real_tokenizer_round_trips(smollm2_path: Path) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(smollm2_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # As the model's authors' own tokenizer has it.
    assert tokenizer.encode("Hello") == [19556]
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("<|im_end|>") == [2]
    assert 2 in tokenizer.eos_token_ids


def test_the_real_model_answers(smollm2_path: Path) -> None:
    model, tokenizer = load(str(smollm2_path))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")
    last = None
    answer = ""
    for last in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=30):
        answer += last.text
    assert "Paris" in answer
    assert last is not None
    assert last.finish_reason == "stop"


def test_quantized_weights_are_the_same_numbers(smollm2_path: Path, smollm2_quantized_path: Path) -> None:
    full, packed = (mx.load(str(folder / "model.safetensors")) for folder in (smollm2_path, smollm2_quantized_path))
    assert isinstance(full, dict)
    assert isinstance(packed, dict)
    _, config = load_model(smollm2_quantized_path, lazy=True)
    for name in ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"):
        scales, biases = (packed[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        numbers = mx.dequantize(packed[f"{name}.weight"], scales, biases, **config["quantization"][name])
        assert mx.array_equal(numbers, full[f"{name}.weight"])
