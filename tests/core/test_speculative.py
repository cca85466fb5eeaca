"""Drafts: target and draft model in one process, each with its pool; greedy output is that of the target alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from models import greedy, logits, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError


def speculative(model: Any, draft: Any, tokens: list[int], count: int, **options: Any) -> tuple[list[int], int]:
    """The tokens, and how many of them were drafted."""
    steps = list(speculative_generate_step(mx.array(tokens), model, draft, max_tokens=count, **options))
    return [int(token) for token, _, _ in steps], sum(drafted for _, _, drafted in steps)


def similar(kind: str, **fields: Any) -> Any:
    """A draft model that agrees with ``shared(kind, …)`` now and then: its weights, slightly changed."""
    draft = make(kind, **fields)
    mx.random.seed(1)
    draft.apply(lambda weight: weight + 0.02 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    mx.eval(draft.parameters())
    return draft


@pytest.fixture(scope="module")
def llama_draft() -> Any:
    return similar("llama")


@pytest.fixture(scope="module", params=[8, 32])
def windowed(request: pytest.FixtureRequest) -> tuple[int, Any, Any]:
    """A window, a target with it in one of its two layers, and a draft with it too."""
    fields = {"num_hidden_layers": 2, "sliding_window": request.param}
    return request.param, shared("gemma3_text", **fields), similar("gemma3_text", **fields)


@pytest.mark.parametrize("page_size", [4, 32])
def test_full_attention_with_drafts_equals_without(page_size: int, llama_draft: Any) -> None:
    model = shared("llama")
    expected = greedy(model, prompt(20), 48)
    with tinykv.attach(model, page_size=page_size) as kv, tinykv.attach(llama_draft, page_size=8) as draft_kv:
        accepted = []
        for drafts in (1, 3, 5):
            tokens, drafted = speculative(model, llama_draft, prompt(20), 48, num_draft_tokens=drafts)
            assert tokens == expected, drafts
            accepted.append(drafted)
            kv.check()
            draft_kv.check()
        assert min(accepted) > 0 and max(accepted) < 40, "the draft is to be right sometimes and wrong sometimes"
        assert kv.stats().pages_used == draft_kv.stats().pages_used == 0
        assert kv.stats().peak_pages_used != draft_kv.stats().peak_pages_used, "each has its own pool"


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
def test_r39_sliding_windows_with_drafts_equal_those_without(drafts: int, windowed: tuple[int, Any, Any]) -> None:
    window, model, draft = windowed
    for length, step in ((10, 512), (50, 7))[: 1 + (drafts == 3)]:
        expected = greedy(model, prompt(length), 80, prefill_step_size=step)
        with tinykv.attach(model, page_size=4) as kv, tinykv.attach(draft, page_size=4) as draft_kv:
            tokens, drafted = speculative(
                model, draft, prompt(length), 80, num_draft_tokens=drafts, prefill_step_size=step
            )
            assert tokens == expected, (window, length)
            assert 0 < drafted < 80
            kv.check()
            draft_kv.check()


def test_a_paged_target_with_a_stock_draft_and_the_other_way_round(llama_draft: Any) -> None:
    model = shared("llama")
    expected = greedy(model, prompt(20), 30)
    with tinykv.attach(model, page_size=4):
        assert speculative(model, llama_draft, prompt(20), 30, num_draft_tokens=3)[0] == expected
    with tinykv.attach(llama_draft, page_size=4):
        assert speculative(model, llama_draft, prompt(20), 30, num_draft_tokens=3)[0] == expected


def test_caches_given_in_one_list_go_on_after_drafting(llama_draft: Any) -> None:
    model = shared("llama")
    first = greedy(model, prompt(20), 20)
    then = greedy(model, [*prompt(20), *first, 7], 10)
    with tinykv.attach(model, page_size=4) as kv, tinykv.attach(llama_draft, page_size=4):
        cache = make_prompt_cache(model) + make_prompt_cache(llama_draft)
        tokens, _ = speculative(model, llama_draft, prompt(20), 20, num_draft_tokens=3, prompt_cache=cache)
        assert tokens == first
        own = cache[: len(model.layers)]
        assert len({layer.offset for layer in cache}) <= 2
        # The last token, and the last draft's, may not have been processed.
        left = [*prompt(20), *first][own[0].offset :]
        assert greedy(model, [*left, 7], 10, cache=own) == then
        kv.check()


def test_a_limit_on_the_target_drafts_exactly_until_it_drops_tokens(llama_draft: Any) -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4, max_kv_size=24) as kv, tinykv.attach(llama_draft, page_size=4):
        expected = greedy(model, prompt(10), 60)
        # Of several tokens in one pass only the first sees all kept tokens, as in a stock prefill.
        tokens, _ = speculative(model, llama_draft, prompt(10), 14, num_draft_tokens=1)
        assert tokens == expected[:14]
        speculative(model, llama_draft, prompt(10), 60, num_draft_tokens=3)
        kv.check()


def test_a_rewind_beyond_the_margin_is_refused_with_nothing_changed() -> None:
    model = shared("gemma3_text")
    with tinykv.attach(model, page_size=1, rewind=5) as kv:
        cache = make_prompt_cache(model)
        for one in prompt(40):
            logits(model, [one], cache)
        assert trim_prompt_cache(cache, 5) == 5
        logits(model, prompt(5), cache)
        before, offsets = kv.stats(), [layer.offset for layer in cache]
        for count in (7, 20, 40, 1000):
            with pytest.raises(CacheStateError, match=r"can't rewind to \d+ tokens: a layer with a window of 8"):
                trim_prompt_cache(cache, count)
            assert [layer.offset for layer in cache] == offsets
        assert kv.stats() == before
    # In a batch no row is trimmed if one can't be.
    with tinykv.attach(model, page_size=1, rewind=5) as kv:
        requests = [make_prompt_cache(model) for _ in range(2)]
        for cache, count in zip(requests, (6, 40), strict=True):
            for one in prompt(count):
                logits(model, [one], cache)
        batch = [layers[0].merge(layers) for layers in zip(*requests, strict=True)]
        before = kv.stats()
        with pytest.raises(CacheStateError, match=r"can't rewind to 33 tokens"):
            trim_prompt_cache(batch, 7)
        assert kv.stats() == before
        assert [layer.offset.tolist() for layer in batch] == [[6, 40]] * 4
        assert trim_prompt_cache(batch, 5) == 5
        assert [layer.offset.tolist() for layer in batch] == [[1, 35]] * 4
    # Without a margin the cache says so, as stock does, and mlx-lm refuses to draft with it.
    with tinykv.attach(model, rewind=0, page_size=1):
        cache = make_prompt_cache(model)
        assert all(layer.is_trimmable() for layer in cache)
        for one in prompt(10):
            logits(model, [one], cache)
        assert [layer.is_trimmable() for layer in cache] == [False, True] * 2
        assert trim_prompt_cache(cache, 1) == 0
        assert {layer.offset for layer in cache} == {10}
