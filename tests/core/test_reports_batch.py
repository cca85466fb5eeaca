"""Faults that users met in batches, as tests: each row must get what it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import RotatingKVCache
from models import batched, greedy, prompt, shared

import tinykv_plugin as tinykv


def run_while_joining(model: Any, prompts: list[list[int]], count: int, every: int, **options: Any) -> list[list[int]]:
    """Tokens of rows that join a batch one by one, ``every`` steps apart."""
    generator = BatchGenerator(model, max_tokens=count, **options)
    ids: list[int] = []
    found: dict[int, list[int]] = {}
    step = 0
    while len(ids) < len(prompts) or any(len(found[one]) < count for one in ids):
        if step % every == 0 and len(ids) < len(prompts):
            ids += generator.insert([prompts[len(ids)]])
            found[ids[-1]] = []
        for response in generator.next_generated():
            found[response.uid].append(int(response.token))
        step += 1
        assert step < 500
    generator.close()
    return [found[one] for one in ids]


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "llama"])
@pytest.mark.parametrize("page_size", [4, 32])
def test_r30_rows_that_join_a_sliding_window_batch_get_their_own_text(kind: str, page_size: int) -> None:
    model = shared(kind)
    prompts = [prompt(length, seed=seed) for seed, length in enumerate((17, 4, 30, 9))]
    solo = [greedy(model, tokens, 24) for tokens in prompts]
    with tinykv.attach(model, page_size=page_size) as kv:
        assert run_while_joining(model, prompts, 24, every=5) == solo
        kv.check()
        assert batched(model, prompts, 24) == solo
        assert kv.stats().pages_used == 0


def test_r28_the_kept_tokens_are_kept_in_batches_too() -> None:
    model = shared("llama")
    prompts = [prompt(40), prompt(3, seed=1), prompt(16, seed=2)]
    solo = [
        greedy(model, tokens, 60, cache=[RotatingKVCache(max_size=16, keep=4) for _ in model.layers])
        for tokens in prompts
    ]
    with tinykv.attach(model, page_size=4, max_kv_size=16) as kv:
        assert batched(model, prompts, 60) == solo
        kv.check()
        assert run_while_joining(model, prompts, 60, every=7) == solo
        kv.check()
    with tinykv.attach(model, page_size=4) as kv:
        assert batched(model, prompts, 60, max_kv_size=16) == solo
        kv.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_r69_greedy_tokens_do_not_depend_on_who_else_is_in_the_batch(kind: str) -> None:
    model = shared(kind, num_hidden_layers=2)
    mine = prompt(19)
    solo = greedy(model, mine, 16)
    with tinykv.attach(model, page_size=8) as kv:
        for others in (0, 1, 15):
            prompts = [mine, *(prompt(seed * 3 % 37 + 1, seed=seed) for seed in range(1, others + 1))]
            assert batched(model, prompts, 16)[0] == solo, others
            assert batched(model, prompts[::-1], 16)[-1] == solo, others
        kv.check()


def test_r36_rows_come_and_go_while_others_decode() -> None:
    model = shared("gemma3_text", num_hidden_layers=2)
    prompts = [prompt(length, seed=seed) for seed, length in enumerate((1, 3, 9, 14, 22))]
    solo = [greedy(model, tokens, 40) for tokens in prompts]
    rng = random.Random(5)
    with tinykv.attach(model, page_size=4) as kv:
        generator = BatchGenerator(model, max_tokens=40, completion_batch_size=6, prefill_batch_size=3)
        kinds: dict[int, int] = {}
        found: dict[int, list[int]] = {}
        changes = finished = 0
        while changes < 500:
            for _ in range(rng.randrange(4)):
                changes += 1
                if len(kinds) < 7 and (not kinds or rng.random() < 0.6):
                    kind = rng.randrange(len(prompts))
                    (uid,) = generator.insert([prompts[kind]])
                    kinds[uid], found[uid] = kind, []
                else:
                    uid = rng.choice(list(kinds))
                    generator.remove([uid])
                    assert found[uid] == solo[kinds.pop(uid)][: len(found[uid])]
            for response in generator.next_generated():
                found[response.uid].append(int(response.token))
                if response.finish_reason is not None:
                    assert found[response.uid] == solo[kinds.pop(response.uid)]
                    finished += 1
            if changes % 20 == 0:
                kv.check()
        generator.remove(list(kinds))
        generator.close()
        del generator, response
        assert sum(len(tokens) for tokens in found.values()) > 1000
        assert kv.stats().pages_used == 0
