"""Many clients at once: everybody gets what they would get alone, however little room there is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import Server, wait_until, words

Serve = Callable[..., Server]
Stock = Callable[..., Server]
Together = Callable[..., list[Any]]


def test_32_clients_at_once(serve: Serve, stock: Stock, together: Together) -> None:
    server = serve()
    prompts = [words(1 + 5 * number % 60, number) for number in range(32)]
    expected = [stock().complete(prompt) for prompt in prompts]

    def ask(number: int) -> str:
        if number % 2:
            return server.complete(prompts[number])
        stream = server.client.completions.create(
            model="default_model", prompt=prompts[number], max_tokens=24, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    assert together(ask, range(32)) == expected
    assert server.stats()["requests"] == {"finished": 32, "cancelled": 0, "refused": 0, "failed": 0}


@pytest.mark.parametrize(
    ("kind", "on_full"),
    [("llama", "preempt"), ("llama", "wait"), ("gemma3_text", "preempt"), ("qwen3_next", "preempt")],
)
def test_a_budget_for_few(serve: Serve, together: Together, no_stops: None, kind: str, on_full: str) -> None:
    """About three of the twelve fit at a time."""
    solo = serve(kind, prompt_cache_size=0)
    prompts = [words(2 + 7 * number % 30, number) for number in range(12)]
    expected = [solo.complete(prompt) for prompt in prompts]
    server = serve(kind, max_pages=40, on_full=on_full, decode_concurrency=12, prompt_concurrency=12)
    answers = together(lambda number: server.complete(prompts[number], seed=1 if number == 7 else None), range(12))
    del answers[7], expected[7]  # seeded requests are greedy, too, but served by other code
    assert answers == expected
    wait_until(server.idle)
    stats = server.stats()
    assert stats["requests"] == {"finished": 12, "cancelled": 0, "refused": 0, "failed": 0}
    assert stats["pools"]["main"]["peak_pages_used"] <= 40 * (2 if kind == "gemma3_text" else 1)
    if (kind, on_full) == ("llama", "preempt"):
        assert stats["work"]["preemptions"] > 0
        assert stats["prompt_tokens"]["recomputed"] > 0
    if on_full == "wait":
        assert stats["work"]["preemptions"] == 0


def test_stored_prompts_give_way_first(serve: Serve, together: Together, no_stops: None) -> None:
    """They fill the budget, but nobody is preempted, waits or fails because of them."""
    server = serve(max_pages=40, prompt_cache_size=100)
    for number in range(12):
        server.complete(words(20, number), max_tokens=4)
    stats = server.stats()
    assert stats["stored_prompts"] > 1
    assert stats["evicted_prompts"] > 0
    assert stats["pools"]["main"]["pages_cached"] > 15
    # Forty pages: four requests of forty tokens.
    answers = together(lambda number: server.complete(words(20, 20 + number), max_tokens=20), range(4))
    assert all(isinstance(answer, str) for answer in answers), answers
    # One that needs them all, served alone.
    assert server.complete(words(100, 50), max_tokens=59, seed=1)
    stats = server.stats()
    assert stats["work"]["preemptions"] == 0
    assert stats["requests"] == {"finished": 17, "cancelled": 0, "refused": 0, "failed": 0}


def test_prompts_found_for_those_who_wait_keep_no_pages_from_those_who_run(
    serve: Serve, together: Together, no_stops: None
) -> None:
    server = serve(max_pages=26, prompt_cache_size=100, decode_concurrency=8, prompt_concurrency=8)
    prompts = [words(20, number) for number in range(4)]
    expected = [server.complete(prompt, max_tokens=60) for prompt in prompts]
    for _ in range(2):
        for prompt in prompts:
            server.complete(prompt, max_tokens=1)
        assert together(lambda number: server.complete(prompts[number], max_tokens=60), range(4)) == expected


def test_another_model_waits_for_those_who_use_the_first(
    serve: Serve, together: Together, model_dir: Callable[..., Path]
) -> None:
    server = serve()
    folders = [str(model_dir("llama")), str(model_dir("llama", seed=8)), str(model_dir("llama", num_hidden_layers=2))]
    folders += ["default_model"]

    def ask(number: int, folder: str) -> str:
        answer = server.client.completions.create(model=folder, prompt=words(9, number), max_tokens=12)
        return str(answer.choices[0].text)

    requests = [(number, folders[number % 4]) for number in range(8)]
    expected = [ask(*request) for request in requests]
    # The first model by its path is the one loaded at the start.
    assert len({ask(0, folder) for folder in folders}) == 3
    assert together(lambda request: ask(*request), requests) == expected


def test_a_model_that_is_exchanged_goes_with_its_pages(serve: Serve, model_dir: Callable[..., Path]) -> None:
    server = serve()
    server.complete(words(9))
    first = weakref.ref(server.attached.pop().session)
    assert server.stats()["stored_prompts"] > 0
    server.client.completions.create(model=str(model_dir("llama", seed=8)), prompt=words(9), max_tokens=2)
    gc.collect()
    assert first() is None
    assert server.stats()["stored_prompts"] == 1


def test_served_alone_or_together_in_any_order(serve: Serve, together: Together) -> None:
    server = serve()
    prompts = [words(9, number) for number in range(12)]
    expected = [server.complete(prompt) for prompt in prompts]

    def ask(number: int) -> str:
        return server.complete(prompts[number], seed=5 if number % 3 == 0 else None)

    for _ in range(2):
        assert together(ask, range(12)) == expected
