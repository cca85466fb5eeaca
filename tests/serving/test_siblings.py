"""Clients whose prompts begin alike, some of whom leave in theirs; and a server that is started again."""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import ARGUMENTS, Server, request, start_paged, wait_until, words

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_r20_siblings_of_whom_some_leave_in_their_prompt(serve: Serve, together: Together, kind: str) -> None:
    """Whoever leads may go at any moment: the others go on with what was stored, and answer as if alone."""
    server = serve(kind, prefill_step_size=16)
    trunk = words(300)
    prompts = [f"{trunk} {words(4 + number, number + 1)}" for number in range(8)]
    cold = serve(kind, prefix_cache=0)
    expected = [cold.complete(prompt, max_tokens=8) for prompt in prompts]

    def ask(number: int) -> str | None:
        if number % 2:
            return server.complete(prompts[number], max_tokens=8)
        chance = random.Random(number)
        with request(server, prompts[number], max_tokens=8):
            time.sleep(chance.random() * 0.3)
        return None

    found = together(ask, range(8))
    assert found == [answer if number % 2 else None for number, answer in enumerate(expected)]
    wait_until(server.idle)
    tokens = server.stats()["prompt_tokens"]
    # Whoever left may have run a part for nobody, the common beginning was run once.
    assert tokens["computed"] + tokens["recomputed"] < 2 * 300
    kv = server.attached[0]
    kv.check()
    assert kv.stats().pages_used == 0
    assert server.complete(prompts[0], max_tokens=8) == expected[0]


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["batched", "alone"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba"])
def test_a_server_that_starts_again_finds_its_prompts(
    model_dir: Callable[..., Path], tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    prompts = [words(42), f"{words(42)} {words(5, 1)}"]
    answers, reused = [], []
    for prompt in (prompts[0], *prompts):
        arguments = argparse.Namespace(model=str(model_dir(kind)), **ARGUMENTS)
        server, stop = start_paged(arguments, prefix_dir=str(tmp_path))
        answers.append(server.complete(prompt, max_tokens=8, **fields))
        reused.append(server.stats()["prompt_tokens"]["reused"])
        stop()
    assert answers[0] == answers[1]
    # Full pages; and recurrent layers where they were stored, at the prompt's end.
    assert reused[0] == 0
    assert min(reused[1:]) >= 40


def test_another_model_and_back_finds_its_prompts(serve: Serve, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A model that is let go has written what was run; nothing of it is left behind."""
    server = serve(prefix_dir=str(tmp_path))
    server.attached.clear()  # or the first model would stay
    names = ["default_model", str(model_dir("llama", seed=8))]
    answers = []
    for turn in range(4):
        answer = server.client.completions.create(model=names[turn % 2], prompt=words(21), max_tokens=8)
        answers.append((answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens))
    (first, _), (second, _) = answers[:2]
    assert answers == [(first, 0), (second, 0), (first, 20), (second, 20)]

    def writers() -> int:
        return sum(thread.name == "tinykv-prefix-store" for thread in threading.enumerate())

    wait_until(lambda: writers() == 1, what="the writers of models that are gone to end")
