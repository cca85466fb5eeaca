"""``tinykv top``: the live view in a terminal."""

from __future__ import annotations

import base64
import io
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from tinykv_plugin.cli import top
from tinykv_plugin.cli.failures import CommandError
from tinykv_plugin.cli.picture import draw

Call = Callable[..., Any]


def a_picture(**changes: Any) -> dict[str, Any]:
    shares = bytes([255, 0, 0] * 3 + [0, 255, 0] + [0, 0, 255] * 2 + [0, 0, 0] * 4)
    group = {
        "name": "full",
        "layers": 4,
        "page_size": 32,
        "page_bytes": 65536,
        "storage": "float16",
        "quantized": False,
        "pages": 10,
        "per_cell": 1,
        "states": [4, 3, 1, 2],
        "cells": base64.b64encode(shares).decode(),
    }
    pool = {
        "bytes_total": 2**20,
        "bytes_reserved": 10 * 65536,
        "bytes_used": 6 * 65536,
        "pages_total": 16,
        "waste": 0.125,
        "groups": [group],
    }
    request = {
        "id": 7,
        "state": "answering",
        "prompt_tokens": 1200,
        "computed": 1000,
        "reused": 200,
        "generated": 34,
        "max_tokens": 100,
        "tokens_per_second": 12.34,
        "seconds": 5.0,
        "pages": 4,
        "bytes": 4 * 65536,
        "cells": {"main": [""]},
    }
    return {
        "version": "1",
        "model": "some/model",
        "running": 1,
        "waiting": 2,
        "tokens_per_second": 12.3,
        "hit_rate": 0.25,
        "stored_prompts": 1,
        "evictions": 3,
        "requests_ended": {},
        "prompt_tokens": {},
        "work": {"preemptions": 5, "generated_tokens": 100},
        "pools": {"main": pool},
        "requests": [request],
        "more_requests": 0,
        **changes,
    }


def printed(picture: dict[str, Any], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(picture, width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_everything_is_in_the_picture() -> None:
    out = printed(a_picture())
    assert "some/model · 1 running · 2 waiting · 12.3 tokens/s · 25% of prompt tokens reused · 3 pages evicted" in out
    assert "384 KiB used, 640 KiB reserved of 1.00 MiB, 12% of the used slots empty" in out
    assert "full, 4 layers, 10 pages of 32 tokens (64.0 KiB, float16)" in out
    assert "UUUSCC...." in out
    assert ". free 4   U used 3   S shared 1   C cached 2" in out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("7 "))
    assert row == ["7", "answering", "1,200/1,200", "200", "34", "12.3", "4", "256", "KiB", "5.0"]
    assert all(len(line) <= 120 for line in out.splitlines())


def test_a_large_map_is_merged_to_fit() -> None:
    picture = a_picture()
    (group,) = picture["pools"]["main"]["groups"]
    group["cells"] = base64.b64encode(bytes([255, 0, 0] * 1000 + [0, 0, 0] * 1048)).decode()
    out = printed(picture, 60)
    lines = [line for line in out.splitlines() if line and set(line) <= set("UUSC.")]
    assert len(lines) <= 8
    assert "".join(lines).count("U") == pytest.approx("".join(lines).count("."), rel=0.1)


def test_without_a_model_and_with_nothing_to_do() -> None:
    out = printed(a_picture(model=None, pools={}, requests=[], tokens_per_second=None, hit_rate=None))
    assert "no model loaded" in out
    assert "no model with pages is loaded" in out
    assert "no request is running or waiting" in out


class Handler(BaseHTTPRequestHandler):
    answers: Iterator[Any]

    def do_GET(self) -> None:
        answer = next(self.answers)
        if isinstance(answer, int):
            self.send_response(answer)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "16 watch /kv/events already"}}).encode())
            return
        kind, pictures = answer
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for picture in pictures:
            self.wfile.write(b"data: " + json.dumps(picture).encode() + b"\n\n")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[Callable[..., str]]:
    """``url(answer, …)``: a server that gives these answers, one for each request."""
    servers: list[Any] = []

    def start(*answers: Any) -> str:
        handler = type("OneHandler", (Handler,), {"answers": iter(answers)})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


STREAM = "text/event-stream"


def test_one_picture_where_there_is_no_terminal(tinykv: Call, url: Call) -> None:
    address = url((STREAM, [a_picture(), a_picture(running=9)]))
    done = tinykv("top", "--url", address)
    assert done.code == 0, done.err
    assert "1 running" in done.out
    assert "9 running" not in done.out


def test_a_terminal_sees_every_picture(url: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    address = url((STREAM, [a_picture(), a_picture(running=9)]))
    out = Console(file=io.StringIO(), width=100, force_terminal=True)
    monkeypatch.setattr(top, "console", lambda: out)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    assert top.top(["--url", address]) == 0
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "1 running" in shown
    assert "9 running" in shown
    assert "the server has stopped; trying again" in shown


def test_a_lost_server_is_waited_for(url: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "RETRY_SECONDS", 0)
    address = url((STREAM, [a_picture()]), 503, (STREAM, [a_picture(running=3)]))
    seen = list(itertools.islice(top.lasting(address), 4))
    assert [told if isinstance(told, str) else told["running"] for told in seen] == [
        1,
        "the server has stopped; trying again, Ctrl-C ends",
        f"--url {address}: 16 watch /kv/events already; trying again, Ctrl-C ends",
        3,
    ]


def test_errors_name_the_address_and_what_to_do(tinykv: Call, url: Call) -> None:
    done = tinykv("top", "--url", "http://127.0.0.1:9")
    assert done.code == 1
    assert done.err.startswith("tinykv: error: --url http://127.0.0.1:9: no server answers there (")
    assert "start one with tinykv server, or give its address, such as http://127.0.0.1:8080" in done.err
    address = url(404, ("text/html", []), 503, (STREAM, []))
    assert "it has to be started as tinykv server" in tinykv("top", "--url", address).err
    assert "what answers there is no tinykv server" in tinykv("top", "--url", address).err
    assert "16 watch /kv/events already" in tinykv("top", "--url", address).err
    assert "the server has stopped" in tinykv("top", "--url", address).err
    assert "no server answers there" in tinykv("top", "--url", "nonsense").err


def test_the_first_connection_has_to_succeed() -> None:
    with pytest.raises(CommandError):
        next(top.lasting("http://127.0.0.1:9"))
