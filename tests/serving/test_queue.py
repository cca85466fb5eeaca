"""A bounded queue: who comes when it is full is sent away at once, and told when to come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from served import Server, request, wait_until, words

from tinykv_plugin.errors import QueueFullError
from tinykv_plugin.serving.line import WaitingLine
from tinykv_plugin.serving.metrics import ServerMetrics, ServerState

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    """Connections to keep open for a while."""
    with ExitStack() as stack:
        yield stack


def assert_sent_away(server: Server, waiting: int, allowed: int, **fields: Any) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        server.complete(words(9), **fields)
    error = caught.value
    assert error.status_code == 429
    assert int(error.response.headers["Retry-After"]) >= 1
    assert error.body["type"] == "rate_limit_error"
    assert error.body["code"] == "queue_full"
    assert f"{waiting} requests are waiting, --kv-max-queue {allowed} allows no more" in error.body["message"]


def test_a_full_queue(serve: Serve, crowd: ExitStack, no_stops: None) -> None:
    server = serve(max_queue=2, decode_concurrency=1, prompt_concurrency=1)
    running = crowd.enter_context(request(server, words(5)))
    wait_until(lambda: server.generator.state().running == 1)
    for count in (1, 2):
        crowd.enter_context(request(server, words(6, count), max_tokens=2))
        wait_until(lambda count=count: server.generator.state().waiting == count)
    for stream in (False, True):
        assert_sent_away(server, 2, 2, stream=stream)
    assert server.generator.state().waiting == 2
    assert server.stats()["requests"]["refused"] == 2
    running.close()
    wait_until(server.idle)
    assert server.complete(words(9), max_tokens=2)
    assert server.stats()["requests"] == {"finished": 3, "cancelled": 1, "refused": 2, "failed": 0}


def test_whoever_leaves_the_queue_makes_a_place(serve: Serve, crowd: ExitStack, no_stops: None) -> None:
    server = serve(max_queue=1, decode_concurrency=1, prompt_concurrency=1)
    crowd.enter_context(request(server, words(5)))
    wait_until(lambda: server.generator.state().running == 1)
    for _ in range(3):
        with request(server, words(6)):
            wait_until(lambda: server.generator.state().waiting == 1)
            assert_sent_away(server, 1, 1)
        wait_until(lambda: server.generator.state().waiting == 0)


def test_a_queue_behind_a_request_served_alone(serve: Serve, crowd: ExitStack, no_stops: None) -> None:
    server = serve(max_queue=1)
    crowd.enter_context(request(server, words(5), seed=1))
    wait_until(lambda: server.generator.state().running == 1)
    crowd.enter_context(request(server, words(5), max_tokens=2))
    wait_until(lambda: server.generator.state().waiting == 1)
    assert_sent_away(server, 1, 1)


def test_a_queue_for_pages(serve: Serve, together: Together, crowd: ExitStack, no_stops: None) -> None:
    # Twenty pages of four tokens: a request of 70 tokens fits, and no other beside it.
    server = serve(max_queue=2, max_pages=20, on_full="wait")
    crowd.enter_context(request(server, words(20), max_tokens=50))
    wait_until(lambda: server.generator.state().running == 1)
    answers = together(lambda n: server.complete(words(20, n), max_tokens=5), range(1, 9))
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert all(isinstance(answer, str) or answer in refused for answer in answers)
    # All came while the first one was running, unless this machine was very slow.
    assert 1 <= len(refused) <= 6


def test_who_can_start_at_once_needs_no_place(serve: Serve, together: Together) -> None:
    server = serve(max_queue=1)
    for seed in range(5):
        answers = together(lambda n, seed=seed: server.complete(words(9, 8 * seed + n)), range(8))
        assert all(isinstance(answer, str) for answer in answers), answers


# The line itself -----------------------------------------------------------------------------------------------------


@pytest.fixture
def line() -> WaitingLine:
    return WaitingLine(3, ServerMetrics(ServerState), lambda: True)


def test_first_come_first_served(line: WaitingLine) -> None:
    line.publish(0)
    tickets = [line.join(f"request {number}", None) for number in range(3)]
    with pytest.raises(QueueFullError) as caught:
        line.join("one more", None)
    assert (caught.value.waiting, caught.value.max_queue, caught.value.retry_after) == (3, 3, 1)
    tickets[1].cancel()
    assert [line.take(), line.take(), line.take()] == [tickets[0], tickets[2], None]
    assert tickets[1].outcome == "cancelled"
    line.give_back(tickets[2])
    assert line.take() is tickets[2]


def test_a_request_waits_until_it_starts(line: WaitingLine) -> None:
    line.publish(0)
    for _ in range(3):
        line.join("request", None)
    first = line.take()
    assert first is not None
    with pytest.raises(QueueFullError):
        line.join("one more", None)
    first.start()
    line.join("one more", None)
    assert line.alive == 4


def test_the_youngest_are_sent_away_if_fewer_can_start_than_was_thought(line: WaitingLine) -> None:
    line.publish(3)
    tickets = [line.join(f"request {number}", None) for number in range(6)]
    taken = [line.take() for _ in range(2)]
    line.publish(1)
    assert [ticket.outcome for ticket in tickets] == [None] * 4 + ["refused"] * 2
    line.publish(0)
    assert [ticket.outcome for ticket in tickets] == [None] * 3 + ["refused"] * 3
    assert taken == tickets[:2]
    assert line.take() is tickets[2]
    assert line.take() is None
    with pytest.raises(QueueFullError):
        tickets[5].open()


def test_retry_after_follows_the_time_between_starts(line: WaitingLine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def retry_after() -> int:
        tickets = [line.join("request", None) for _ in range(3)]
        with pytest.raises(QueueFullError) as caught:
            line.join("one more", None)
        for ticket in tickets:
            ticket.cancel()
        return caught.value.retry_after

    line.publish(0)
    assert retry_after() == 1
    for _ in range(40):
        line.join("request", None).start()
        now[0] += 7
    assert retry_after() == 7
    now[0] += 100_000
    assert retry_after() == 600


def test_a_line_that_closes_sends_everybody_home(line: WaitingLine) -> None:
    waiting, running = line.join("request", None), line.join("request", None)
    running.start()
    line.close()
    assert waiting.outcome == "cancelled"
    assert running.over
    with pytest.raises(RuntimeError, match="stopping"):
        line.join("request", None)
