"""The live view: what it tells, and that it costs nothing while nobody watches."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from served import Server, request, wait_until, words

from tinykv_plugin.serving import live
from tinykv_plugin.serving.live_page import live_page

Serve = Callable[..., Server]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 0.02)


@contextmanager
def watching(server: Server) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that returns the next picture."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/kv/events", timeout=20) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert "Access-Control-Allow-Origin" not in response.headers

        def picture() -> dict[str, Any]:
            line = response.readline()
            assert response.readline() == b"\n"
            found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return found

        yield picture


def until(picture: Callable[[], dict[str, Any]], condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first picture that ``condition`` is true of."""
    for _ in range(500):
        found = picture()
        if condition(found):
            return found
    raise AssertionError("not within 500 pictures")


def cells(group: dict[str, Any]) -> Any:
    """Shares of used, shared and cached pages, a row for each cell."""
    return np.frombuffer(base64.b64decode(group["cells"]), np.uint8).reshape(-1, 3)


def mask(request: dict[str, Any], count: int) -> Any:
    bits = np.frombuffer(base64.b64decode(request["cells"]["main"][0]), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:count]


def test_requests_and_their_pages(serve: Serve, no_stops: None) -> None:
    server = serve(max_pages=1000)
    with watching(server) as picture:
        empty = picture()
        assert (empty["running"], empty["waiting"], empty["requests"]) == (0, 0, [])
        assert (empty["model"], empty["hit_rate"]) == ("llama", None)
        with request(server, words(30), stream=True), request(server, words(21, 1), stream=True):
            seen = until(
                picture,
                lambda p: len(p["requests"]) == 2 and all(r["pages"] and r["generated"] > 2 for r in p["requests"]),
            )
    one, two = sorted(seen["requests"], key=lambda r: r["prompt_tokens"], reverse=True)
    assert (one["prompt_tokens"], two["prompt_tokens"]) == (30, 21)
    for told in (one, two):
        assert told["state"] == "answering"
        assert told["computed"] + told["reused"] == told["prompt_tokens"]
        assert told["max_tokens"] == 3000
        assert told["tokens_per_second"] > 0
        # Counted a moment later than the tokens.
        assert told["pages"] >= (told["prompt_tokens"] + told["generated"]) // 4 - 1
    pool = seen["pools"]["main"]
    (group,) = pool["groups"]
    drawn = cells(group)
    assert group["per_cell"] == 1
    assert len(drawn) == group["pages"] == sum(group["states"])
    used = drawn.any(axis=1)
    assert used.sum() == sum(group["states"][1:])
    for told in (one, two):
        held = mask(told, group["pages"])
        assert held.sum() == told["pages"]
        assert used[held == 1].all()
    assert not (mask(one, group["pages"]) & mask(two, group["pages"])).any()
    assert told["bytes"] == told["pages"] * group["page_bytes"]
    assert pool["bytes_used"] <= pool["bytes_reserved"] <= pool["bytes_total"]


def test_a_shared_prefix_is_seen_as_shared(serve: Serve, no_stops: None) -> None:
    server = serve(max_pages=1000)
    server.complete(words(40), max_tokens=4)
    with watching(server) as picture:
        stored = until(picture, lambda p: p["pools"]["main"]["groups"][0]["states"][3])
        assert stored["pools"]["main"]["groups"][0]["states"][1:3] == [0, 0]
        with request(server, words(40), stream=True), request(server, words(40), stream=True):
            seen = until(picture, lambda p: sum(bool(r["generated"]) for r in p["requests"]) == 2)
    assert seen["pools"]["main"]["groups"][0]["states"][2] > 0
    assert [told["reused"] for told in seen["requests"]] == [39, 39]
    assert 0 < seen["hit_rate"] < 1


def test_a_request_served_alone_has_its_pages(serve: Serve, no_stops: None) -> None:
    server = serve(max_pages=1000)
    with watching(server) as picture, request(server, words(30), stream=True, seed=1):
        seen = until(picture, lambda p: p["requests"] and p["requests"][0]["generated"] > 4)
    assert seen["requests"][0]["pages"] >= 8
    assert seen["running"] == 1


