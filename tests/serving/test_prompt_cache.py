"""Stored prompts: which are found, which are dropped, and how many bytes they may take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from served import Server, wait_until, words

import tinykv_plugin as tinykv
from tinykv_plugin.serving.prompt_cache import PagedPromptCache

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]

KEY = ("model", None, None)


def filled(kv: Any, tokens: list[int]) -> list[Any]:
    cache: list[Any] = kv.make_cache()
    # In two passes: what a window has passed goes when the next page is opened.
    if len(tokens) > 5:
        models.logits(kv.model, tokens[:-5], cache)
    models.logits(kv.model, tokens[-5:], cache)
    return cache


def continued(kv: Any, cache: list[Any], rest: list[int]) -> mx.array:
    return models.logits(kv.model, rest, cache)[-1]


@pytest.fixture(params=["llama", "gemma3_text", "qwen3_next"])
def kv(request: pytest.FixtureRequest) -> Any:
    return tinykv.attach(models.shared(request.param), page_size=4, memory="4MiB")


def test_r12_a_hit_leaves_a_token_to_run(kv: Any) -> None:
    stored = PagedPromptCache()
    tokens = models.prompt(21)
    stored.insert_cache(KEY, tokens[:20], filled(kv, tokens[:20]))
    stored.insert_cache(KEY, tokens, filled(kv, tokens))
    expected = continued(kv, kv.make_cache(), tokens)
    for asked in (tokens, tokens[:1], []):
        cache, rest = stored.fetch_nearest_cache(KEY, asked)
        assert asked[: len(asked) - len(rest)] + rest == asked
        assert (cache is None) == (len(asked) < 2)
        assert len(rest) == min(1, len(asked))
        if cache is not None:
            assert models.largest_difference(continued(kv, cache, rest), expected) < 1e-4
    stored.clear()


def test_every_answer_is_right(kv: Any) -> None:
    """Whatever is stored: what is found and the rest make the prompt, and it is as if all had been run."""
    stored = PagedPromptCache(max_size=6)
    trunk, branch = models.prompt(40), models.prompt(40, 1)
    asked = [trunk[:cut] + branch[:more] for cut, more in itertools.product((3, 17, 18, 30, 40), (0, 1, 9))]
    reused = 0
    for tokens in [*asked, *reversed(asked)]:
        cache, rest = stored.fetch_nearest_cache(KEY, tokens)
        reused += len(tokens) - len(rest)
        cache = kv.make_cache() if cache is None else cache
        got = continued(kv, cache, rest)
        assert models.largest_difference(got, continued(kv, kv.make_cache(), tokens)) < 1e-4
        stored.insert_cache(KEY, tokens, cache, cache_type=("system", "user", "assistant")[len(tokens) % 3])
        kv.check()
        del cache
    assert reused > 200
    stored.clear()
    assert kv.stats().pages_used == 0


def test_a_window_that_has_passed_is_a_miss() -> None:
    kv = tinykv.attach(models.shared("gemma3_text"), page_size=4, rewind=4)
    stored = PagedPromptCache()
    tokens = models.prompt(60)
    stored.insert_cache(KEY, tokens, filled(kv, tokens))
    cache, rest = stored.fetch_nearest_cache(KEY, tokens[:20])
    assert (cache, rest) == (None, tokens[:20])
    # It is kept although a longer prompt is stored, which can't stand in for it.
    stored.insert_cache(KEY, tokens[:15], filled(kv, tokens[:15]))
    stored.insert_cache(KEY, tokens[:58], filled(kv, tokens[:58]))
    assert len(stored) == 3
    cache, rest = stored.fetch_nearest_cache(KEY, tokens[:20])
    assert cache is not None
    assert rest == tokens[15:20]
    del cache
    stored.clear()


def test_bytes_are_those_of_unique_pages() -> None:
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = PagedPromptCache()
    tokens = models.prompt(40)
    for seed in range(4):
        cache, rest = stored.fetch_nearest_cache(KEY, tokens + models.prompt(4, seed))
        cache = kv.make_cache() if cache is None else cache
        continued(kv, cache, rest)
        stored.insert_cache(KEY, tokens + models.prompt(4, seed), cache)
        del cache
    assert len(stored) == 4
    assert stored.nbytes == kv.stats().bytes_used == 14 * kv.groups[0].page_bytes
    assert stored.stats_by_type()["assistant"] == {"n_sequences": 4, "n_bytes": stored.nbytes}
    assert stored.stats_by_type()["user"] == {"n_sequences": 0, "n_bytes": 0}
    stored.trim_to(n_bytes=12 * kv.groups[0].page_bytes)
    assert len(stored) == 2
    assert stored.reclaim()
    assert stored.reclaim()
    assert not stored.reclaim()
    assert (stored.nbytes, kv.stats().pages_used) == (0, 0)


def test_what_is_stored_has_as_many_tokens_as_it_says() -> None:
    """mlx-lm's code for single requests stores one token more than it ran."""
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = PagedPromptCache()
    tokens = models.prompt(20)
    stored.insert_cache(KEY, tokens, filled(kv, tokens[:19]))
    stored.insert_cache(KEY, models.prompt(9, 1), filled(kv, models.prompt(11, 1)))
    stored.insert_cache(KEY, [], filled(kv, tokens))
    stored.insert_cache(KEY, models.prompt(9, 2), kv.make_cache())
    assert len(stored) == 2
    for asked in ([*tokens, 1], [*models.prompt(9, 1), 1]):
        cache, rest = stored.fetch_nearest_cache(KEY, asked)
        assert cache is not None
        assert cache[0].offset + len(rest) == len(asked)
        del cache
    stored.clear()


def test_the_least_valuable_goes_first() -> None:
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = PagedPromptCache(max_size=3)
    for seed, kind in enumerate(["system", "user", "assistant", "assistant"]):
        stored.insert_cache(KEY, models.prompt(8, seed), filled(kv, models.prompt(8, seed)), cache_type=kind)
    assert {kind: found["n_sequences"] for kind, found in stored.stats_by_type().items()} == {
        "assistant": 1,
        "user": 1,
        "system": 1,
    }
    stored.insert_cache("another model", models.prompt(8, 3), filled(kv, models.prompt(8, 3)))
    assert stored.fetch_nearest_cache(KEY, models.prompt(9, 2)) == (None, models.prompt(9, 2))
    stored.clear()


@pytest.mark.parametrize("path", ["alone", "together", "drafted"])
def test_r02_a_byte_limit_holds_on_every_path(
    serve: Serve, together: Together, model_dir: Callable[..., Path], path: str
) -> None:
    # A page of the model takes 4 KiB, of the draft model 2 KiB: room for some prompts of 4 pages.
    limit = 96 << 10
    draft = {"draft_model": str(model_dir("llama", num_hidden_layers=2, seed=5))} if path == "drafted" else {}
    server = serve(prompt_cache_bytes=limit, prompt_cache_size=1000, **draft)
    peak = 0
    for number in range(50 if path != "together" else 7):
        if path == "together":
            together(lambda n, number=number: server.complete(words(9, 8 * number + n), max_tokens=6), range(8))
        else:
            server.complete(words(9, number), max_tokens=6, seed=1 if path == "alone" else None)
        wait_until(server.idle)
        state = server.generator.state()
        used = sum(pool.bytes_used for pool in state.pools.values())
        assert state.stored_bytes == used <= limit
        peak = max(peak, used)
    assert peak > limit / 2
    assert server.generator.state().evicted_prompts > 10
