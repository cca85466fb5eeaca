"""Prompts that begin alike: the common beginning is run once, whoever asks first, and answers are as alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
import pytest

import tinykv_plugin as tinykv
from tinykv_plugin.batching.generator import PagedBatchGenerator

KINDS = ["llama", "gemma3_text", "qwen3_next", "mamba"]


def answers(generator: PagedBatchGenerator, prompts: Sequence[list[int]], count: int = 6) -> list[list[int]]:
    uids = generator.insert([list(prompt) for prompt in prompts], [count] * len(prompts))
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    return [found[uid] for uid in uids]


def attached(kind: str, **fields: Any) -> Any:
    return tinykv.attach(models.shared(kind), **{"page_size": 4, "memory": "4MiB", **fields})


def alone(model: Any, prompts: Sequence[list[int]], count: int = 6) -> list[list[int]]:
    return [models.greedy(model, prompt, count) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_r20_siblings_find_one_stored_prompt(kind: str) -> None:
    trunk = models.prompt(40)
    prompts = [trunk + models.prompt(3 + seed, seed) for seed in range(1, 9)]
    expected = alone(models.shared(kind), prompts)
    kv = attached(kind)
    generator = PagedBatchGenerator(kv.model, prefill_step_size=64)
    answers(generator, [trunk], 1)
    pages = kv.stats().pages_cached
    assert answers(generator, prompts) == expected
    stats, counts = kv.stats(), kv.prefix_cache.counts
    assert (counts.hits, counts.misses) == (8, 1)
    # What recurrent layers held was stored before the last token was run, and after the answer.
    shared = 39 if kind in ("qwen3_next", "mamba") else 40
    assert stats.prefix_hit_tokens == 8 * shared
    assert stats.prefix_missed_tokens == 40 + sum(len(prompt) - shared for prompt in prompts)
    if kind == "llama":
        # One copy of what is shared, which was stored without its last, partial page being full.
        assert stats.peak_pages_used <= pages + 8 * 5
    generator.close()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_come_together_run_their_common_beginning_once(kind: str) -> None:
    trunk = models.prompt(40)
    prompts = [trunk + models.prompt(2 + seed, seed) for seed in range(1, 6)]
    others = [models.prompt(9, 7), models.prompt(30, 8)]
    expected = alone(models.shared(kind), [*prompts, *others])
    kv = attached(kind)
    generator = PagedBatchGenerator(kv.model, prefill_step_size=64)
    assert answers(generator, [*prompts, *others]) == expected
    assert kv.stats().prefix_hit_tokens == 4 * 40
    assert generator._counters.prompt_tokens == kv.stats().prefix_missed_tokens - 7
    kv.check()
    generator.close()


def test_the_same_prompt_many_times_is_run_once() -> None:
    kv = attached("llama")
    prompt = models.prompt(33)
    (expected,) = alone(models.shared("llama"), [prompt])
    generator = PagedBatchGenerator(kv.model)
    assert answers(generator, [prompt] * 6) == [expected] * 6
    assert kv.stats().prefix_missed_tokens == 33 + 5
    generator.close()


def test_others_pass_those_that_wait_for_a_common_beginning() -> None:
    kv = attached("llama")
    trunk, other = models.prompt(60), models.prompt(5, 3)
    generator = PagedBatchGenerator(kv.model, prefill_step_size=8)
    first, second = generator.insert([[*trunk, 1], [*trunk, 2]], [4, 4])
    (third,) = generator.insert([other], [4])
    order = []
    while responses := generator.next_generated():
        order += [response.uid for response in responses if response.uid not in order]
    assert order == [third, first, second]
    generator.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_leader_that_is_cancelled_leaves_what_it_has_run(kind: str) -> None:
    kv = attached(kind)
    trunk = models.prompt(80)
    prompts = [[*trunk, 1], [*trunk, 2]]
    expected = alone(models.shared(kind), prompts)
    generator = PagedBatchGenerator(kv.model, prefill_step_size=16)
    leader, follower = generator.insert(prompts, [6, 6])
    for _ in range(3):
        generator.next()
    assert (generator.running, generator.waiting) == (1, 1)
    generator.remove([leader])
    found = []
    while responses := generator.next_generated():
        found += [response.token for response in responses]
        assert {response.uid for response in responses} == {follower}
    assert found == expected[1]
    assert kv.stats().prefix_hit_tokens == 48
    generator.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_preempted_requests_find_what_is_left_of_their_pages(kind: str) -> None:
    prompts = [models.prompt(10, seed) for seed in range(4)]
    expected = alone(models.shared(kind), prompts, 30)
    kv = attached(kind, max_pages=22)
    generator = PagedBatchGenerator(kv.model)
    assert answers(generator, prompts, 30) == expected
    assert generator.counts.preempted > 0
    if kind != "qwen3_next":  # its recurrent layers are stored at the end of the last page, the first to give way
        assert kv.stats().prefix_hit_tokens > 0
    kv.check()
    generator.close()


def test_models_with_windows_stop_where_they_can_be_continued() -> None:
    kv = attached("gemma3_text", prefix_interval=16)
    generator = PagedBatchGenerator(kv.model)
    trunk = models.prompt(80)
    answers(generator, [trunk], 1)
    for length, reused in ((79, 78), (70, 64), (40, 32), (33, 32), (20, 16), (9, 0)):
        before = kv.stats().prefix_hit_tokens
        prompt = [*trunk[:length], *models.prompt(3, 4)]
        assert answers(generator, [prompt]) == alone(models.shared("gemma3_text"), [prompt])
        assert kv.stats().prefix_hit_tokens - before in range(reused, length + 1), length
    generator.close()


@pytest.mark.parametrize(("kind", "word"), [("gemma3_text", "window"), ("qwen3_next", "recurrent")])
def test_what_is_stored_and_cant_be_used_is_counted_when_the_request_is_run(kind: str, word: str) -> None:
    kv = attached(kind, rewind=4)
    generator = PagedBatchGenerator(kv.model)
    kv.prefix_cache.insert(models.prompt(60), run_cold(kv, models.prompt(60)))
    prompt = [*models.prompt(20), 1]
    uids = generator.insert([prompt], [3])
    generator.remove(uids)
    assert kv.prefix_cache.counts.refused == {}
    assert answers(generator, [prompt]) == alone(kv.model, [prompt])
    ((reason, tokens),) = kv.prefix_cache.counts.refused.items()
    assert (word in reason, tokens) == (True, 20)
    assert (kv.stats().prefix_hit_tokens, kv.stats().prefix_missed_tokens) == (0, 21)
    generator.close()


def run_cold(kv: Any, tokens: list[int]) -> Any:
    cache = kv.make_cache()
    for start in range(0, len(tokens), 5):
        models.logits(kv.model, tokens[start : start + 5], cache)
    return cache


def test_nothing_is_shared_when_it_is_off() -> None:
    kv = attached("llama", prefix_cache=0)
    prompts = [[*models.prompt(30), seed] for seed in range(3)]
    generator = PagedBatchGenerator(kv.model)
    assert answers(generator, prompts) == alone(models.shared("llama"), prompts)
    assert (kv.stats().prefix_hit_tokens, kv.stats().pages_cached) == (0, 0)
    generator.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [True, False])
def test_a_callers_own_cache_is_stored_only_if_its_tokens_are_known(kind: str, known: bool) -> None:
    model = models.shared(kind)
    before, prompt = models.prompt(21, 5), models.prompt(20)
    expected = models.greedy(model, before + prompt, 5)
    kv = attached(kind)
    generator = PagedBatchGenerator(kv.model)
    cache = kv.make_cache()
    models.logits(kv.model, before, cache)
    generator.insert([prompt], [5], caches=[cache], all_tokens=[list(before) if known else []])
    del cache
    found = []
    while responses := generator.next_generated():
        found += [response.token for response in responses]
    assert found == expected
    assert (kv.stats().prefix_hit_tokens, kv.stats().prefix_missed_tokens) == (0, 0), "the store was not asked"
    assert (kv.prefix_cache.matched([*before, *prompt, 1]) > 30) == (known and kind != "mamba")
    # Whatever was stored, nobody gets another prompt's keys and values.
    for asked in (prompt, before, before + prompt):
        assert answers(generator, [asked]) == alone(model, [asked])
    generator.close()
