"""The server's numbers agree with what happened."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from served import Server, request, wait_until, words

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


def test_counters(serve: Serve, together: Together, no_stops: None) -> None:
    server = serve(max_pages=60)
    server.complete(words(20), max_tokens=10)
    server.complete(words(20), max_tokens=10)
    together(lambda n: server.complete(words(11, n), max_tokens=10, seed=n if n == 3 else None), range(1, 5))
    with pytest.raises(openai.BadRequestError):
        server.complete(words(20), max_tokens=1000)
    with request(server, words(7, 9), max_tokens=200):
        wait_until(lambda: server.metric("tinykv_generated_tokens_total") > 60)
    wait_until(server.idle)
    server.generator._stored.trim_to(n_sequences=0)

    for outcome, count in {"finished": 6, "cancelled": 1, "refused": 1, "failed": 0}.items():
        assert server.metric("tinykv_requests_total", outcome=outcome) == count
    assert server.metric("tinykv_prompt_tokens_total", source="reused") == 19
    assert server.metric("tinykv_prompt_tokens_total", source="computed") == 20 + 1 + 4 * 11 + 7
    assert server.metric("tinykv_generated_tokens_total") >= 60
    assert server.metric("tinykv_time_to_first_token_seconds_count") >= 6
    assert server.metric("tinykv_time_per_output_token_seconds_count") >= 6 * 9
    stats = server.generator.state().pools["main"]
    assert server.metric("tinykv_pages", model="main", state="used") == stats.pages_used == 0
    assert server.metric("tinykv_pages", model="main", state="free") == stats.pages_free == 60
    assert server.metric("tinykv_bytes", model="main", kind="reserved") == stats.bytes_reserved
    assert server.metric("tinykv_bytes", model="main", kind="budget") == stats.bytes_total == 4 << 20
    assert server.metric("tinykv_pool_growths_total", model="main") == stats.growths > 0
    assert server.metric("tinykv_cow_copies_total", model="main") == stats.cow_copies > 0
    assert server.metric("tinykv_waste_ratio", model="main") == pytest.approx(stats.waste)
    assert server.metric("tinykv_requests_running") == server.metric("tinykv_requests_waiting") == 0


def test_stats_are_the_same_numbers(serve: Serve) -> None:
    server = serve(kind="gemma3_text")
    server.complete(words(20))
    stats = server.stats()
    assert stats["model"].endswith("gemma3_text")
    assert stats["stored_prompts"] == server.metric("tinykv_stored_prompts") > 0
    assert stats["stored_bytes"] == server.metric("tinykv_stored_prompt_bytes") > 0
    assert stats["pools"]["main"]["pages_cached"] == server.metric("tinykv_pages", model="main", state="cached") > 0
    assert stats["pools"]["main"]["page_moves"] == server.metric("tinykv_page_moves_total", model="main") == 0
    assert stats["requests"]["finished"] == server.metric("tinykv_requests_total", outcome="finished") == 1
    assert 0 < stats["pools"]["main"]["waste"] < 1


def test_what_runs_and_what_waits(serve: Serve, no_stops: None) -> None:
    server = serve(decode_concurrency=2, prompt_concurrency=2)
    with request(server, words(5)), request(server, words(6)), request(server, words(7)), request(server, words(8)):
        wait_until(lambda: server.stats()["waiting"] == server.stats()["running"] == 2)
        assert server.metric("tinykv_requests_running") == server.metric("tinykv_requests_waiting") == 2


def test_preempted_requests_wait(serve: Serve, no_stops: None) -> None:
    server = serve(max_pages=20)
    with request(server, words(30), max_tokens=50), request(server, words(30, 1), max_tokens=50):
        wait_until(lambda: server.metric("tinykv_preemptions_total") > 0)
        wait_until(lambda: server.stats()["requests"]["finished"] == 2)
    assert server.stats()["prompt_tokens"] | {"recomputed": 0} == {"computed": 60, "reused": 0, "recomputed": 0}
    assert server.stats()["prompt_tokens"]["recomputed"] > 0


def test_asking_in_the_middle_of_everything_is_safe(serve: Serve, together: Together) -> None:
    server = serve(max_pages=60)
    kv = server.attached[0]
    stop = threading.Event()
    trouble: list[BaseException] = []

    def watch() -> None:
        try:
            while not stop.is_set():
                stats = kv.stats()
                assert stats.pages_used + stats.pages_cached + stats.pages_free == stats.pages_total
                kv.check()
                json.loads(server.get("/kv/stats"))
                server.get("/metrics")
        except BaseException as error:
            trouble.append(error)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for seed in range(3):
        together(lambda n, seed=seed: server.complete(words(3 + n, seed * 16 + n)), range(16))
    stop.set()
    for watcher in watchers:
        watcher.join()
    assert trouble == []
