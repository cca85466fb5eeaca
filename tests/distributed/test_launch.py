"""Models divided between two processes by ``mlx.launch``: the tokens of one process, and the same page decisions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "worker.py"
LAUNCH = "from mlx._distributed_utils.launch import main; main()"


def launch(*command: str, count: int = 2) -> str:
    """The output of ``command`` run by ``count`` processes on this machine; fails with it unless all succeed."""
    launcher = [sys.executable, "-c", LAUNCH, "-n", str(count), "--backend", "ring", "--"] if count > 1 else []
    done = subprocess.run(
        [*launcher, sys.executable, *command], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0 and "exited with code" not in done.stdout, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def ranks(*arguments: str, count: int = 2) -> list[dict[str, Any]]:
    """What each process found, by rank."""
    lines = [line for line in launch(str(WORKER), *arguments, count=count).splitlines() if line.startswith("{")]
    assert len(lines) == count, lines
    return sorted(map(json.loads, lines), key=lambda found: found["rank"])


TOKENS = ("single", "long", "batch")


@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", "tensor"), ("qwen2", "pipeline"), ("ministral3", "pipeline"), ("deepseek_v3", "pipeline")],
)
def test_two_processes_generate_what_one_does(name: str, how: str) -> None:
    (alone,) = ranks(name, "whole", count=1)
    both = ranks(name, how)
    for found in both:
        assert {key: found[key] for key in TOKENS} == {key: alone[key] for key in TOKENS}
        assert found["used"] == 0
        # Each has half of the heads, or half of the layers.
        assert found["bytes"] == alone["bytes"] / 2
    if how == "tensor" or len(alone["groups"]) == 1:
        assert both[0]["peak"] == both[1]["peak"] == alone["peak"]


@pytest.mark.parametrize(("name", "how"), [("llama", "tensor"), ("qwen2", "pipeline")])
def test_the_process_with_the_least_memory_decides_for_all(name: str, how: str) -> None:
    """A request that one of them can't take is refused by both, and neither waits for the other for ever."""
    both = ranks(name, how, "1GiB", "24KiB")
    (alone,) = ranks(name, "whole", count=1)
    for found in both:
        assert found["single"] == alone["single"]
        assert found["long"] == "OutOfPagesError"
        assert found["used"] == 0
    assert both[0]["batch"] == both[1]["batch"]
    assert both[0]["peak"] == both[1]["peak"]


def test_generate_under_mlx_launch(tiny_model_dir: Path) -> None:
    command = ["-m", "tinykv_plugin", "generate", "--model", str(tiny_model_dir), "--prompt", "Hello"]
    alone, both = launch(*command, "--max-tokens", "8", count=1), launch(*command, "--max-tokens", "8")
    assert both.split("==========")[1] == alone.split("==========")[1], "the first process writes"
    assert both.count("==========") == 2, "and no other"


def test_processes_draw_the_same_random_numbers() -> None:
    both = ranks("llama", "random")
    assert both[0]["own"] != both[1]["own"]
    assert both[0]["shared"] == both[1]["shared"]


def test_server_under_mlx_launch(tiny_model_dir: Path) -> None:
    answers = {}
    for count in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = [sys.executable, "-c", LAUNCH, "-n", "2", "--backend", "ring", "--"] if count > 1 else []
        command = [sys.executable, "-m", "tinykv_plugin", "server", "--model", str(tiny_model_dir), "--port", str(port)]
        server = subprocess.Popen(
            [*launcher, *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), start_new_session=True,
        )  # fmt: skip
        try:
            answers[count] = [ask(port, text, server) for text in ("Hello", "Good day to you", "Hello again")]
        finally:
            # mlx.launch ends without its ranks.
            os.killpg(server.pid, signal.SIGTERM)
            server.communicate(timeout=30)
            assert is_gone(server.pid)
    assert answers[1] == answers[2]


def is_gone(group: int) -> bool:
    """Whether no process of the group is left, after a while."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def ask(port: int, text: str, server: subprocess.Popen[bytes]) -> str:
    """The answer to a chat message; waits for the server to be up."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, server.stdout.read().decode() if server.stdout else ""
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: str = json.load(response)["choices"][0]["message"]["content"]
                return answer
        except (ConnectionError, urllib.error.URLError):
            assert time.monotonic() < deadline, "the server doesn't answer"
            time.sleep(0.3)
