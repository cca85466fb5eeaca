"""Prompts that a server has stored are on the disk when it ends, and when another model takes the place of theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import Server, request, wait_until, words

from tinykv_plugin.prefix_cache import PrefixCache

Serve = Callable[..., Server]


def stored_tokens(server: Server, prompt: str) -> int:
    """Tokens of ``prompt`` that did not have to be run."""
    answer = server.client.completions.create(model="default_model", prompt=prompt, max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return int(answer.usage.prompt_tokens_details.cached_tokens or 0)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_another_server_finds_them(
    serve: Serve, tmp_path: Path, kind: str, busy: bool, no_stops: None, caplog: pytest.LogCaptureFixture
) -> None:
    # Recurrent layers can be continued where their state is known, at the ends of some pages here.
    settings = {"prefix_dir": str(tmp_path), "prefix_interval": 8}
    server, prompt = serve(kind, **settings), words(60)
    assert stored_tokens(server, prompt) == 0
    if busy:
        with request(server, words(30, 1)):
            wait_until(lambda: server.stats()["work"]["generated_tokens"] > 10)
            server.generator.stop_and_join()
    else:
        server.generator.stop_and_join()
    # All of it, or up to the last page.
    assert stored_tokens(serve(kind, **settings), prompt) >= 56
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_model_that_comes_back_finds_its_own(serve: Serve, tmp_path: Path, model_dir: Callable[..., Path]) -> None:
    server, prompt = serve(prefix_dir=str(tmp_path)), words(60)
    assert stored_tokens(server, prompt) == 0
    other = str(model_dir("llama", seed=4))
    assert server.client.completions.create(model=other, prompt=prompt, max_tokens=5).usage is not None
    assert stored_tokens(server, prompt) >= 56


def test_a_disk_that_fails_stops_no_exchange(
    serve: Serve, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(prefix: Any) -> None:
        raise OSError("no space left")

    server = serve()
    expected = server.complete(words(9))
    with monkeypatch.context() as context:
        context.setattr(PrefixCache, "close", fail)
        other = str(model_dir("llama", seed=4))
        assert server.client.completions.create(model=other, prompt=words(9), max_tokens=5).choices[0].text
    assert "stored prompts were not written to disk: no space left" in caplog.messages
    assert server.complete(words(9)) == expected
