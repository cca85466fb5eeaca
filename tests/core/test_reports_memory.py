"""Faults that users met in other caches, as tests: memory that grows, limits that don't hold, pages that are lost."""

from __future__ import annotations

import copy
import gc
import re
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from models import batched, greedy, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.attachment import Attachment
from tinykv_plugin.errors import OutOfPagesError

TOKEN_BYTES = 2 * 2 * 16 * 4  # a layer's K and V of one token: heads, head_dim, float32


@pytest.fixture
def small() -> Any:
    return shared("llama", num_hidden_layers=2)


def append(cache: list[Any], count: int) -> None:
    """Write ``count`` tokens without running a model."""
    tokens = mx.ones((1, 2, count, 16))
    for layer in cache:
        layer.update_and_fetch(tokens, tokens)
    mx.eval([layer.state for layer in cache])


def adds_up(kv: Attachment) -> bool:
    stats = kv.stats()
    return stats.pages_free + stats.pages_used + stats.pages_cached == stats.pages_total


def test_r01_a_thousand_requests_leave_the_pool_as_large_as_the_first(small: Any) -> None:
    with tinykv.attach(small, page_size=4, max_pages=64) as kv:
        reserved, active = set(), []
        for number in range(1000):
            cache = make_prompt_cache(small)
            logits(small, prompt(number % 60 + 4, seed=number), cache)
            reserved.add(kv.stats().bytes_reserved)
            del cache
            if number % 100 == 50:
                active.append(mx.get_active_memory())
        assert reserved == {64 * 4 * TOKEN_BYTES * 2}
        assert kv.stats().growths == 1
        assert max(active) - min(active) < 10_000
        assert kv.stats().pages_used == 0


