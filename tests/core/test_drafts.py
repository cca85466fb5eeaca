"""Drafts with every kind of layer: the tokens are those of the target alone, and one budget serves both models."""

from __future__ import annotations

import gc
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from models import greedy, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError, ConfigError, DraftError, OutOfPagesError

TWO = {"num_hidden_layers": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": TWO,
    "gemma3_text": TWO,
    "gpt_oss": TWO,
    "deepseek_v3": TWO,
    "qwen3_next": TWO,
    "jamba": {},
    "falcon_h1": {},
    "nemotron_h": {},
}


def speculative(model: Any, draft: Any, tokens: list[int], count: int, **options: Any) -> tuple[list[int], int]:
    """The tokens, and how many of them were drafted."""
    loop = sys.modules["mlx_lm.generate"].speculative_generate_step  # as mlx-lm finds it
    steps = list(loop(mx.array(tokens), model, draft, max_tokens=count, **options))
    return [int(token) for token, _, _ in steps], sum(drafted for _, _, drafted in steps)


def target(kind: str, **fields: Any) -> Any:
    return shared(kind, **FIELDS[kind], **fields)


def similar(kind: str, **fields: Any) -> Any:
    """A draft model that agrees with the target now and then: its weights, slightly changed."""
    draft = make(kind, **FIELDS[kind], **fields)
    mx.random.seed(1)
    draft.apply(lambda weight: weight + 0.02 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    mx.eval(draft.parameters())
    return draft


@pytest.mark.parametrize("kind", FIELDS)
def test_r40_tokens_are_those_without_drafts(kind: str) -> None:
    model, draft = target(kind), similar(kind)
    expected = greedy(model, prompt(20), 40)
    with (
        tinykv.attach(model, page_size=4) as kv,
        tinykv.attach(draft, page_size=8, budget_of=kv) as draft_kv,
    ):
        accepted = []
        for count in (1, 3, 5):
            tokens, drafted = speculative(model, draft, prompt(20), 40, num_draft_tokens=count, prefill_step_size=7)
            assert tokens == expected, count
            accepted.append(drafted)
            kv.check()
            draft_kv.check()
        assert 0 < max(accepted) < 40, "the draft is to be right sometimes and wrong sometimes"
        assert kv.stats().pages_used == draft_kv.stats().pages_used == 0


def test_recurrent_layers_with_drafts_that_are_all_wrong() -> None:
    """What is run again after each rewind doesn't grow: it would pass what the limited layers keep."""
    model, draft = target("qwen3_next"), make("llama", seed=11, **TWO)
    with tinykv.attach(model, page_size=4, max_kv_size=16) as kv, tinykv.attach(draft, page_size=4, budget_of=kv):
        expected = greedy(model, prompt(40), 60)
        tokens, drafted = speculative(model, draft, prompt(40), 60, num_draft_tokens=3)
        assert tokens == expected
        assert drafted < 20
        kv.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_quantized_pages_with_drafts(kind: str) -> None:
    model, draft = target(kind, head_dim=32), similar(kind, head_dim=32)
    with tinykv.attach(model, page_size=4, bits=8) as kv, tinykv.attach(draft, page_size=4, bits=4, budget_of=kv):
        expected = greedy(model, prompt(20), 30)
        for count in (2, 4):
            tokens, drafted = speculative(model, draft, prompt(20), 30, num_draft_tokens=count)
            assert tokens == expected
            assert 0 < drafted < 30
        kv.check()


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("length", [10, 40])
def test_a_size_limit_with_drafts(kind: str, length: int) -> None:
    """Of several drafts each sees what it would see alone: the first 4 tokens and the newest."""
    model, draft = target(kind), similar(kind)
    with tinykv.attach(model, page_size=4, max_kv_size=24) as kv, tinykv.attach(draft, page_size=4, max_kv_size=24):
        expected = greedy(model, prompt(length), 50)
        for count in (1, 3, 5):
            tokens, drafted = speculative(model, draft, prompt(length), 50, num_draft_tokens=count)
            assert tokens == expected, count
            assert 0 < drafted < 50
        kv.check()


def test_r39_a_margin_that_is_too_small_is_refused_at_the_start() -> None:
    model, draft = target("gemma3_text"), target("llama")
    with (
        tinykv.attach(model, page_size=4, rewind=3) as kv,
        pytest.raises(ConfigError, match=r"^rewind: 3 is too small .* window of 8 tokens must keep 4 more, .*wind 4\)"),
    ):
        speculative(model, draft, prompt(9), 9, num_draft_tokens=4)
    assert kv.stats().growths == 0
    with tinykv.attach(model, page_size=4, rewind=3):
        assert speculative(model, draft, prompt(9), 30, num_draft_tokens=3)[0] == greedy(model, prompt(9), 30)


def test_what_can_not_be_rewound_is_refused_at_the_start() -> None:
    model, draft = target("llama"), target("gemma3_text")
    with tinykv.attach(model):
        # The draft model keeps mlx-lm's own ring buffers, which rewind wrongly once they are full.
        with pytest.raises(DraftError, match="drafts can't be used with this model: its RotatingKVCache can't take"):
            speculative(model, draft, prompt(9), 9)
        cache = make_prompt_cache(model)
        with pytest.raises(DraftError, match="has 2 entries, the model's own 2: the draft model's are missing"):
            speculative(model, target("llama"), prompt(9), 9, prompt_cache=cache)
        with pytest.raises(CacheStateError, match="kv_bits=8"):
            speculative(model, target("llama"), prompt(9), 9, kv_bits=8)


def test_without_attached_models_mlx_lm_does_it_all() -> None:
    other = target("gemma3_text")
    model, draft = target("llama"), similar("llama")
    expected = greedy(model, prompt(9), 20)
    with tinykv.attach(other):
        assert speculative(model, draft, prompt(9), 20)[0] == expected
    cache = [KVCache() for _ in range(4)]
    assert speculative(model, draft, prompt(9), 20, prompt_cache=cache)[0] == expected
    assert cache[0].offset > 20


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "jamba"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 7])
def test_a_cache_goes_on_after_drafts_that_were_broken_off(kind: str, stop: int) -> None:
    model, draft = target(kind), similar(kind)
    plain = greedy(model, prompt(20), 12)
    with tinykv.attach(model, page_size=4) as kv, tinykv.attach(draft, page_size=4, budget_of=kv):
        cache = make_prompt_cache(model) + make_prompt_cache(draft)
        own = cache[: len(make_prompt_cache(model))]
        loop = sys.modules["mlx_lm.generate"].speculative_generate_step
        steps = loop(mx.array(prompt(20)), model, draft, num_draft_tokens=3, prompt_cache=cache)
        tokens = [int(next(steps)[0]) for _ in range(stop)]
        steps.close()
        assert tokens == plain[:stop]
        kept = next(leaf.offset for leaf in own if hasattr(leaf, "offset"))
        assert 20 <= kept <= 20 + stop
        left = [*prompt(20), *tokens][kept:] or [plain[stop]]
        expected = plain[stop:] if kept < 20 + stop else plain[stop + 1 :]
        assert greedy(model, left, 12 - stop, cache=own)[: len(expected)] == expected
        kv.check()


