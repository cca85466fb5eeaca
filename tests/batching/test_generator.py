"""PagedBatchGenerator against solo runs of stock mlx-lm: joins, budgets, preemption, failures, cancellation."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from models import greedy as solo
from models import make as make_model

import tinykv_plugin as tinykv
from tinykv_plugin.batching.generator import PagedBatchGenerator

ARCHITECTURES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "phi"]
LENGTHS = [33, 1, 4, 60, 17, 2, 9, 21]


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(length)] for length in lengths]


def collect(
    generator: PagedBatchGenerator, step: Callable[[int], None] = lambda count: None
) -> tuple[dict[int, list[int]], dict[int, Exception]]:
    """Run to the end; tokens by uid and errors by uid. ``step`` is called with the number of steps so far."""
    tokens: dict[int, list[int]] = {}
    errors: dict[int, Exception] = {}
    steps = 0
    while responses := generator.next_generated():
        for response in responses:
            if response.finish_reason == "error":
                errors[response.uid] = response.error
            else:
                tokens.setdefault(response.uid, []).append(response.token)
        steps += 1
        step(steps)
    generator.close()
    return tokens, errors


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_lengths_equal_solo_runs(architecture: str) -> None:
    model = make_model(architecture)
    prompts = prompts_of(LENGTHS)
    expected = [solo(model, prompt, 16) for prompt in prompts]
    kv = tinykv.attach(model, page_size=4)
    generator = PagedBatchGenerator(model, max_tokens=16, prefill_step_size=16)
    uids = generator.insert(prompts)
    tokens, errors = collect(generator, lambda count: kv.check())
    assert [tokens[uid] for uid in uids] == expected
    assert not errors
    assert kv.stats().pages_used == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
def test_r36_rows_joining_while_others_decode(architecture: str) -> None:
    model = make_model(architecture)
    rng = random.Random(3)
    prompts = prompts_of([rng.choice(LENGTHS) for _ in range(20)], seed=3)
    limits = [rng.randrange(1, 20) for _ in prompts]
    expected = [solo(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    kv = tinykv.attach(model, page_size=4)
    generator = PagedBatchGenerator(model, prefill_step_size=16, completion_batch_size=6, prefill_batch_size=3)
    waiting = list(enumerate(prompts))
    uids: dict[int, int] = {}

    def join(count: int) -> None:
        kv.check()
        for _ in range(rng.randrange(3)):
            if waiting:
                index, prompt = waiting.pop(0)
                (uid,) = generator.insert([prompt], [limits[index]])
                uids[uid] = index

    join(0)
    tokens: dict[int, list[int]] = {}
    while waiting or generator.busy:
        if not generator.busy:
            join(0)
        for response in generator.next_generated():
            tokens.setdefault(uids[response.uid], []).append(response.token)
        join(0)
    assert [tokens[index] for index in range(len(prompts))] == expected


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("on_full", ["preempt", "wait"])
@pytest.mark.parametrize("max_pages", [40, 22])
def test_r66_requests_that_fit_alone_all_finish(architecture: str, on_full: str, max_pages: int) -> None:
    model = make_model(architecture)
    prompts = prompts_of([*LENGTHS, 60, 33, 21], seed=1)
    expected = [solo(model, prompt, 20) for prompt in prompts]
    kv = tinykv.attach(model, page_size=4, max_pages=max_pages, on_full=on_full)
    generator = PagedBatchGenerator(model, max_tokens=20, prefill_step_size=16)
    uids = generator.insert(prompts)
    tokens, errors = collect(generator, lambda count: kv.check())
    assert not errors
    assert [tokens[uid] for uid in uids] == expected
    assert generator.counts.preempted > 0 if (on_full, max_pages) == ("preempt", 22) else True
    assert generator.counts.preempted == 0 if on_full == "wait" else True
    assert kv.stats().pages_used == 0


def test_four_growing_requests_in_twenty_pages() -> None:
    """R66 in the words of its report: admission by free pages alone deadlocks here."""
    model = make_model("llama")
    prompts = prompts_of([8, 8, 8, 8])
    expected = [solo(model, prompt, 60) for prompt in prompts]
    tinykv.attach(model, page_size=4, max_pages=20)
    generator = PagedBatchGenerator(model, max_tokens=60)
    uids = generator.insert(prompts)
    tokens, errors = collect(generator)
    assert not errors
    assert [tokens[uid] for uid in uids] == expected
    assert generator.counts.preempted >= 3


def test_r06_a_request_that_can_never_fit_is_refused_and_the_others_finish() -> None:
    model = make_model("llama")
    prompts = prompts_of([5, 6])
    expected = [solo(model, prompt, 8) for prompt in prompts]
    kv = tinykv.attach(model, page_size=4, max_pages=8)
    generator = PagedBatchGenerator(model, max_tokens=8)
    uids = generator.insert(prompts)
    with pytest.raises(tinykv.RequestTooLargeError, match=r"36 tokens and needs 9 pages .*--kv-max-pages 9") as caught:
        generator.insert(prompts_of([28]))
    assert (caught.value.tokens, caught.value.pages) == (36, 9)
    tokens, errors = collect(generator)
    assert [tokens[uid] for uid in uids] == expected
    assert not errors
    later = generator.insert(prompts_of([3], seed=9))
    tokens, _ = collect(generator)
    assert len(tokens[later[0]]) == 8
    assert kv.stats().pages_used == 0


def test_error_policy_fails_what_does_not_fit_now() -> None:
    model = make_model("llama")
    prompts = prompts_of([20, 20])
    expected = solo(model, prompts[0], 8)
    tinykv.attach(model, page_size=4, max_pages=9, on_full="error")
    generator = PagedBatchGenerator(model, max_tokens=8)
    first, second = generator.insert(prompts)
    tokens, errors = collect(generator)
    assert tokens[first] == expected
    assert isinstance(errors[second], tinykv.OutOfPagesError)


@pytest.mark.parametrize("where", ["sampler", "processor"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_r37_a_row_that_raises_fails_alone(architecture: str, where: str) -> None:
    model = make_model(architecture)
    prompts = prompts_of([7, 12, 3])
    expected = [solo(model, prompt, 12) for prompt in prompts]
    kv = tinykv.attach(model, page_size=4)
    calls = 0

    def explode(*arguments: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ZeroDivisionError("at step 5")
        return mx.argmax(arguments[-1], axis=-1) if where == "sampler" else arguments[-1]

    generator = PagedBatchGenerator(model, max_tokens=12)
    options: dict[str, Any] = (
        {"samplers": [None, explode, None]} if where == "sampler" else {"logits_processors": [None, [explode], None]}
    )
    uids = generator.insert(prompts, **options)
    tokens, errors = collect(generator, lambda count: kv.check())
    assert [tokens[uids[0]], tokens[uids[2]]] == [expected[0], expected[2]]
    assert isinstance(errors[uids[1]], ZeroDivisionError)
    assert tokens[uids[1]] == expected[1][: len(tokens[uids[1]])]
    assert len(tokens[uids[1]]) < 6
    assert kv.stats().pages_used == 0


def test_a_failed_forward_pass_fails_its_rows_and_later_requests_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    prompts = prompts_of([7, 12])
    kv = tinykv.attach(model, page_size=4)
    generator = PagedBatchGenerator(model, max_tokens=12)
    uids = generator.insert(prompts)
    layer = model.layers[2].mlp
    calls = 0
    original = type(layer).__call__

    def explode(self: Any, x: mx.array) -> mx.array:
        nonlocal calls
        calls += self is layer
        if calls == 6 and self is layer:
            raise RuntimeError("out of luck")
        return original(self, x)

    monkeypatch.setattr(type(layer), "__call__", explode)
    _, errors = collect(generator)
    assert {uid: str(error) for uid, error in errors.items()} == dict.fromkeys(uids, "out of luck")
    kv.check()
    assert kv.stats().pages_used == 0
    (uid,) = generator.insert([prompts[0]])
    tokens, errors = collect(generator)
    kv.detach()
    assert tokens[uid] == solo(model, prompts[0], 12)


def test_r38_removal_at_any_moment_frees_the_pages() -> None:
    model = make_model("gemma3_text")
    rng = random.Random(5)
    kv = tinykv.attach(model, page_size=4, max_pages=40)
    keeper = prompts_of([9], seed=7)[0]
    generator = PagedBatchGenerator(model, max_tokens=400, prefill_step_size=8, prefill_batch_size=2)
    for round_ in range(100):
        uids = generator.insert(prompts_of([30, 5, 12], seed=round_), [10, 10, 10])
        for _ in range(rng.randrange(12)):
            generator.next()
        generator.remove(uids)
        generator.remove(uids)  # twice does no harm
        kv.check()
        assert kv.stats().pages_used == 0, round_
    (uid,) = generator.insert([keeper], [10])
    tokens, _ = collect(generator)
    kv.detach()
    assert tokens[uid] == solo(model, keeper, 10)


def test_r28_max_kv_size_in_a_batch_equals_solo() -> None:
    model = make_model("llama")
    prompts = prompts_of([40, 3])
    expected = [
        solo(model, prompt, 60, cache=[RotatingKVCache(16, keep=4) for _ in model.layers]) for prompt in prompts
    ]
    kv = tinykv.attach(model, page_size=4)
    generator = PagedBatchGenerator(model, max_tokens=60, max_kv_size=16)
    uids = generator.insert(prompts)
    peak = 0

    def watch(count: int) -> None:
        nonlocal peak
        peak = max(peak, kv.stats().pages_used) if count > 2 else 0

    tokens, _ = collect(generator, watch)
    assert [tokens[uid] for uid in uids] == expected
    # Per row: the kept page, the window of 12 others and the margin of 16, rounded up to pages at both ends.
    assert peak <= 2 * (1 + (12 + 16) // 4 + 2)


@pytest.mark.parametrize("pages", [None, 14])
@pytest.mark.parametrize("step", [4, 8, 32])
def test_r28_prompts_longer_than_the_limit_give_what_they_give_alone(step: int, pages: int | None) -> None:
    """What a token reads depends on where its prefill step began: not on the other rows, nor on a preemption."""
    model = make_model("llama")
    prompts = prompts_of([9, 35, 3, 40, 12, 20])
    expected = [
        solo(model, prompt, 30, cache=[RotatingKVCache(16, keep=4) for _ in model.layers], prefill_step_size=step)
        for prompt in prompts
    ]
    tinykv.attach(model, page_size=4, rewind=0, max_pages=pages)
    generator = PagedBatchGenerator(model, max_tokens=30, max_kv_size=16, prefill_step_size=step)
    uids = generator.insert(prompts)
    tokens, _ = collect(generator)
    assert [tokens[uid] for uid in uids] == expected
    assert bool(generator.counts.preempted) == (pages is not None)
    assert not generator._steps


def test_r69_output_does_not_depend_on_the_other_rows() -> None:
    model = make_model("llama")
    prompt = prompts_of([23], seed=4)[0]
    expected = solo(model, prompt, 24)
    tinykv.attach(model, page_size=8)
    for others in (0, 1, 15):
        generator = PagedBatchGenerator(model, max_tokens=24, prefill_batch_size=16)
        uids = generator.insert([*prompts_of([others + 5] * others, seed=others), prompt])
        tokens, _ = collect(generator)
        assert tokens[uids[-1]] == expected, others


def test_given_caches_are_shared_and_not_modified() -> None:
    model = make_model("llama")
    shared, ends = prompts_of([40])[0], prompts_of([3, 5, 2], seed=8)
    expected = [solo(model, shared + end, 8) for end in ends]
    kv = tinykv.attach(model, page_size=8)
    cache = make_prompt_cache(model)
    model(mx.array([shared]), cache=cache)
    before = [mx.array(part) for part in cache[0].keys_and_values()]
    generator = PagedBatchGenerator(model, max_tokens=8)
    uids = generator.insert(ends, caches=[cache, cache, copy.deepcopy(cache)], all_tokens=[list(shared)] * 3)
    peak = []
    tokens, _ = collect(generator, lambda count: peak.append(kv.stats().pages_used))
    assert [tokens[uid] for uid in uids] == expected
    assert cache[0].offset == 40
    assert all(mx.array_equal(a, b) for a, b in zip(before, cache[0].keys_and_values(), strict=True))
    assert max(peak) <= 5 + 3 * 2  # the shared pages once, and each row's own


def test_lists_of_known_tokens_are_not_modified() -> None:
    model = make_model("llama")
    prompt = prompts_of([12])[0]
    expected = solo(model, prompt, 5)
    tinykv.attach(model, page_size=4)
    cache, known = make_prompt_cache(model), prompt[:8]
    mx.eval(model(mx.array([known]), cache=cache))
    for _ in range(2):
        generator = PagedBatchGenerator(model, max_tokens=5)
        (uid,) = generator.insert([prompt[8:]], caches=[copy.deepcopy(cache)], all_tokens=[known])
        assert collect(generator)[0][uid] == expected
        assert known == prompt[:8]


def test_r66_given_caches_keep_no_pages_from_those_who_run() -> None:
    """Four prefixes fill the budget; the first request needs another page than its own."""
    model = make_model("llama")
    prompts = prompts_of([20, 20, 20, 20])
    expected = [solo(model, prompt, 16) for prompt in prompts]
    tinykv.attach(model, page_size=4, max_pages=20)
    generator = PagedBatchGenerator(model, max_tokens=16, completion_batch_size=1, prefill_batch_size=1)
    uids = []
    for prompt in prompts:
        cache = make_prompt_cache(model)
        model(mx.array([prompt[:-1]]), cache=cache)
        uids += generator.insert([prompt[-1:]], caches=[cache], all_tokens=[prompt[:-1]])
        del cache
    tokens, errors = collect(generator)
    assert errors == {}
    assert [tokens[uid] for uid in uids] == expected


@pytest.mark.parametrize("known", [True, False])
def test_rows_with_a_given_cache_are_preempted_and_end_as_they_would_alone(known: bool) -> None:
    model = make_model("llama")
    prompts = prompts_of([20, 20, 20])
    expected = [solo(model, prompt, 24) for prompt in prompts]
    tinykv.attach(model, page_size=4, max_pages=22)
    generator = PagedBatchGenerator(model, max_tokens=24)
    uids = []
    for prompt in prompts:
        cache = make_prompt_cache(model)
        model(mx.array([prompt[:10]]), cache=cache)
        uids += generator.insert([prompt[10:]], caches=[cache], all_tokens=[prompt[:10]] if known else None)
        del cache
    tokens, errors = collect(generator)
    assert errors == {}
    assert 0 < generator.counts.preempted < 6
    assert [tokens[uid] for uid in uids] == expected


def test_stock_caches_are_taken_into_pages() -> None:
    model = make_model("llama")
    shared, end = prompts_of([20])[0], [1, 2, 3]
    cache = make_prompt_cache(model)
    model(mx.array([shared]), cache=cache)
    expected = solo(model, shared + end, 8)
    tinykv.attach(model, page_size=8)
    generator = PagedBatchGenerator(model, max_tokens=8)
    (uid,) = generator.insert([end], caches=[cache], all_tokens=[list(shared)])
    tokens, _ = collect(generator)
    assert tokens[uid] == expected
    assert type(cache[0]).__name__ == "KVCache"


def test_finished_caches_can_be_taken_and_are_freed_otherwise() -> None:
    model = make_model("llama")
    kv = tinykv.attach(model, page_size=8)
    generator = PagedBatchGenerator(model, max_tokens=4)
    uids = generator.insert(prompts_of([10, 12]))
    finished = []
    while responses := generator.next_generated():
        for response in responses:
            if response.finish_reason == "length":
                finished.append(response)
                if response.uid == uids[0]:
                    assert response.prompt_cache[0].offset == 14
    assert "FinishedResponse" in repr(finished[1])
    generator.insert(prompts_of([1]))
    generator.next_generated()
    assert finished[0].prompt_cache[0].offset == 14
    with pytest.raises(tinykv.CacheStateError, match="before the generator's next step"):
        _ = finished[1].prompt_cache
    generator.remove([2])
    assert kv.stats().pages_used == 2


def test_extraction_in_the_middle_of_a_prefill_has_no_padding() -> None:
    model = make_model("llama")
    prompts = prompts_of([30, 11])
    tinykv.attach(model, page_size=4)
    generator = PagedBatchGenerator(model, max_tokens=4, prefill_step_size=8)
    uids = generator.insert(prompts)
    generator.next()
    generator.next()
    for uid, (cache, tokens) in generator.extract_cache(uids).items():
        assert cache[0].offset == len(tokens)
        assert tokens == prompts[uids.index(uid)][: len(tokens)]
        assert solo(model, prompts[0][:3], 4, cache=cache)
    generator.remove(uids)


def test_needs_an_attached_model() -> None:
    with pytest.raises(tinykv.CacheStateError, match="attach"):
        PagedBatchGenerator(make_model("llama"))
    model = make_model("llama")
    tinykv.attach(model, cache="dense")
    with pytest.raises(tinykv.CacheStateError, match="paged caches"):
        PagedBatchGenerator(model)


def test_a_cache_of_another_attachment_is_refused() -> None:
    model, other = make_model("llama"), make_model("qwen2")
    tinykv.attach(model)
    tinykv.attach(other)
    generator = PagedBatchGenerator(model)
    with pytest.raises(tinykv.CacheStateError, match="another model"):
        generator.insert([[1, 2]], caches=[make_prompt_cache(other)])
    assert not generator.busy
