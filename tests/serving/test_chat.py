"""Conversations that grow: what of a prompt is stored is not run again, and what is counted is what was run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from served import Server, words

Serve = Callable[..., Server]
Stock = Callable[..., Server]


def converse(server: Server, turns: int, seed: int = 0, **fields: Any) -> tuple[list[str], list[Any]]:
    """The answers of one conversation, and the usage of each."""
    messages = [{"role": "system", "content": words(10, seed)}]
    answers, usages = [], []
    for turn in range(turns):
        messages.append({"role": "user", "content": words(5 + turn, seed + turn + 1)})
        answer = server.chat(messages, max_tokens=12, **fields)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        answers.append(answer.choices[0].message.content)
        usages.append(answer.usage)
    return answers, usages


# With a seed, mlx-lm answers one request at a time.
ALONE: dict[str, Any] = {"seed": 1}
PATHS = pytest.mark.parametrize("fields", [{}, ALONE], ids=["batched", "alone"])


@PATHS
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba"])
def test_growing_history(serve: Serve, kind: str, fields: dict[str, Any]) -> None:
    server = serve(kind, prompt_cache_size=20)
    answers, usages = converse(server, 4, **fields)
    # Without a stored prompt, every turn is computed from nothing.
    cold = serve(kind, prompt_cache_size=0)
    assert (answers, 0) == (converse(cold, 4, **fields)[0], cold.stats()["prompt_tokens"]["reused"])
    reused = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert reused[0] == 0
    for before, usage, count in zip(usages, usages[1:], reused[1:], strict=False):
        # All that was asked before, and the answer if it was not cut at a stop token.
        assert count >= before.prompt_tokens - 1
        assert count < usage.prompt_tokens
    counted = server.stats()["prompt_tokens"]
    assert counted["reused"] == sum(reused)
    assert counted["computed"] == sum(usage.prompt_tokens for usage in usages) - sum(reused)
    assert counted["recomputed"] == 0


@PATHS
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next", "mamba"])
def test_r12_r23_the_same_prompt_again_runs_one_token(serve: Serve, kind: str, fields: dict[str, Any]) -> None:
    server = serve(kind)
    prompt = words(21)
    first = server.complete(prompt, **fields)
    assert server.stats()["prompt_tokens"] == {"computed": 21, "recomputed": 0, "reused": 0}
    for again in range(1, 4):
        assert server.complete(prompt, **fields) == first
        assert server.stats()["prompt_tokens"] == {"computed": 21 + again, "recomputed": 0, "reused": 20 * again}


@pytest.mark.parametrize("fields", [{}, {"seed": 3, "temperature": 1.2}], ids=["batched", "alone"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_penalty_counts_stored_tokens_too(serve: Serve, kind: str, fields: dict[str, Any]) -> None:
    server = serve(kind)
    asked = {"extra_body": {"repetition_penalty": 1.5, "repetition_context_size": 30}, **fields}
    first = server.complete(words(21), **asked)
    assert first != server.complete(words(21), **fields)
    assert server.complete(words(21), **asked) == first
    assert server.stats()["prompt_tokens"]["reused"] == 40


@PATHS
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next", "mamba"])
def test_r11_a_shared_beginning_is_reused_behind_windows_and_recurrent_layers(
    serve: Serve, kind: str, fields: dict[str, Any]
) -> None:
    server = serve(kind)
    system = {"role": "system", "content": words(30)}
    for seed in range(3):
        server.chat([system, {"role": "user", "content": words(3, seed + 1)}], **fields)
    # With the tokens around it.
    assert server.stats()["prompt_tokens"]["reused"] == 2 * 33


def test_r16_continuing_a_stored_prompt_leaves_it_as_it_was(serve: Serve) -> None:
    server = serve()
    beginning = words(18)
    alone = server.complete(beginning)
    for seed in range(4):
        server.complete(f"{beginning} {words(5, seed + 1)}")
        assert server.complete(beginning) == alone
