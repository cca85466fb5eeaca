"""Stored prompts: which are found, which are dropped, and how many bytes they may take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from mlx_lm.models.cache import make_prompt_cache
from served import Server, wait_until, words

import tinykv_plugin as tinykv
from tinykv_plugin.serving.prompt_cache import PagedPromptCache
from tinykv_plugin.stored_prompt import StoredPrompt

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


def store_of(*kvs: Any, **limits: int) -> PagedPromptCache:
    stored = PagedPromptCache(**limits)
    stored.use([kv.prefix_cache for kv in kvs])
    return stored


def test_r12_a_hit_leaves_a_token_to_run(kv: Any) -> None:
    stored = store_of(kv)
    tokens = models.prompt(21)
    stored.insert_cache(KEY, tokens[:20], filled(kv, tokens[:20]))
    stored.insert_cache(KEY, tokens, filled(kv, tokens))
    expected = continued(kv, kv.make_cache(), tokens)
    for asked in (tokens, tokens[:1], []):
        cache, rest = stored.fetch_nearest_cache(KEY, asked)
        assert asked[: len(asked) - len(rest)] + rest == asked
        assert cache is not None
        assert len(rest) == min(1, len(asked))
        if len(asked) > 1:
            assert models.largest_difference(continued(kv, cache, rest), expected) < 1e-4
    stored.clear()


def test_a_draft_model_has_the_same_tokens() -> None:
    """What is found is as much as the model has; of the draft model's at most as much."""
    kv, draft = (
        tinykv.attach(models.shared(kind, seed=4), page_size=4, memory="4MiB") for kind in ("llama", "gemma3_text")
    )
    stored = store_of(kv, draft)
    tokens = models.prompt(30)
    for count, lag in ((30, 1), (17, 0), (24, 3)):
        cache = filled(kv, tokens[:count]) + filled(draft, tokens[: count - lag])
        stored.insert_cache(KEY, tokens[:count], cache)
        del cache
    cold = [continued(one, one.make_cache(), tokens) for one in (kv, draft)]
    cache, rest = stored.fetch_nearest_cache(KEY, tokens)
    assert isinstance(cache, StoredPrompt)
    assert len(rest) == 1
    assert [part.count for part in cache.parts] == [29, 29]
    for one, part, expected in zip((kv, draft), cache.parts, cold, strict=True):
        assert models.largest_difference(continued(one, part.caches, rest), expected) < 1e-4
    nothing, rest = stored.fetch_nearest_cache(KEY, models.prompt(9, 1))
    assert nothing is not None
    assert all(leaf.empty() for leaf in nothing)
    assert rest == models.prompt(9, 1)


def test_bytes_are_those_of_unique_pages() -> None:
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = store_of(kv)
    tokens = models.prompt(40)
    for seed in range(4):
        cache, rest = stored.fetch_nearest_cache(KEY, tokens + models.prompt(4, seed))
        assert cache is not None
        continued(kv, cache, rest)
        stored.insert_cache(KEY, tokens + models.prompt(4, seed), cache)
        del cache
    assert len(stored) == 4
    page = kv.groups[0].page_bytes
    assert stored.nbytes == kv.stats().pages_cached * page == 14 * page
    assert stored.stats_by_type() == {"assistant": {"n_sequences": 4, "n_bytes": stored.nbytes}}
    stored.trim_to(n_bytes=12 * page)
    assert (len(stored), stored.evictions) == (2, 2)
    assert [stored.reclaim() for _ in range(13)] == [True] * 12 + [False]
    assert (stored.nbytes, kv.stats().pages_cached) == (0, 0)


def test_what_is_stored_has_as_many_tokens_as_it_says() -> None:
    """mlx-lm's code for single requests stores one token more than it ran."""
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = store_of(kv)
    tokens = models.prompt(20)
    stored.insert_cache(KEY, tokens, filled(kv, tokens[:19]))
    stored.insert_cache(KEY, models.prompt(9, 1), filled(kv, models.prompt(11, 1)))
    stored.insert_cache(KEY, [], filled(kv, tokens))
    stored.insert_cache(KEY, models.prompt(9, 2), kv.make_cache())
    assert len(stored) == 2
    for asked, held in (([*tokens, 1], 19), ([*models.prompt(9, 1), 1], 9)):
        cache, rest = stored.fetch_nearest_cache(KEY, asked)
        assert cache is not None
        assert cache[0].offset == held
        assert cache[0].offset + len(rest) == len(asked)
        del cache


def test_the_least_recently_used_goes_first() -> None:
    kv = tinykv.attach(models.shared("llama"), page_size=4)
    stored = store_of(kv, max_size=3)
    for seed in (0, 1, 2, 0, 3):
        stored.insert_cache(KEY, models.prompt(8, seed), filled(kv, models.prompt(8, seed)))
    assert len(stored) == 3
    left = [len(stored.fetch_nearest_cache(KEY, [*models.prompt(8, seed), 1])[1]) for seed in range(4)]
    assert left == [1, 9, 1, 1]


def test_without_pages_it_is_mlx_lms() -> None:
    stored = PagedPromptCache(max_size=2)
    model = models.shared("llama")
    cache = make_prompt_cache(model)
    tokens = models.prompt(9)
    models.logits(model, tokens, cache)
    stored.insert_cache(KEY, tokens, cache)
    found, rest = stored.fetch_nearest_cache(KEY, [*tokens, 3])
    assert found is not None
    assert (found[0].offset, rest, len(stored)) == (9, [3], 1)
    assert stored.nbytes > 0


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
        used = state.stored_bytes
        assert used <= limit
        peak = max(peak, used)
    assert peak > limit / 2
    assert server.generator.state().evicted_prompts > 10
