"""The prefix cache: what is found, that it is as if run cold, and when it gives way."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import models
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError, ConfigError

FULL, WINDOW, HYBRID, RECURRENT = "llama", "gemma3_text", "qwen3_next", "mamba"


def attached(kind: str, **fields: Any) -> Any:
    return tinykv.attach(models.shared(kind), **{"page_size": 4, "memory": "4MiB", **fields})


def run(kv: Any, tokens: Sequence[int], chunk: int = 5) -> list[Any]:
    """The caches of a request that ran ``tokens`` cold."""
    cache: list[Any] = kv.make_cache()
    for start in range(0, len(tokens), chunk):
        models.logits(kv.model, tokens[start : start + chunk], cache)
    return cache


def last_logits(kv: Any, tokens: Sequence[int], cache: list[Any]) -> mx.array:
    return models.logits(kv.model, tokens, cache)[-1]


def assert_as_cold(kv: Any, tokens: list[int]) -> int:
    """Continue the stored prefix of ``tokens`` and compare with a cold run; returns the tokens reused."""
    cache, rest = kv.prefix_cache.fetch(tokens)
    assert tokens[len(tokens) - len(rest) :] == rest
    assert rest
    cold = kv.make_cache()
    difference = models.largest_difference(last_logits(kv, rest, cache), last_logits(kv, tokens, cold))
    assert difference < 1e-4
    assert models.greedy(kv.model, [tokens[0]], 8, cache) == models.greedy(kv.model, [tokens[0]], 8, cold)
    kv.check()
    return len(tokens) - len(rest)


@pytest.mark.parametrize("kind", [FULL, WINDOW, HYBRID, RECURRENT])
def test_whatever_is_stored_is_continued_as_if_run_cold(kind: str) -> None:
    kv = attached(kind)
    trunk, branch = models.prompt(40), models.prompt(40, 1)
    asked = [trunk[:cut] + branch[:more] for cut, more in itertools.product((3, 17, 18, 30, 40), (0, 1, 9))]
    reused = 0
    for tokens in [*asked, *reversed(asked)]:
        reused += assert_as_cold(kv, tokens)
        cache = run(kv, tokens)
        assert kv.prefix_cache.insert(tokens, cache) >= len(tokens) - len(tokens) % 4
        kv.check()
        del cache
    assert reused > (200 if kind != RECURRENT else 100)
    kv.prefix_cache.clear()
    assert (kv.stats().pages_used, kv.stats().pages_cached, kv.prefix_cache.nbytes) == (0, 0, 0)


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("kind", [FULL, WINDOW])
def test_a_match_that_ends_inside_a_page_loses_nothing(kind: str, length: int) -> None:
    kv = attached(kind, page_size=16)
    tokens = models.prompt(length)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert assert_as_cold(kv, tokens + models.prompt(9, 2)) == length
    assert assert_as_cold(kv, tokens[:-3] + models.prompt(9, 2)) == length - 3


@pytest.mark.parametrize("kind", [FULL, WINDOW, HYBRID])
def test_r12_an_exact_hit_leaves_a_token_to_run(kind: str) -> None:
    kv = attached(kind)
    tokens = models.prompt(12)
    kv.prefix_cache.insert(tokens[:11], run(kv, tokens[:11]))
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert assert_as_cold(kv, tokens) == 11
    for few in (tokens[:1], []):
        cache, rest = kv.prefix_cache.fetch(few)
        assert (rest, cache[-1].offset) == (few, 0)


def test_r11_a_window_that_has_passed_and_recurrent_layers_are_reused() -> None:
    shared, own = models.prompt(30), models.prompt(2, 4)
    kv = attached(WINDOW, page_size=16)
    kv.prefix_cache.insert(shared + own, run(kv, shared + own))
    assert assert_as_cold(kv, shared + models.prompt(2, 5)) == 30
    kv = attached(HYBRID, page_size=16)
    kv.prefix_cache.insert(shared, run(kv, shared))
    assert assert_as_cold(kv, shared + models.prompt(2, 5)) == 30


def test_a_window_is_cut_only_where_it_is_whole() -> None:
    kv = attached(WINDOW, rewind=4)
    tokens = models.prompt(60)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert assert_as_cold(kv, tokens[:20]) == 0
    (reason,) = kv.prefix_cache.counts.refused
    assert "window" in reason
    # Its pages in front of that place are added, and both places can be used.
    kv.prefix_cache.insert(tokens[:16], run(kv, tokens[:16]))
    assert assert_as_cold(kv, tokens[:20]) == 16
    assert assert_as_cold(kv, tokens) == 59


def test_recurrent_layers_are_cut_only_where_their_state_was_stored() -> None:
    kv = attached(HYBRID)
    tokens = models.prompt(30)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert assert_as_cold(kv, tokens[:20]) == 0
    assert kv.prefix_cache.counts.refused == {"the state of recurrent layers was not stored there": 19}
    for length in (10, 13, 14):
        kv.prefix_cache.insert(tokens[:length], run(kv, tokens[:length]))
    assert [assert_as_cold(kv, tokens[:length]) for length in (11, 13, 14, 15, 20, 31)] == [10, 10, 13, 14, 14, 14]
    # A cache that is further than the tokens it is stored for has no state to offer.
    kv.prefix_cache.clear()
    kv.prefix_cache.insert(tokens[:20], run(kv, tokens))
    assert assert_as_cold(kv, tokens) == 0


def test_states_stay_within_their_share() -> None:
    kv = attached(HYBRID, memory=1 << 20, prefix_states=0.05)
    for seed in range(30):
        tokens = models.prompt(9, seed)
        kv.prefix_cache.insert(tokens, run(kv, tokens))
        assert kv.prefix_cache.index._state_bytes <= 0.05 * (1 << 20)
    assert assert_as_cold(kv, [*models.prompt(9, 29), 3]) == 9
    assert assert_as_cold(kv, [*models.prompt(9, 0), 3]) == 0


def test_evicted_tokens_of_a_model_without_pages_are_counted_once() -> None:
    kv = attached(RECURRENT)
    tokens = models.prompt(9)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    kv.prefix_cache.index._state_limit = kv.prefix_cache.index._state_bytes
    kv.prefix_cache.insert(models.prompt(9, 1), run(kv, models.prompt(9, 1)))
    assert (kv.stats().prefix_evicted_tokens, kv.prefix_cache.tokens) == (9, 9)


def test_r04_chats_that_branch_from_one_prefix_store_it_once() -> None:
    kv = attached(FULL, page_size=20)
    trunk = models.prompt(500)
    chats = [trunk + models.prompt(100, seed) for seed in (1, 2, 3, 4)]
    caches = []
    for tokens in chats:
        cache, rest = kv.prefix_cache.fetch(tokens)
        last_logits(kv, rest, cache)
        kv.prefix_cache.insert(tokens, cache)
        caches.append(cache)
    assert kv.stats().pages_used == 25 + 4 * 5
    assert kv.prefix_cache.nbytes == 45 * kv.groups[0].page_bytes
    assert len(kv.prefix_cache) == 4
    assert kv.prefix_cache.tokens == 900
    kv.check()


def test_r16_r17_a_stored_page_never_changes() -> None:
    """Whoever continues it writes to a copy, also after the one it came from has gone or the entry was evicted."""
    kv = attached(FULL, page_size=16)
    tokens = models.prompt(40)
    first = run(kv, tokens)
    kv.prefix_cache.insert(tokens, first)
    before = [mx.array(side) for side in first[1].keys_and_values()]
    mx.eval(before)
    second, rest = kv.prefix_cache.fetch([*tokens, 1, 2])
    models.logits(kv.model, rest, second)
    models.logits(kv.model, models.prompt(5, 3), first)
    third, _ = kv.prefix_cache.fetch([*tokens, 9])
    for side, old in zip(third[1].keys_and_values(), before, strict=True):
        assert mx.array_equal(side, old)
    del first, third
    kv.prefix_cache.clear()
    expected = last_logits(kv, [7], run(kv, [*tokens, 1, 2]))
    assert models.largest_difference(last_logits(kv, [7], second), expected) < 1e-4


def test_r24_other_weights_have_their_own_prompts() -> None:
    model = models.make(FULL)
    kv = tinykv.attach(model, page_size=4)
    tokens = models.prompt(20)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    plain = copy.copy(model.model.layers)
    assert assert_as_cold(kv, tokens) == 19
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    adapters = model.trainable_parameters()
    assert assert_as_cold(kv, tokens) == 0
    for seed in (1, 2):
        mx.random.seed(seed)
        model.apply_to_modules(lambda _, module: _randomize(module))
        assert assert_as_cold(kv, tokens) == 0
        kv.prefix_cache.insert(tokens, run(kv, tokens))
        assert assert_as_cold(kv, tokens) == 19
    assert plain
    assert adapters


def _randomize(module: Any) -> None:
    if hasattr(module, "lora_b"):
        module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape)


def test_r65_a_page_is_found_only_after_the_tokens_before_it() -> None:
    kv = attached(FULL)
    first, second, third = models.prompt(4), models.prompt(4, 1), models.prompt(4, 2)
    for tokens in (first + second, third):
        kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert assert_as_cold(kv, third + second + [1]) == 4
    assert assert_as_cold(kv, first + second + [1]) == 8


def test_a_size_limit_has_prompts_of_its_own() -> None:
    kv = attached(FULL)
    tokens = models.prompt(40)
    limited = kv.make_cache(max_kv_size=16)
    for start in range(0, 40, 4):
        models.logits(kv.model, tokens[start : start + 4], limited)
    kv.prefix_cache.insert(tokens, limited)
    assert assert_as_cold(kv, tokens) == 0
    cache, rest = kv.prefix_cache.fetch([*tokens, 1, 2], max_kv_size=16)
    assert rest == [1, 2]
    assert models.largest_difference(last_logits(kv, rest, cache), last_logits(kv, [1, 2], limited)) < 1e-4


def test_requests_come_first() -> None:
    """Stored pages give way, the least recently used prompt first, and never those in use."""
    kv = attached(FULL, max_pages=20)
    prompts = [models.prompt(16, seed) for seed in range(4)]
    for tokens in prompts:
        kv.prefix_cache.insert(tokens, run(kv, tokens))
    assert (kv.stats().pages_cached, kv.stats().pages_free) == (16, 4)
    running, _ = kv.prefix_cache.fetch([*prompts[0], 1])
    assert kv.stats().pages_used == 4
    last_logits(kv, models.prompt(24, 9), kv.make_cache())  # 6 pages: 4 are free
    assert [kv.prefix_cache.matched([*tokens, 1]) for tokens in prompts] == [16, 8, 16, 16]
    assert (kv.stats().evictions, kv.stats().prefix_evicted_tokens) == (2, 8)
    kept = run(kv, models.prompt(64, 9))  # all that is left
    assert [kv.prefix_cache.matched([*tokens, 1]) for tokens in prompts] == [16, 0, 0, 0]
    with pytest.raises(tinykv.OutOfPagesError):
        last_logits(kv, models.prompt(1), kv.make_cache())
    assert kv.prefix_cache.matched([*prompts[0], 1]) == 16
    assert running[0].offset + kept[0].offset == 80


def test_a_share_of_the_budget_bounds_what_is_stored() -> None:
    kv = attached(FULL, prefix_cache=0.25)
    limit = kv.stats().bytes_total // 4 // kv.groups[0].page_bytes
    for seed in range(8):
        tokens = models.prompt(limit, seed)
        cache = run(kv, tokens, chunk=200)
        kv.prefix_cache.insert(tokens, cache)
        del cache
        kv.check()
        assert kv.stats().pages_cached <= limit
    assert kv.stats().pages_cached == limit
    assert kv.prefix_cache.matched(models.prompt(limit, 7)) == limit - 1


def test_nothing_is_stored_when_it_is_off() -> None:
    kv = attached(FULL, prefix_cache=0)
    tokens = models.prompt(20)
    assert kv.prefix_cache.insert(tokens, run(kv, tokens)) == 0
    assert assert_as_cold(kv, tokens) == 0
    assert kv.stats().pages_used == 0
    with pytest.raises(ConfigError, match=r"prefix_cache: 1\.5 is not allowed.*number from 0 to 1"):
        attached(FULL, prefix_cache=1.5)


def test_r23_counters_agree_with_what_was_run() -> None:
    kv = attached(FULL)
    tokens = models.prompt(30)
    ran = 0
    for _ in range(3):
        cache, rest = kv.prefix_cache.fetch(tokens)
        last_logits(kv, rest, cache)
        ran += len(rest)
        kv.prefix_cache.insert(tokens, cache)
    assert (kv.stats().prefix_hit_tokens, kv.stats().prefix_missed_tokens) == (58, 32)
    assert ran == 32


def test_a_foreign_cache_is_refused() -> None:
    kv, other = attached(FULL), tinykv.attach(models.make(FULL), page_size=4)
    tokens = models.prompt(8)
    for cache in (run(other, tokens), [object()]):
        with pytest.raises(CacheStateError, match="own model"):
            kv.prefix_cache.insert(tokens, cache)
    kv.detach()
    with pytest.raises(CacheStateError, match="detached"):
        kv.prefix_cache.fetch(tokens)
    dense = tinykv.attach(models.shared(WINDOW), cache="dense")
    with pytest.raises(CacheStateError, match="dense"):
        _ = dense.prefix_cache


@pytest.mark.parametrize("kind", [FULL, WINDOW, HYBRID])
def test_a_cache_is_stored_for_one_text_only(kind: str) -> None:
    kv = attached(kind)
    tokens, others = models.prompt(22), models.prompt(22, 1)
    cache = run(kv, tokens)
    kv.prefix_cache.insert(tokens, cache)
    for wrong in (others, tokens[:8] + others[8:]):
        with pytest.raises(CacheStateError, match="the cache is stored already, for other tokens; store a prompt with"):
            kv.prefix_cache.insert(wrong, cache)
        kv.check()
    assert len(kv.prefix_cache) == 1
    assert assert_as_cold(kv, tokens[:8] + others[8:]) == (0 if kind == HYBRID else 8)
    assert assert_as_cold(kv, [*tokens, 1]) == 22


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_what_a_broken_off_pass_left_is_not_stored_as_a_state(kind: str) -> None:
    """Recurrent layers before the first attention layer have gone on when that one finds no pages."""
    kv = attached(kind, max_pages=4)
    tokens = models.prompt(16)
    cache = run(kv, tokens[:12])
    with pytest.raises(tinykv.OutOfPagesError):
        models.logits(kv.model, models.prompt(30, 3), cache)
    kv.prefix_cache.insert(tokens[:12], cache)
    del cache
    cache, rest = kv.prefix_cache.fetch(tokens[:13])
    assert len(rest) == (1 if kind == FULL else 13)
    found = last_logits(kv, rest, cache)
    del cache
    kv.prefix_cache.clear()
    assert models.largest_difference(found, last_logits(kv, tokens[:13], kv.make_cache())) < 1e-4


def test_a_request_that_fits_cold_fits_when_its_prompt_is_stored() -> None:
    """The page that the stored prompt ends in need not be copied when there is no room for a copy."""
    kv = attached(FULL, page_size=8, max_pages=4)
    tokens = models.prompt(28)
    for _ in range(3):
        cache, rest = kv.prefix_cache.fetch(tokens)
        last_logits(kv, rest, cache)
        models.greedy(kv.model, [3], 3, cache)
        kv.prefix_cache.insert(tokens, cache)
        kv.check()
        del cache
    assert kv.stats().prefix_hit_tokens > 40


def test_what_a_model_is_made_with_counts_as_its_weights() -> None:
    one, other = models.make(FULL), models.make(FULL, rope_theta=500.0)
    digests = {tinykv.attach(model, page_size=4).prefix_cache.fingerprint() for model in (one, other)}
    assert len(digests) == 2
    linear_to_lora_layers(one, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    first = tinykv.attach(one, page_size=4).prefix_cache.fingerprint()
    one.apply_to_modules(lambda _, module: setattr(module, "scale", 1.0) if hasattr(module, "lora_b") else None)
    assert tinykv.attach(one, page_size=4).prefix_cache.fingerprint() != first


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_r24_weights_that_differ_in_one_place_are_others(dtype: mx.Dtype) -> None:
    """In a matrix that is too large to be read whole: a number changed, two rows exchanged."""
    digests = set()
    for change in range(3):
        model = models.make(FULL, intermediate_size=4096)
        model.set_dtype(dtype)
        weight = model.model.layers[1].mlp.up_proj.weight
        if change == 1:
            weight[1001, 5] += 0.25
        elif change == 2:
            weight[1001:1003] = mx.array(weight[1001:1003][::-1])
        digests.add(tinykv.attach(model, page_size=4).prefix_cache.fingerprint())
    assert len(digests) == 3


def test_clear_looks_at_the_weights_again() -> None:
    model = models.make(FULL)
    kv = tinykv.attach(model, page_size=4)
    tokens = models.prompt(12)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    before = kv.prefix_cache.fingerprint()
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight[:] = 2 * weight
    kv.prefix_cache.clear()
    assert kv.prefix_cache.fingerprint() != before
    assert assert_as_cold(kv, tokens) == 0


def test_states_of_a_batch_do_not_keep_the_whole_batch() -> None:
    kv = attached(HYBRID)
    rows = [models.logits(kv.model, models.prompt(9, seed), cache) for seed, cache in enumerate([kv.make_cache()])]
    batch = [mx.zeros((64, 4096)) for _ in range(2)]
    cache = kv.make_cache()
    models.logits(kv.model, models.prompt(9), cache)
    states = next(leaf for leaf in cache if not hasattr(leaf, "_row"))
    states.state = ([side[3:4] for side in batch], None, None)
    mx.eval(states.cache)
    kv.prefix_cache.insert(models.prompt(9), cache)
    before = mx.get_active_memory()
    del batch, states, cache, rows
    assert before - mx.get_active_memory() > 60 * 4096 * 4 * 2


def test_a_size_limit_of_the_settings_is_that_of_what_is_fetched() -> None:
    kv = attached(FULL, max_kv_size=16)
    tokens = models.prompt(40)
    cache, rest = kv.prefix_cache.fetch(tokens)
    for start in range(0, 40, 4):
        models.logits(kv.model, rest[start : start + 4], cache)
    assert cache[0].size() == 16
    kv.prefix_cache.insert(tokens, cache)
    again, rest = kv.prefix_cache.fetch([*tokens, 1])
    assert (rest, again[0].size()) == ([1], 16)


def test_a_model_without_pages_keeps_no_more_than_its_states() -> None:
    for share in (0.0, 0.0005):
        kv = attached(RECURRENT, prefix_states=share)
        for seed in range(20):
            tokens = models.prompt(9, seed)
            kv.prefix_cache.insert(tokens, run(kv, tokens))
        for length in (9, 30, 20, 29, 5, 31, 12):
            kv.prefix_cache.insert(models.prompt(length), run(kv, models.prompt(length)))
        nodes = len(kv.prefix_cache.index.tree)
        assert nodes <= 8 * len(kv.prefix_cache.index._states)
        kv.detach()


def test_nothing_is_stored_after_detach() -> None:
    kv = attached(FULL)
    cache = run(kv, models.prompt(8))
    kv.detach()
    with pytest.raises(CacheStateError, match="detached"):
        kv.prefix_cache.insert(models.prompt(8), cache)


def test_pages_that_are_laid_out_anew_hold_no_stored_prompts() -> None:
    """A model's dtype changes and changes back: what was stored before is gone, not garbage."""
    model = models.make(FULL)
    kv = tinykv.attach(model, page_size=4)
    tokens = models.prompt(12)
    kv.prefix_cache.insert(tokens, run(kv, tokens))
    weights = model.parameters()
    model.set_dtype(mx.float16)
    run(kv, models.prompt(9, 2))
    assert kv.stats().pages_cached == 0
    model.update(weights)
    assert assert_as_cold(kv, tokens) == 0
