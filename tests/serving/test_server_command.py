"""``tinykv server``, and how our classes get into mlx-lm's server and out again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_lm.server
import openai
import pytest
from served import Server, request, wait_until, words

from tinykv_plugin.serving import server as server_module
from tinykv_plugin.serving.server import AddressError, paged_server

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


def test_mlx_lm_is_restored() -> None:
    before = dict(vars(mlx_lm.server))

    def enter_and_fail() -> None:
        with paged_server(max_queue=3):
            changed = {name for name, value in vars(mlx_lm.server).items() if before.get(name) is not value}
            assert changed == {"ResponseGenerator", "LRUPromptCache", "_run_http_server", "scan_cache_dir"}
            with paged_server():
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enter_and_fail()
    assert dict(vars(mlx_lm.server)) == before


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("127.0.0.1", -2), "--port -2: a port is a number from 0 to 65535"),
        (("127.0.0.1", 99999), "--port 99999: a port is a number from 0 to 65535"),
        (("no host", 8080), "--host no host --port 8080: the server can't listen there ("),
        (None, "the server can't listen there (Address already in use); try another one"),
    ],
)
def test_where_it_cant_listen_it_ends(place: tuple[str, int] | None, said: str) -> None:
    """It stops the thread that generates, which would keep the process alive."""
    stopped: list[bool] = []
    generator = SimpleNamespace(stop_and_join=lambda: stopped.append(True))
    with socket.create_server(("127.0.0.1", 0)) as taken, paged_server(), pytest.raises(AddressError) as caught:
        mlx_lm.server._run_http_server(*(place or taken.getsockname()), generator)
    assert said in str(caught.value)
    assert stopped == [True]


def test_sigterm_counts_as_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*args: Any, **options: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(server_module, "_own_run_http_server", serve)
    before = signal.getsignal(signal.SIGTERM)
    stopped: list[bool] = []
    with paged_server():
        run: Any = mlx_lm.server._run_http_server
        run("127.0.0.1", 0, SimpleNamespace(stop_and_join=lambda: stopped.append(True)))
    assert stopped == [True]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def process(model_dir: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """``tinykv server`` with room for eight pages; its port, and the file it writes to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    command = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    command += "from tinykv_plugin.cli.main import main; raise SystemExit(main())"
    arguments = ["server", "--model", str(model_dir("llama")), "--port", str(port)]
    arguments += ["--kv-page-size=4", "--kv-max-pages=8", "--kv-max-queue=5", "--kv-stats"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", command, *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "none")},
        )
    try:
        yield process, port, log
    finally:
        process.kill()
        process.wait()


def test_the_command(
    process: tuple[subprocess.Popen[bytes], int, Path], serve: Serve, model_dir: Callable[..., Path]
) -> None:
    running, port, log = process

    def get(path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, ConnectionError):
            assert running.poll() is None, log.read_text()
            return None

    wait_until(lambda: get("/health"), seconds=60, what="the server")
    # Without a cache of Hugging Face's mlx-lm's own answer breaks off.
    assert [each["id"] for each in json.loads(get("/v1/models") or "")["data"]] == [str(model_dir("llama").resolve())]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    expected = serve().complete(words(9), max_tokens=12)
    answer = client.completions.create(model="default_model", prompt=words(9), max_tokens=12)
    assert answer.choices[0].text == expected
    with pytest.raises(openai.BadRequestError, match="--kv-max-pages 28 would fit"):
        client.completions.create(model="default_model", prompt=words(9), max_tokens=100)
    client.close()
    stats = json.loads(get("/kv/stats") or "")
    assert stats["requests"] == {"finished": 1, "cancelled": 0, "refused": 1, "failed": 0}
    assert 'tinykv_requests_total{outcome="refused"} 1.0' in (get("/metrics") or "")
    assert "queue" not in (get("/health") or "")
    running.send_signal(signal.SIGTERM)  # as `kill` does; it counts as ctrl-C
    # mlx's own threads sometimes abort a process that ends with the server's, without the plugin too.
    assert running.wait(30) in (0, -signal.SIGABRT)
    assert "Traceback" not in log.read_text()
    assert "KV pages of llama" in log.read_text()


# mlx-lm's own caches: its own loop runs, behind our queue and handler ------------------------------------------------


def test_dense_caches(serve: Serve, together: Together) -> None:
    server, paged = serve(cache="dense"), serve()
    prompts = [words(9, number) for number in range(6)]
    assert together(lambda number: server.complete(prompts[number]), range(6)) == [
        paged.complete(prompt) for prompt in prompts
    ]
    assert server.complete(prompts[0], seed=1) == paged.complete(prompts[0])
    stats = server.stats()
    assert stats["requests"] == {"finished": 7, "cancelled": 0, "refused": 0, "failed": 0}
    assert stats["prompt_tokens"] == {"computed": 6 * 9 + 1, "recomputed": 0, "reused": 8}
    assert stats["pools"] == {}


def test_dense_caches_and_clients_that_go(serve: Serve, no_stops: None) -> None:
    server = serve(cache="dense", prefill_step_size=4)
    for options in ({}, {"seed": 1}):
        with request(server, words(300), **options):
            wait_until(lambda: server.stats()["prompt_tokens"]["computed"] > 4)
        wait_until(server.idle)
    assert server.stats()["requests"]["cancelled"] == 2
    assert server.complete(words(9), max_tokens=3)


def test_dense_caches_and_what_ends_mlx_lms_loop(serve: Serve) -> None:
    server = serve(cache="dense")
    expected = server.complete(words(9))
    for _ in range(2):
        with pytest.raises(openai.InternalServerError):
            server.complete(words(9, 1), extra_body={"stop": 5})
        assert server.complete(words(9, 2))
    assert server.complete(words(9, 3)) != expected
