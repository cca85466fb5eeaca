"""R38: clients that hang up, in whatever phase their request is, leave nothing behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from served import Server, read_until, request, wait_until, words

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


@pytest.fixture
def slow(serve: Serve, no_stops: None) -> Server:
    """A server whose prompts take many steps and whose answers never stop; it stores nothing and serves two at once."""
    return serve(prefill_step_size=4, prompt_cache_size=0, decode_concurrency=2, prompt_concurrency=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["batched", "alone"])
def test_every_phase(slow: Server, stream: bool, options: dict[str, Any]) -> None:
    before = slow.generator.state().pools["main"].pages_used
    long = words(400)

    def tokens() -> int:
        return int(slow.generator.metrics.counts()["work"]["generated_tokens"])

    def state() -> Any:
        return slow.generator.state()

    # In its prompt.
    with request(slow, long, stream=stream, **options) as connection:
        if stream:
            read_until(connection, b": keepalive")
        wait_until(lambda: state().pools["main"].tokens > 20)
    wait_until(slow.idle)
    assert tokens() == 0
    # In its answer.
    with request(slow, words(5), stream=stream, **options) as connection:
        if stream:
            read_until(connection, b"data: ")
        wait_until(lambda: tokens() > 5)
    wait_until(slow.idle)
    assert tokens() < 2900
    # In the queue, behind two others: one of those that wait stays.
    with request(slow, words(5)) as first, request(slow, words(6)):
        wait_until(lambda: state().running == 2)
        with request(slow, words(7), max_tokens=3) as patient:
            with request(slow, long, stream=stream, **options):
                wait_until(lambda: state().waiting == 2)
            wait_until(lambda: state().waiting == 1)
            assert state().running == 2
            first.close()
            assert b"200 OK" in read_until(patient, b"completion_tokens")
    wait_until(slow.idle)
    # After its end.
    with request(slow, words(5), stream=stream, max_tokens=3, **options) as connection:
        read_until(connection, b"[DONE]" if stream else b"completion_tokens")
    wait_until(slow.idle)
    assert state().pools["main"].pages_used == before == 0
    assert slow.stats()["requests"] == {"finished": 2, "cancelled": 5, "refused": 0, "failed": 0}


def test_r38_a_hundred_at_random(slow: Server, together: Together) -> None:
    before = slow.stats()["pools"]["main"]["pages_used"]
    expected = slow.complete(words(9), max_tokens=20)

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(10):
            options: dict[str, Any] = {"seed": 1} if chance.random() < 0.1 else {}
            count = chance.choice([5, 50, 200])
            with request(slow, words(count, seed), stream=chance.random() < 0.5, **options):
                time.sleep(chance.random() * 0.15)

    *left, stayed = together(lambda n: slow.complete(words(9), max_tokens=20) if n == 10 else come_and_go(n), range(11))
    assert left == [None] * 10
    assert stayed == expected
    wait_until(slow.idle)
    stats = slow.stats()
    assert stats["requests"] == {"finished": 2, "cancelled": 100, "refused": 0, "failed": 0}
    assert stats["pools"]["main"]["pages_used"] == before == 0
    assert slow.complete(words(9), max_tokens=20) == expected