def test_waiting_and_preempted_requests_are_told_apart(serve: Serve, no_stops: None) -> None:
    server = serve(max_pages=200, decode_concurrency=2, prompt_concurrency=2)
    long: dict[str, Any] = {"max_tokens": 700, "stream": True}
    with (
        watching(server) as picture,
        request(server, words(30), **long),
        request(server, words(30, 1), **long),
        request(server, words(30, 2), **long),
    ):
        states: set[str] = set()
        while not {"answering", "waiting", "paused"} <= states:
            told = picture()
            assert told["running"] or told["waiting"] or not states, states
            states |= {one["state"] for one in told["requests"]}


def test_no_text_of_prompts_leaves(serve: Serve, no_stops: None) -> None:
    server = serve()
    words_of_it = set(words(30).split())
    with watching(server) as picture, request(server, words(30), stream=True):
        seen = until(picture, lambda p: p["requests"] and p["requests"][0]["generated"] > 2)
    for told in seen["requests"]:
        told.pop("cells")
    for group in seen["pools"]["main"]["groups"]:
        group.pop("cells")
    assert not words_of_it & set(re.findall(r"\w+", json.dumps(seen)))


def test_nothing_is_computed_while_nobody_watches(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = live.LiveView._look

    def counted(self: Any) -> dict[str, Any]:
        looks.append(1)
        return look(self)

    monkeypatch.setattr(live.LiveView, "_look", counted)
    noted: list[int] = []
    monkeypatch.setattr(live.LiveView, "note", lambda self, running: noted.append(len(running)))
    server = serve()
    server.complete(words(20))
    assert (looks, noted) == ([], [])
    with watching(server) as picture:
        picture()
        server.complete(words(20, 1))
    assert looks
    assert noted
    wait_until(lambda: not server.generator.live.watched)
    looks.clear()
    noted.clear()
    server.complete(words(20, 2))
    assert (looks, noted) == ([], [])


def test_watchers_share_their_pictures(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL", 60)
    server = serve()
    with watching(server) as one, watching(server) as two:
        assert one() == two()
    server.generator.live.close()


def test_there_may_be_only_so_many(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 2)
    server = serve()
    with watching(server) as one, watching(server) as two:
        one(), two()
        with pytest.raises(urllib.error.HTTPError) as caught, watching(server):
            pass
        assert caught.value.code == 503
        assert "2 watch /kv/events already" in json.loads(caught.value.read())["error"]["message"]
    wait_until(lambda: not server.generator.live.watched)
    with watching(server) as picture:
        picture()


def test_a_watcher_that_is_silent_is_let_go(serve: Serve) -> None:
    """Nothing changes, so nothing is sent; that the client has gone is noticed all the same."""
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /kv/events HTTP/1.0\r\n\r\n")
        wait_until(lambda: server.generator.live.watched)
    wait_until(lambda: not server.generator.live.watched)


def test_a_server_that_stops_ends_the_stream(serve: Serve) -> None:
    server = serve()
    ended = threading.Event()

    def watch() -> None:
        with watching(server) as picture:
            picture()
            server.generator.live.close()
            with pytest.raises(AssertionError):
                picture()
            ended.set()

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join(20)
    assert ended.is_set()


def test_pictures_have_a_bounded_size(serve: Serve, monkeypatch: pytest.MonkeyPatch, no_stops: None) -> None:
    monkeypatch.setattr(live, "MOST_CELLS", 32)
    monkeypatch.setattr(live, "MOST_REQUESTS", 2)
    server = serve(max_pages=4000, memory="64MiB")
    with (
        watching(server) as picture,
        request(server, words(900), stream=True),
        request(server, words(5), stream=True),
        request(server, words(6), stream=True),
        request(server, words(7), stream=True),
    ):
        seen = until(picture, lambda p: p["running"] == 4 and p["requests"][0]["pages"] > 200)
    (group,) = seen["pools"]["main"]["groups"]
    assert len(cells(group)) <= 32
    assert group["per_cell"] > 1
    assert (len(seen["requests"]), seen["more_requests"]) == (2, 2)


def test_the_page_loads_nothing_from_elsewhere(serve: Serve) -> None:
    server = serve()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/kv", timeout=20) as response:
        text = response.read().decode()
        policy = response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers
    assert text.encode() == live_page().body
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "'unsafe" not in policy
    assert not re.search(r"https?:|//[\w.]+/|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")", text)
    assert set(re.findall(r"(?:src|href)=\"([^\"]*)\"", text)) == {"data:,", "kv/stats", "metrics"}


def test_a_server_without_pages_says_so(serve: Serve) -> None:
    server = serve(cache="dense")
    with watching(server) as picture:
        assert picture()["pools"] == {}
