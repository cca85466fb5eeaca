"""Quantized prompt caches on disk: mlx-lm's format where it has one, and the same tokens after loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import make_prompt_cache
from models import greedy, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin import packed_cache
from tinykv_plugin.errors import PromptCacheFileError

NEXT = [5, 6, 7]


def wide(kind: str) -> Any:
    return shared(kind, head_dim=32)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "cache.safetensors")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("length", [3, 30])
@pytest.mark.parametrize(
    "fields",
    [{"bits": 8}, {"key_bits": 8, "value_bits": 4}, {"value_bits": 4}, {"bits": 4, "max_kv_size": 16}],
    ids=str,
)
def test_a_loaded_cache_goes_on_as_the_saved_one(kind: str, length: int, fields: dict[str, Any], file: str) -> None:
    model = wide(kind)
    with tinykv.attach(model, page_size=4, **fields) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(length), cache)
        tinykv.save_prompt_cache(file, cache, {"a": "b"})
        expected = greedy(model, NEXT, 12, cache=cache)
        loaded, metadata = tinykv.load_prompt_cache(file, return_metadata=True, kv=kv)
        assert metadata == {"a": "b"}
        assert greedy(model, NEXT, 12, cache=loaded) == expected
        kv.check()


def test_stock_goes_on_with_a_file_of_ours_and_we_with_one_of_stocks(file: str) -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=4, bits=8) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(30), cache)
        tinykv.save_prompt_cache(file, cache)
        expected = greedy(model, NEXT, 12, cache=cache)
    stock = mlx_cache.load_prompt_cache(file)
    assert [type(layer).__name__ for layer in stock] == ["QuantizedKVCache"] * 4
    assert greedy(model, NEXT, 12, cache=stock) == expected
    mlx_cache.save_prompt_cache(file, mlx_cache.load_prompt_cache(file))
    with tinykv.attach(model, page_size=8, bits=8) as kv:
        assert greedy(model, NEXT, 12, cache=tinykv.load_prompt_cache(file, kv=kv)) == expected
    # Pages of full precision take the dequantized K and V.
    with tinykv.attach(model, page_size=8) as kv:
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        keys, _ = loaded[0].keys_and_values()
        packed, scales, biases = stock[0].keys_and_values()[0]
        dense = mx.dequantize(packed, scales, biases, group_size=32, bits=8)
        assert mx.array_equal(keys, dense[:, :, :30])


def test_full_precision_is_quantized_when_it_is_loaded(file: str) -> None:
    model = wide("llama")
    stock = make_prompt_cache(model)
    logits(model, prompt(30), stock)
    mlx_cache.save_prompt_cache(file, stock)
    with tinykv.attach(model, page_size=4, bits=8) as kv:
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        keys, _ = loaded[0].keys_and_values()
        exact = stock[0].keys[:, :, :30]
        assert mx.array_equal(keys, mx.dequantize(*mx.quantize(exact, 32, 8), 32, 8))
        assert kv.stats().bytes_used == 32 * kv.stats().bytes_per_token


def test_another_format_is_refused(file: str) -> None:
    model = wide("llama")
    with tinykv.attach(model, bits=8):
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        tinykv.save_prompt_cache(file, cache)
    with (
        tinykv.attach(model, bits=4) as kv,
        pytest.raises(PromptCacheFileError, match="layer 0 holds 8 bits in groups of 32, its pages hold 4 bits in"),
    ):
        tinykv.load_prompt_cache(file, kv=kv)


def test_another_model_is_refused(file: str) -> None:
    model = shared("llama", head_dim=64)
    with tinykv.attach(model, bits=8, group_size=32):
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        tinykv.save_prompt_cache(file, cache)
    mlx_cache.save_prompt_cache(file, mlx_cache.load_prompt_cache(file))  # which doesn't say whose it is
    for fields in ({}, {"bits": 8}):
        with (
            tinykv.attach(wide("llama"), **fields) as kv,
            pytest.raises(PromptCacheFileError, match=r"layer 0 holds LayerSpec\(kv_heads=2, key_dim=64, "),
        ):
            tinykv.load_prompt_cache(file, kv=kv)


def test_another_window_is_refused(file: str) -> None:
    model = wide("llama")
    with tinykv.attach(model, bits=8, page_size=4) as kv:
        limited = kv.make_cache(max_kv_size=16)
        logits(model, prompt(30), limited)
        tinykv.save_prompt_cache(file, limited)
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        assert loaded[0].window == 16
        del loaded, limited
    other = shared("gemma3_text", head_dim=32)
    with tinykv.attach(other, bits=8) as kv:
        cache = make_prompt_cache(other)
        logits(other, prompt(9), cache)
        tinykv.save_prompt_cache(file, cache)
    mlx_cache.save_prompt_cache(file, mlx_cache.load_prompt_cache(file))  # which doesn't say whose it is
    wider = shared("gemma3_text", head_dim=32, sliding_window=16)
    with (
        tinykv.attach(wider, bits=8) as kv,
        pytest.raises(PromptCacheFileError, match=r"layer 0 is quantized with a window of 8; .* a window of 16"),
    ):
        tinykv.load_prompt_cache(file, kv=kv)


def test_r54_a_layout_of_another_version_is_named(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide("gemma3_text")
    with tinykv.attach(model, bits=8) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        monkeypatch.setattr(packed_cache, "LAYOUT", 2)
        tinykv.save_prompt_cache(file, cache)
        monkeypatch.undo()
        with pytest.raises(
            PromptCacheFileError, match="quantized K/V in layout 2, this version of tinykv reads layout 1"
        ):
            tinykv.load_prompt_cache(file, kv=kv)
