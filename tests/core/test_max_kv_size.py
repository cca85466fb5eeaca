"""A size limit: the first 4 tokens and the newest ones, with the tokens of a stock RotatingKVCache(limit, keep=4)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from models import greedy, largest_difference, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError, ConfigError

LIMIT = 16


def stock_cache(model: Any, limit: int = LIMIT) -> list[Any]:
    return [RotatingKVCache(max_size=limit, keep=4) for _ in model.layers]


@pytest.fixture(scope="module")
def stock() -> dict[tuple[int, int], list[int]]:
    """Stock's tokens by prompt length and prefill step, for prompts shorter and longer than the limit."""
    model = shared("llama", num_hidden_layers=2)
    return {
        (length, step): greedy(model, prompt(length), 60, cache=stock_cache(model), prefill_step_size=step)
        for length, step in ((3, 2048), (12, 5), (16, 16), (17, 3), (40, 3), (40, 5), (40, 16), (40, 2048))
    }


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_same_tokens_as_a_stock_rotating_cache(page_size: int, stock: dict[tuple[int, int], list[int]]) -> None:
    model = shared("llama", num_hidden_layers=2)
    with tinykv.attach(model, page_size=page_size, max_kv_size=LIMIT, rewind=0) as kv:
        for (length, step), expected in stock.items():
            assert greedy(model, prompt(length), 60, prefill_step_size=step) == expected, (length, step)
            kv.check()
        # The kept tokens' pages, and those of the newest LIMIT - 4 tokens wherever they start.
        kept, newest = -(-4 // page_size), -(-(LIMIT - 4) // page_size) + 1
        cache = make_prompt_cache(model)
        used = []
        for one in prompt(100):
            logits(model, [one], cache)
            used.append(kv.stats().pages_used)
        assert max(used) <= kept + newest
        assert cache[0].offset == 100
        assert cache[0].size() == LIMIT


@pytest.mark.parametrize("kind", ["qwen2", "phi", "deepseek_v3"])
def test_other_attention_and_arrays_keep_the_limit_too(kind: str) -> None:
    model = shared(kind)
    for length, step in ((40, 7), (3, 2048)):
        expected = greedy(model, prompt(length), 40, cache=stock_cache(model), prefill_step_size=step)
        with tinykv.attach(model, page_size=4, max_kv_size=LIMIT):
            assert greedy(model, prompt(length), 40, prefill_step_size=step) == expected


def test_the_logits_are_those_of_stock_to_the_last_digits() -> None:
    model = shared("llama")
    own = stock_cache(model)
    with tinykv.attach(model, page_size=4, max_kv_size=LIMIT):
        cache = make_prompt_cache(model)
        for size in (9, 1, 1, 20, 1, 4, 1, 1, 30, 1):
            step = prompt(size, seed=size)
            assert largest_difference(logits(model, step, cache), logits(model, step, own)) < 1e-4, size


def test_what_is_held_is_what_stock_holds() -> None:
    model = shared("llama")
    own = stock_cache(model)
    with tinykv.attach(model, page_size=4, max_kv_size=LIMIT):
        cache = make_prompt_cache(model)
        for one in prompt(41):
            logits(model, [one], cache)
            logits(model, [one], own)
        for paged, dense in zip(cache, own, strict=True):
            for ours, theirs in zip(paged.keys_and_values(), (dense.keys, dense.values), strict=True):
                assert largest_difference(ours, dense._temporal_order(theirs)) < 1e-4


def test_r58_the_limit_given_to_mlx_lm_itself_is_honoured() -> None:
    model = shared("llama")
    expected = greedy(model, prompt(40), 60, cache=stock_cache(model))
    unlimited = greedy(model, prompt(40), 60, cache=[KVCache() for _ in model.layers])
    assert expected != unlimited
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model, max_kv_size=LIMIT)
        assert {layer.window for layer in cache} == {LIMIT}
        assert greedy(model, prompt(40), 60, cache=cache) == expected
        del cache
        assert greedy(model, prompt(40), 60, max_kv_size=LIMIT) == expected
        positional = [int(token) for token, _ in generate_step(mx.array(prompt(40)), model, max_tokens=60)]
        assert positional == unlimited
        kv.check()
    # What mlx-lm was asked for goes before the setting.
    with tinykv.attach(model, page_size=4, max_kv_size=300):
        assert greedy(model, prompt(40), 60, max_kv_size=LIMIT) == expected


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_r58_models_with_a_cache_of_their_own_are_limited(kind: str) -> None:
    model = shared(kind)
    with tinykv.attach(model, page_size=4, rewind=0) as kv:
        cache = make_prompt_cache(model, max_kv_size=LIMIT)
        used = []
        for one in prompt(90):
            logits(model, [one], cache)
            used.append(kv.stats().pages_used)
        # Once past every window the number stays within a page or two, up and down.
        assert max(used[30:]) - min(used[30:]) <= 2 * len({line.window for line in kv.plan})
        assert max(used[60:]) == max(used[30:60])
        kv.check()


def test_limits_of_requests_differ_side_by_side() -> None:
    model = shared("llama")
    limits = (None, 8, 12, 16, 40)
    expected = [
        greedy(model, prompt(30), 30, cache=stock_cache(model, limit) if limit else make_prompt_cache(model))
        for limit in limits
    ]
    with tinykv.attach(model, page_size=4) as kv:
        caches = [make_prompt_cache(model, max_kv_size=limit) for limit in limits]
        for _ in range(2):
            for cache, tokens in zip(caches, expected, strict=True):
                fresh = make_prompt_cache(model, max_kv_size=cache[0].window)
                assert greedy(model, prompt(30), 30, cache=fresh) == tokens
        for cache, tokens in zip(caches, expected, strict=True):
            assert greedy(model, prompt(30), 30, cache=cache) == tokens
        kv.check()


def test_a_limit_without_room_beyond_the_kept_tokens_is_refused() -> None:
    model = shared("llama")
    with tinykv.attach(model) as kv:
        for limit in (4, 1, -3):
            with pytest.raises(ConfigError, match=f"max_kv_size: {limit} is not allowed: .*more than the 4 tokens"):
                make_prompt_cache(model, max_kv_size=limit)
        assert kv.stats().sequences == 0


def test_a_limited_request_rewinds_within_the_margin_only() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4, max_kv_size=LIMIT, rewind=6) as kv:
        cache = make_prompt_cache(model)
        for one in prompt(40):
            logits(model, [one], cache)
        assert [layer.trim(6) for layer in cache] == [6] * 4
        again = [logits(model, [one], cache) for one in prompt(40)[34:]]
        fresh = make_prompt_cache(model)
        whole = [logits(model, [one], fresh) for one in prompt(40)]
        assert largest_difference(mx.concatenate(again), mx.concatenate(whole[34:])) < 1e-4
        before = kv.stats()
        with pytest.raises(CacheStateError, match=r"can't rewind to 5 tokens: .* 16 tokens .* raise rewind \(6\)"):
            cache[0].trim(35)
        assert kv.stats() == before
        assert {layer.offset for layer in cache} == {40}
