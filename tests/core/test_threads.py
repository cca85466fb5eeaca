"""Threads take turns with a model; one that ends in the middle of a step leaves the model to the others."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import greedy, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_a_thread_that_ended_in_the_middle_of_a_step(kind: str, attention: str, tmp_path: Path) -> None:
    model = shared(kind)
    expected = greedy(model, prompt(9), 6)
    with tinykv.attach(model, page_size=4, attention=attention) as kv:
        cache, empty = make_prompt_cache(model), make_prompt_cache(model)
        greedy(model, prompt(20), 3, cache=cache)
        kv.prefix_cache.insert(prompt(20), copy.deepcopy(cache))
        in_thread(functools.partial(model, mx.array([prompt(5)]), cache=cache))  # nothing is evaluated
        lost = "never computed: the thread that ran the model ended .*make a new prompt cache"
        with pytest.raises(CacheStateError, match=lost):
            greedy(model, prompt(3), 3, cache=cache)
        kv.check()
        with pytest.raises(CacheStateError, match=lost):
            model(mx.array([[1]]), cache=copy.deepcopy(cache))
        with pytest.raises(CacheStateError, match=lost):
            tinykv.save_prompt_cache(str(tmp_path / "lost.safetensors"), cache)
        for fresh in (empty, make_prompt_cache(model)):
            assert greedy(model, prompt(9), 6, cache=fresh) == expected
        assert kv.prefix_cache.fetch(prompt(20))[1] == prompt(20)
        if kind == "llama":  # what is emptied can be used again
            assert len({layer.trim(100) for layer in cache}) == 1
            assert greedy(model, prompt(9), 6, cache=cache) == expected
        kv.check()
        cache = empty = fresh = None
        kv.prefix_cache.clear()
        assert kv.stats().pages_used == 0


def test_a_thread_that_lives_is_waited_for() -> None:
    model = shared("llama")
    expected = greedy(model, prompt(9), 6)
    begun, go_on = threading.Event(), threading.Event()
    with tinykv.attach(model, page_size=4):
        cache = make_prompt_cache(model)
        answers: list[list[int]] = []

        def work() -> None:
            out = model(mx.array([prompt(8)]), cache=cache)
            begun.set()
            go_on.wait(60)
            mx.eval(out)
            answers.append(greedy(model, prompt(9)[8:], 6, cache=cache))

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(60)
        with pytest.raises(CacheStateError, match="another thread is in the middle of a step"):
            greedy(model, prompt(9), 6)
        go_on.set()
        thread.join()
        assert answers == [expected]
        assert greedy(model, prompt(9), 6) == expected


def test_threads_one_after_the_other_lose_nothing() -> None:
    model = shared("llama")
    expected = greedy(model, prompt(9), 6)
    with tinykv.attach(model, page_size=4):
        cache = make_prompt_cache(model)
        in_thread(lambda: mx.eval(model(mx.array([prompt(8)]), cache=cache)))
        answers: list[list[int]] = []
        in_thread(lambda: answers.append(greedy(model, prompt(9)[8:], 6, cache=cache)))
        assert answers == [expected]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("attention", ["gather", "auto"])
def test_a_thread_that_ended_after_a_part_of_a_prompt(
    kind: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    """mlx-lm evaluates the K/V of a prompt's chunk, not what attention makes of the last layer's."""
    model = shared(kind)
    tokens = prompt(20)
    expected = greedy(model, tokens, 6)
    with tinykv.attach(model, page_size=4, attention=attention) as kv:

        def work() -> None:
            cache = make_prompt_cache(model)
            model(mx.array([tokens[:16]]), cache=cache)
            mx.eval([layer.state for layer in cache])
            kv.prefix_cache.insert(tokens[:16], cache)

        in_thread(work)
        cache, rest = kv.prefix_cache.fetch(tokens)
        assert rest == tokens[16:]
        assert greedy(model, rest, 6, cache=cache) == expected
        kv.check()
    assert "a thread ended" not in caplog.text