def test_r02_a_byte_limit_holds_for_single_drafted_and_batched_requests(small: Any) -> None:
    draft = shared("llama", seed=5, num_hidden_layers=1)
    budget = 40 * 8 * TOKEN_BYTES * 2
    with tinykv.attach(small, page_size=8, memory=budget) as kv, tinykv.attach(draft, page_size=8, memory=budget // 2):
        for number in range(50):
            greedy(small, prompt(20 + number, seed=number), 4)
            assert kv.stats().peak_bytes_reserved <= budget
        for number in range(50):
            tokens = mx.array(prompt(20 + number, seed=number))
            list(speculative_generate_step(tokens, small, draft, max_tokens=4, num_draft_tokens=2))
            assert kv.stats().peak_bytes_reserved <= budget
        for number in range(12):
            batched(small, [prompt(20 + number + row, seed=row) for row in range(4)], 4)
            assert kv.stats().peak_bytes_reserved <= budget
        assert kv.stats().bytes_reserved <= kv.stats().bytes_total == budget
        # The limit is met, not only never reached.
        with pytest.raises(OutOfPagesError):
            logits(small, prompt(330), make_prompt_cache(small))


def test_r05_no_step_copies_the_cache(small: Any) -> None:
    with tinykv.attach(small, page_size=32, attention="gather") as kv:
        cache = make_prompt_cache(small)
        append(cache, 1)
        mx.clear_cache()
        for _ in range(4095):
            growths, reserved, before = kv.stats().growths, kv.stats().bytes_reserved, mx.get_active_memory()
            mx.reset_peak_memory()
            append(cache, 1)
            needed = mx.get_peak_memory() - before
            if kv.stats().growths == growths:
                assert needed < 20_000, "a step that doesn't grow the pool needs next to nothing"
            else:
                grown = kv.stats().bytes_reserved - reserved
                assert grown <= reserved // 2
                assert needed < grown + reserved // 4 + 20_000, "beyond what is added, one array of one layer"
        assert kv.stats().growths <= 8, "growth is geometric"
        assert {layer.offset for layer in cache} == {4096}


def test_r06_out_of_memory_fails_one_request_and_the_others_finish(small: Any) -> None:
    own = [KVCache() for _ in small.layers]
    expected = [greedy(small, prompt(6, seed=seed), 8, cache=copy.deepcopy(own)) for seed in range(3)]
    with tinykv.attach(small, page_size=4, max_pages=8) as kv:
        first, second = make_prompt_cache(small), make_prompt_cache(small)
        found: list[list[int]] = [[], []]
        for number, cache in enumerate((first, second)):
            logits(small, prompt(6, seed=number)[:-1], cache)
        tokens = [prompt(6, seed=number)[-1] for number in range(2)]
        for step in range(8):
            for number, cache in enumerate((first, second)):
                tokens[number] = int(logits(small, [tokens[number]], cache)[-1].argmax())
                found[number].append(tokens[number])
            if step == 3:
                third = make_prompt_cache(small)
                before = kv.stats()
                for _ in range(2):
                    with pytest.raises(OutOfPagesError, match="9 needed, 2 free of 8") as caught:
                        logits(small, prompt(33), third)
                    assert isinstance(caught.value, MemoryError)
                    assert (caught.value.needed, caught.value.free, caught.value.total) == (9, 2, 8)
                assert kv.stats() == before
                assert third[0].empty()
                kv.check()
        assert found == expected[:2]
        del first, second, cache
        assert greedy(small, prompt(6, seed=2), 8, cache=third) == expected[2], "the request that failed can go on"
        kv.check()


def test_r06_a_request_that_fails_while_it_grows_keeps_its_tokens(small: Any) -> None:
    with tinykv.attach(small, page_size=4, max_pages=8) as kv:
        cache = make_prompt_cache(small)
        for token in prompt(32):
            logits(small, [token], cache)
        held = [side.tolist() for layer in cache for side in layer.keys_and_values()]
        with pytest.raises(OutOfPagesError):
            logits(small, [1], cache)
        assert {layer.offset for layer in cache} == {32}
        assert [side.tolist() for layer in cache for side in layer.keys_and_values()] == held
        for layer in cache:
            layer.trim(5)
        logits(small, [1], cache)
        kv.check()


def test_r06_a_copy_that_can_not_be_written_leaves_the_original(small: Any) -> None:
    with tinykv.attach(small, page_size=4, max_pages=3) as kv:
        cache = make_prompt_cache(small)
        logits(small, prompt(10), cache)
        fork = copy.deepcopy(cache)
        with pytest.raises(OutOfPagesError, match="1 needed, 0 free of 3"):
            logits(small, [1], fork)
        with pytest.raises(OutOfPagesError):
            logits(small, [1], cache)
        kv.check()
        del fork
        logits(small, [1], cache)
        assert kv.stats().cow_copies == 0
        assert {layer.offset for layer in cache} == {11}


def test_r09_metadata_costs_the_same_after_twenty_thousand_updates(small: Any) -> None:
    with tinykv.attach(small, page_size=32) as kv:
        cache = make_prompt_cache(small)
        batch = [layer.merge([layer, layer]) for layer in cache]
        kv.session.layers[0].pages = kv.session.layers[0].pages
        append(cache, 1)

        def metadata() -> float:
            """Seconds to evaluate what attention asks about the step, right after it."""
            keys, _ = cache[0].update_and_fetch(one, one)
            cache[1].update_and_fetch(one, one)
            start = time.perf_counter()
            mx.eval(keys.metadata.block_table, keys.metadata.context_lens, keys.metadata.slot_mapping, batch[0].offset)
            return time.perf_counter() - start

        one = mx.ones((1, 2, 1, 16))
        early = min(metadata() for _ in range(20))
        for number in range(10_000):
            for layer in cache:
                layer.update_and_fetch(one, one)
            if number % 500 == 0:
                mx.eval([layer.state for layer in cache])
        late = min(metadata() for _ in range(20))
        assert late < 10 * early + 0.002
        assert {layer.offset for layer in cache} == {10_041}


def test_r18_every_page_comes_back_after_two_hundred_requests(small: Any) -> None:
    windowed = shared("gemma3_text", num_hidden_layers=2)
    for model in (small, windowed):
        with tinykv.attach(model, page_size=4, max_pages=200) as kv:
            for number in range(100):
                cache = make_prompt_cache(model, max_kv_size=16 if number % 7 == 0 else None)
                logits(model, prompt(number % 23 + 1), cache)
                fork = copy.deepcopy(cache) if number % 2 else [copy.deepcopy(layer) for layer in cache]
                logits(model, [3, 4], fork)
                if number % 3 == 0:
                    trim_prompt_cache(fork, 2)
                if number % 5 == 0:
                    cache[0].update_and_fetch(*[mx.zeros((1, 2, 1, 16))] * 2)  # a pass that breaks off
                if number % 4 == 0:
                    del fork
                assert adds_up(kv)
                del cache
                assert adds_up(kv)
                kv.check()
            fork = None
            assert kv.stats().pages_used == kv.stats().sequences == 0
            assert kv.stats().pages_free == kv.stats().pages_total


def test_r18_requests_that_raised_give_their_pages_back(small: Any) -> None:
    def broken(tokens: Any, logits: mx.array) -> mx.array:
        raise ArithmeticError("a sampler that fails")

    with tinykv.attach(small, page_size=4) as kv:
        for _ in range(5):
            with pytest.raises(ArithmeticError):
                greedy(small, prompt(9), 5, logits_processors=[broken])
        gc.collect()  # the exceptions' frames are cycles
        assert kv.stats().pages_used == 0


@pytest.mark.parametrize("setting", ["max_pages", "memory"])
@pytest.mark.parametrize(("kind", "layers"), [("llama", 4), ("gemma3_text", 4), ("falcon_h1", 2)])
def test_r68_the_message_names_the_limit_and_what_would_fit(kind: str, layers: int, setting: str) -> None:
    model = shared(kind)

    def run(limit: int) -> None:
        with tinykv.attach(model, page_size=4, **{setting: limit}) as kv:
            cache = make_prompt_cache(model)
            logits(model, prompt(14), cache)
            logits(model, prompt(80), cache)
            kv.check()

    limit = 9 if setting == "max_pages" else 9 * 4 * TOKEN_BYTES * layers
    with pytest.raises(OutOfPagesError) as caught:
        run(limit)
    message = str(caught.value)
    assert "\n" not in message
    assert f"the limit is {setting}" in message
    assert "max_kv_size" in message
    flag, value = re.search(r"--kv-(\S+) (\d+) \(", message).groups()  # type: ignore[union-attr]
    assert flag.replace("-", "_") == setting == caught.value.setting
    with pytest.raises(OutOfPagesError):
        run(int(value) - 1)
    run(int(value))
