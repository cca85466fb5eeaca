"""Whole models through the kernels: the tokens of stock mlx-lm."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from crowded import check_alone, small_model
from models import batched, greedy, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.manager import PluginManager

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma3_text": {},
    "gpt_oss": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},
}


def attached(kind: str, plugins: PluginManager, **fields: Any) -> tuple[Any, Any]:
    model = shared(kind, **MODELS[kind])
    return model, tinykv.attach(model, plugins=plugins, attention="metal", page_size=8, **fields)


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_stock(kind: str, plugins: PluginManager) -> None:
    right = greedy(shared(kind, **MODELS[kind]), prompt(20), 12)
    model, kv = attached(kind, plugins)
    assert {line.backend for line in kv.plan} == {"metal"}
    assert greedy(model, prompt(20), 12) == right
    kv.check()


def test_rows_of_a_batch_are_those_of_stock_alone(plugins: PluginManager) -> None:
    prompts = [prompt(9, 1), prompt(3, 2), prompt(30, 3)]
    model = shared("llama", **MODELS["llama"])
    right = [greedy(model, tokens, 6) for tokens in prompts]
    model, kv = attached("llama", plugins)
    assert batched(model, prompts, 6) == right
    kv.check()


def test_drafts_are_verified_by_the_kernels(plugins: PluginManager, device: Any) -> None:
    """A forward pass over several drafted tokens, then some of them taken back."""
    model, kv = attached("gemma3_text", plugins)
    stock = shared("gemma3_text")
    with kv:
        cache = model.make_cache()
        first = [logits(model, prompt(12), cache), logits(model, [5, 6, 7, 8], cache)]
        for layer in cache:
            layer.trim(3)
        first.append(logits(model, [9, 10], cache))
    cache = stock.make_cache()
    second = [logits(stock, prompt(12), cache), logits(stock, [5], cache), logits(stock, [9, 10], cache)]
    assert mx.allclose(first[0], second[0], atol=1e-4)
    assert mx.allclose(first[1][:1], second[1], atol=1e-4)
    assert mx.allclose(first[2], second[2], atol=1e-4)


def test_a_size_limit_keeps_the_first_tokens(plugins: PluginManager) -> None:
    results = []
    for attention in ("metal", "gather"):
        model = shared("llama", **MODELS["llama"])
        with tinykv.attach(model, plugins=plugins, attention=attention, max_kv_size=16, page_size=4):
            results.append(greedy(model, prompt(20), 12))
    assert results[0] == results[1]


def test_forks_get_copies_of_pages_they_write(plugins: PluginManager) -> None:
    model, kv = attached("llama", plugins)
    with kv:
        cache = model.make_cache()
        logits(model, prompt(12), cache)
        fork = copy.deepcopy(cache)
        one, other = (greedy(model, [token], 4, caches) for token, caches in ((3, cache), (4, fork)))
        kv.check()
        assert kv.stats().cow_copies
    stock = shared("llama", **MODELS["llama"])
    for token, got in ((3, one), (4, other)):
        assert greedy(stock, [*prompt(12), token], 4) == got


def test_pages_that_move_together_are_read_in_their_new_places(plugins: PluginManager) -> None:
    check_alone(small_model("gemma3_text"), attention="metal", plugins=plugins)


def test_prefill_is_gathered_and_decode_reads_pages(plugins: PluginManager, device: Any) -> None:
    if device is None:
        pytest.skip("launches are counted where kernels run on a CPU")
    device.keep_launches = True
    model, kv = attached("llama", plugins)
    with kv:
        greedy(model, prompt(20), 4)
    kernels = [launch.kernel.removeprefix("tinykv_") for launch in device.launches]
    # Two layers; mlx-lm runs all tokens of the prompt but the last one first.
    assert kernels[:4] == ["write", "gather", "write", "gather"]
    assert set(kernels[4:]) == {"write", "attend"}