def test_a_window_that_is_full_before_the_draft() -> None:
    for window in (8, 32):
        model, draft = target("gemma3_text", sliding_window=window), similar("gemma3_text", sliding_window=window)
        expected = greedy(model, prompt(50), 40)
        with tinykv.attach(model, page_size=4) as kv, tinykv.attach(draft, page_size=4, budget_of=kv):
            assert speculative(model, draft, prompt(50), 40, num_draft_tokens=5)[0] == expected
            kv.check()


def test_r02_target_and_draft_stay_within_one_budget() -> None:
    model, draft = target("llama"), similar("llama")
    budget = 48 << 10
    with (
        tinykv.attach(model, page_size=4, memory=budget, prefix_cache=0) as kv,
        tinykv.attach(draft, page_size=4, budget_of=kv, prefix_cache=0) as draft_kv,
    ):
        assert kv.session.budget is draft_kv.session.budget  # type: ignore[attr-defined]
        for seed in range(50):
            tokens = prompt(5 + 3 * seed % 20, seed=seed)
            speculative(model, draft, tokens, 12, num_draft_tokens=3)
            for one in (kv, draft_kv):
                assert one.stats().bytes_reserved <= one.stats().peak_bytes_reserved <= budget
                one.check()
        expected = greedy(model, prompt(20), 12)
        with pytest.raises(OutOfPagesError, match="out of KV pages"):
            speculative(model, draft, prompt(60), 40)
        assert kv.stats().pages_used == draft_kv.stats().pages_used == 0
        # What one model grew into goes back when the other needs it.
        assert speculative(model, draft, prompt(20), 12)[0] == expected
        kv.check()
        draft_kv.check()


def test_a_draft_models_pool_is_given_back_with_it() -> None:
    model = target("llama")
    with tinykv.attach(model, page_size=4, memory=1 << 20) as kv:
        before = kv.stats().bytes_reserved
        draft = similar("llama")
        draft_kv = tinykv.attach(draft, page_size=4, budget_of=kv)
        speculative(model, draft, prompt(9), 5)
        assert kv.stats().bytes_reserved > before
        draft_kv.detach()
        del draft, draft_kv
        gc.collect()
        assert kv.stats().bytes_reserved == sum(pool.nbytes for pool in kv.session.pools)  # type: ignore[attr-defined]


def test_the_mixed_case_of_a_stock_draft() -> None:
    """Only its guesses depend on the draft model's caches."""
    model, draft = target("qwen3_next"), similar("llama")
    expected = greedy(model, prompt(20), 20)
    with tinykv.attach(model, page_size=4):
        assert speculative(model, draft, prompt(20), 20, num_draft_tokens=3)[0] == expected
        caches = make_prompt_cache(model) + [RotatingKVCache(max_size=8) for _ in range(2)]
        with pytest.raises(DraftError, match="RotatingKVCache"):
            speculative(model, draft, prompt(20), 20, prompt_cache=caches)
