"""Faults that users met in other caches, as tests: shared pages that change, stale numbers, threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache
from models import batched, greedy, largest_difference, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.attachment import Attachment
from tinykv_plugin.errors import CacheStateError


@pytest.fixture
def small() -> Any:
    return shared("llama", num_hidden_layers=2)


def page_bits(kv: Attachment, cache: list[Any]) -> list[bytes]:
    """What is in the pages that ``cache`` lists, unused slots included."""
    found = []
    for layer in cache:
        pages = layer._layer.pages
        for page in layer._row.tables[layer._layer.group].live_pages():
            found += [np.array(side[page]).tobytes() for side in (pages.keys, pages.values)]
    return found


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("page_size", [4, 8, 32])
def test_r16_a_stored_prefix_is_not_changed_by_who_fetched_it(kind: str, page_size: int) -> None:
    model = shared(kind)
    start = prompt(22)
    with tinykv.attach(model, page_size=page_size) as kv:
        store = LRUPromptCache()
        cache = make_prompt_cache(model)
        logits(model, start, cache)
        store.insert_cache("model", start, cache)
        stored = page_bits(kv, cache)
        # Another user's text: all of the prefix, then a part of it, which is rewound.
        for tokens in ([*start, 1, 2, 3, 4, 5], [*start[:17], 91, 92, 93, 94, 95]):
            fetched, rest = store.fetch_nearest_cache("model", tokens)
            assert fetched is not None
            assert len(rest) == 5
            mine = logits(model, rest, fetched)
            for token in range(6):
                logits(model, [token], fetched)
            own = [KVCache() for _ in model.layers] if kind == "llama" else type(model).make_cache(model)
            assert largest_difference(mine, logits(model, tokens, own)[-5:]) < 1e-4
            assert page_bits(kv, cache) == stored, "the stored pages changed"
            kv.check()


@pytest.mark.parametrize("first_to_go", ["original", "copy"])
def test_r17_a_copy_survives_the_end_of_its_source(first_to_go: str, small: Any) -> None:
    expected = greedy(small, [*prompt(10), 7], 20)
    with tinykv.attach(small, page_size=4) as kv:
        cache = make_prompt_cache(small)
        logits(small, prompt(10), cache)
        fork = copy.deepcopy(cache)
        left, gone = (fork, cache) if first_to_go == "original" else (cache, fork)
        if first_to_go == "original":
            logits(small, [3], gone)  # the copied page is the one that goes on; the source keeps the old one
        del cache, fork, gone
        assert kv.stats().pages_used == 3
        # Somebody else takes every page that is free.
        other = make_prompt_cache(small)
        logits(small, prompt(200, seed=4), other)
        assert greedy(small, [7], 20, cache=left) == expected
        kv.check()


def test_r50_no_attribute_sends_our_caches_to_quantized_attention(small: Any) -> None:
    with tinykv.attach(small):
        for cache in (make_prompt_cache(small)[0], make_prompt_cache(small)[0].merge([make_prompt_cache(small)[0]])):
            for name in ("bits", "group_size", "__len__", "__bool__"):
                assert not hasattr(cache, name), name
            for name in ("update_and_fetch", "offset", "state", "size", "empty", "nbytes", "is_trimmable", "trim"):
                assert hasattr(cache, name), name
        # mlx-lm's own kv_bits can't change the pages' format: it isn't ignored in silence.
        with pytest.raises(CacheStateError, match=r"kv_bits=8, .* hold float32; set bits .* \(--kv-bits 8 "):
            greedy(small, prompt(9), 5, kv_bits=8, quantized_kv_start=0)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_r62_stale_nan_in_a_reused_page_reaches_nothing(kind: str) -> None:
    model = shared(kind)
    prompts = [prompt(9), prompt(21, seed=1), prompt(2, seed=2)]
    expected = [greedy(model, tokens, 10, prefill_step_size=6) for tokens in prompts]
    limited = greedy(model, prompts[1], 10)
    with tinykv.attach(model, page_size=8) as kv:

        def poison() -> None:
            """Leave NaN in every slot of pages that the next requests get."""
            cache = make_prompt_cache(model)
            for layer in cache:
                spec = layer._layer.spec
                for_each = (1, spec.kv_heads, 200)
                layer.update_and_fetch(
                    mx.full((*for_each, spec.key_dim), mx.nan), mx.full((*for_each, spec.value_dim), mx.nan)
                )
            mx.eval([layer.state for layer in cache])
            del cache, layer
            assert kv.stats().pages_used == 0

        greedy(model, prompts[0], 1)
        for tokens, own in zip(prompts, expected, strict=True):
            poison()
            assert greedy(model, tokens, 10, prefill_step_size=6) == own
        poison()
        assert batched(model, prompts, 10) == expected
        poison()
        cache = make_prompt_cache(model)
        out = logits(model, prompts[1], cache)
        fork = copy.deepcopy(cache)
        assert mx.isfinite(out).all()
        assert greedy(model, [limited[0]], 5, cache=fork) == limited[1:6]
        for keys in (side for layer in cache for side in layer.keys_and_values()):
            assert mx.isfinite(keys).all()
        kv.check()


def in_thread(run: Callable[[], Any]) -> Any:
    """What ``run`` returns, or the exception it raises, in a thread of its own."""
    found: list[Any] = []

    def target() -> None:
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert found, "the thread hangs"
    return found[0]


@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_r56_a_cache_filled_in_one_thread_goes_on_in_another(kind: str, attention: str) -> None:
    model = shared(kind)
    expected = greedy(model, prompt(20), 12)
    with tinykv.attach(model, page_size=4, attention=attention) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(20)[:-1], cache)
        assert in_thread(lambda: greedy(model, prompt(20)[-1:], 12, cache=copy.deepcopy(cache))) == expected
        # Back in this thread, and once more in a third.
        assert greedy(model, prompt(20)[-1:], 12, cache=copy.deepcopy(cache)) == expected
        in_thread(kv.check)
        assert in_thread(lambda: greedy(model, prompt(20)[-1:], 12, cache=cache)) == expected
        kv.check()


def test_r56_what_prefill_left_unevaluated_is_finished_or_named(small: Any) -> None:
    with tinykv.attach(small, page_size=4) as kv:
        cache = make_prompt_cache(small)
        out = small(mx.array([prompt(20)]), cache=cache)
        error = in_thread(lambda: logits(small, [1], cache))
        assert isinstance(error, CacheStateError)
        assert "another thread is in the middle of a step" in str(error)
        assert {layer.offset for layer in cache} == {20}
        mx.eval(out)
        found = in_thread(lambda: logits(small, [1], cache))
        assert largest_difference(found, logits(small, [*prompt(20), 1], make_prompt_cache(small))[-1:]) < 1e-4
        kv.check()


def test_r56_two_threads_take_turns_on_one_model(small: Any) -> None:
    expected = [greedy(small, prompt(12, seed=seed), 30) for seed in range(2)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    found: list[list[int]] = [[], []]
    failures: list[Exception] = []
    with tinykv.attach(small, page_size=4) as kv:
        caches = [make_prompt_cache(small) for _ in range(2)]

        def work(me: int) -> None:
            try:
                tokens = prompt(12, seed=me)
                for _ in range(30):
                    assert turns[me].acquire(timeout=60)
                    tokens = [int(logits(small, tokens, caches[me])[-1].argmax())]
                    found[me] += tokens
                    kv.check()
                    turns[1 - me].release()
            except Exception as error:
                failures.append(error)
                turns[1 - me].release()

        threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert found == expected
        kv.check()


class Paused:
    """An MLP that lets another thread run before it goes on."""

    def __init__(self, mlp: Any, meanwhile: Callable[[], Any], before: Callable[[mx.array], Any] = id) -> None:
        self.mlp = mlp
        self.meanwhile: Callable[[], Any] | None = meanwhile
        self.before = before
        self.result: Any = None

    def __call__(self, x: mx.array) -> mx.array:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            self.before(x)
            self.result = in_thread(meanwhile)
        return self.mlp(x)  # type: ignore[no-any-return]


def test_r56_a_thread_that_comes_in_the_middle_of_a_step_is_told_so(small: Any) -> None:
    expected = greedy(small, prompt(12), 10)
    block = small.model.layers[0]
    mlp = block.mlp
    with tinykv.attach(small, page_size=4) as kv:
        mine, theirs = make_prompt_cache(small), make_prompt_cache(small)
        block.mlp = Paused(mlp, lambda: logits(small, prompt(5), theirs))
        try:
            first = logits(small, prompt(12), mine)
            error = block.mlp.result
        finally:
            block.mlp = mlp
        assert isinstance(error, CacheStateError)
        assert "another thread is in the middle of a step of this model" in str(error)
        assert theirs[0].empty()
        token = int(first[-1].argmax())
        assert [token, *greedy(small, [token], 9, cache=mine)] == expected, "the first one isn't affected"
        assert in_thread(lambda: greedy(small, prompt(5), 3, cache=theirs)) == greedy(small, prompt(5), 3)
        kv.check()


def test_r56_a_step_that_another_one_got_in_between_is_told_so_and_can_be_repeated(small: Any) -> None:
    expected = greedy(small, prompt(12), 10)
    block = small.model.layers[0]
    mlp = block.mlp
    lazy, finish = threading.Event(), threading.Event()
    with tinykv.attach(small, page_size=4) as kv:
        mine, theirs = make_prompt_cache(small), make_prompt_cache(small)

        def come_between() -> None:
            out = small(mx.array([prompt(5)]), cache=theirs)
            lazy.set()
            assert finish.wait(60)
            mx.eval(out)

        other = threading.Thread(target=come_between)

        def start_other() -> None:
            other.start()
            assert lazy.wait(60)

        # Everything of the first layer is evaluated, so the other thread finds nothing pending and goes ahead.
        block.mlp = Paused(mlp, start_other, before=lambda x: mx.eval(x, [layer.state for layer in mine]))
        try:
            with pytest.raises(CacheStateError, match="another thread is in the middle of a step"):
                logits(small, prompt(12), mine)
        finally:
            block.mlp = mlp
            finish.set()
            other.join(60)
        assert theirs[0].offset == 5
        assert greedy(small, prompt(12), 10, cache=mine) == expected
        kv.check()


def test_r56_statistics_and_checks_from_another_thread_disturb_no_step(small: Any) -> None:
    expected = greedy(small, prompt(12), 10)
    block = small.model.layers[0]
    mlp = block.mlp
    with tinykv.attach(small, page_size=4) as kv:
        mine = make_prompt_cache(small)
        block.mlp = Paused(mlp, lambda: (kv.check(), kv.stats()))
        try:
            first = logits(small, prompt(12), mine)
            result = block.mlp.result
        finally:
            block.mlp = mlp
        assert result[1].pages_used == 3
        assert result[1].tokens == 0
        token = int(first[-1].argmax())
        assert [token, *greedy(small, [token], 9, cache=mine)] == expected


def test_caches_dropped_in_another_thread_give_their_pages_back(small: Any) -> None:
    with tinykv.attach(small, page_size=4) as kv:
        boxes = [[make_prompt_cache(small)] for _ in range(20)]
        for box in boxes:
            logits(small, prompt(9), box[0])
        assert kv.stats().pages_used == 60

        def drop() -> None:
            for box in boxes:
                box.clear()

        in_thread(lambda: (drop(), True))
        assert kv.stats().pages_used == 0
        kv.check()
