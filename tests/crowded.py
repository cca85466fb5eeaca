"""One request that needs a model's whole budget, which is full of other prompts; for any backend."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import mlx.core as mx
from models import greedy, make, prompt

import tinykv_plugin as tinykv
from tinykv_plugin.batching.generator import PagedBatchGenerator
from tinykv_plugin.errors import OutOfPagesError

CHUNK = 16
PROMPT = prompt(120, seed=90)


def small_model(kind: str, **fields: Any) -> Any:
    """Layers with a window of 8 tokens, and such without."""
    return make(kind, num_hidden_layers=2, **fields)


def crowd(model: Any, kv: tinykv.Attachment) -> None:
    """Store prompts, long and short, until the budget is booked several times over."""
    for number in range(7):
        tokens = prompt(12 + 11 * number, seed=number)
        cache, rest = kv.prefix_cache.fetch(tokens)
        with contextlib.suppress(OutOfPagesError):
            greedy(model, rest, 2, cache, prefill_step_size=CHUNK)
        kv.prefix_cache.insert(tokens[: cache[0].offset], cache)


def least_pages(model: Any, **settings: Any) -> int:
    """The smallest budget that the request fits into when nothing is stored, in pages of the smaller kind."""
    low, high = 0, 100
    while high - low > 1:
        middle = (low + high) // 2
        with attach(model, middle, **settings) as kv:
            try:
                greedy(model, PROMPT, 4, kv.make_cache(), prefill_step_size=CHUNK)
                high = middle
            except OutOfPagesError:
                low = middle
    return high


def attach(model: Any, pages: int, **settings: Any) -> tinykv.Attachment:
    """An attachment with a budget of ``pages`` pages of the smaller kind."""
    with tinykv.attach(model, page_size=4, **settings) as kv:
        kv.make_cache()
        page = min(group.page_bytes for group in kv.session.groups)
    return tinykv.attach(model, page_size=4, rewind=0, memory=pages * page, **settings)


def check_alone(model: Any, **settings: Any) -> None:
    """The request gets the same tokens at every budget from the smallest on, and so in the batch generator."""
    expected = greedy(model, PROMPT, 4, prefill_step_size=CHUNK)
    if "bits" in settings:  # what quantization makes of them
        with attach(model, 1000, **settings) as kv:
            expected = greedy(model, PROMPT, 4, kv.make_cache(), prefill_step_size=CHUNK)
    least, moved = least_pages(model, **settings), 0
    for pages in range(least, least + 9, 4):
        with attach(model, pages, **settings) as kv:
            crowd(model, kv)
            cache, rest = kv.prefix_cache.fetch(PROMPT)
            assert greedy(model, rest, 4, cache, prefill_step_size=CHUNK) == expected
            kv.check()
            del cache
            crowd(model, kv)
            if pages == least + 8:  # the batch generator's estimate is a little higher
                generator = PagedBatchGenerator(model, max_tokens=4, prefill_step_size=CHUNK)
                generator.insert([PROMPT])
                found = []
                while responses := generator.next_generated():
                    found += [int(response.token) for response in responses]
                generator.close()
                assert found == expected
            moved += kv.stats().page_moves
            if settings.get("attention") != "gather":
                assert {line.backend for line in kv.plan} == {settings["attention"]}
    assert moved


def check_batch(model: Any, **settings: Any) -> None:
    """Requests that take pages from each other, beside stored prompts, and a fork that shares a prompt's pages."""
    prompts = [prompt(14 + 9 * number, seed=40 + number) for number in range(5)]
    expected = [greedy(model, tokens, 16) for tokens in prompts]
    with attach(model, 44, **settings) as kv:
        crowd(model, kv)
        shared = kv.make_cache()
        greedy(model, prompts[0], 2, shared)
        fork = copy.deepcopy(shared)
        before = [leaf.keys_and_values() for leaf in fork]
        generator = PagedBatchGenerator(model, max_tokens=16, prefill_step_size=CHUNK, completion_batch_size=4)
        uids = generator.insert(prompts)
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        moves = kv.stats().page_moves
        while responses := generator.next_generated():
            for response in responses:
                assert not getattr(response, "error", None)
                found[response.uid].append(int(response.token))
            kv.check()
        generator.close()
        assert list(found.values()) == expected
        assert generator.counts.preempted > 0
        assert kv.stats().page_moves > moves
        for row in (shared, fork):
            for leaf, (keys, values) in zip(row, before, strict=True):
                now = leaf.keys_and_values()
                assert mx.array_equal(now[0], keys)
                assert mx.array_equal(now[1], values)
