"""A request that fails gets its reason, in the form of OpenAI's errors; no other request notices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx_lm.server
import openai
import pytest
from served import Server, wait_until, words

from tinykv_plugin.prefix_cache import PrefixCache
from tinykv_plugin.serving.batch import ServedBatch

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with ``logit_bias={"96": n}`` has a logits processor that raises at its ``n``-th token."""
    make = mlx_lm.server._make_logits_processors

    def make_with_fuse(args: Any) -> Any:
        bias = dict(args.logits.logit_bias or {})
        last = bias.pop(96, None)
        if last is None:
            return make(args)
        calls: list[int] = []

        def burn(tokens: Any, logits: Any) -> Any:
            calls.append(1)
            if len(calls) >= last:
                raise ZeroDivisionError("the fuse has blown")
            return logits

        return [burn]

    monkeypatch.setattr(mlx_lm.server, "_make_logits_processors", make_with_fuse)


def test_r37_a_row_that_raises_fails_alone(serve: Serve, together: Together, fuse: None) -> None:
    server = serve()
    prompts = [words(12, seed) for seed in range(5)]
    expected = [server.complete(prompt) for prompt in prompts]

    def ask(number: int) -> str:
        return server.complete(prompts[number], extra_body={"logit_bias": {"96": 5}} if number == 2 else {})

    for _ in range(3):
        answers = together(ask, range(5))
        failed = answers.pop(2)
        assert answers == expected[:2] + expected[3:]
        assert isinstance(failed, openai.InternalServerError)
        assert failed.status_code == 500
        assert failed.body == {
            "message": "ZeroDivisionError: the fuse has blown",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    assert server.complete(prompts[2]) == expected[2]
    assert server.stats()["requests"]["failed"] == 3


@pytest.mark.parametrize("seed", [None, 5], ids=["batched", "alone"])
def test_a_stream_that_has_begun_ends_with_an_error_event(serve: Serve, fuse: None, seed: int | None) -> None:
    server = serve()
    stream = server.client.completions.create(
        model="default_model", prompt=words(12), stream=True, extra_body={"logit_bias": {"96": 5}, "seed": seed}
    )
    assert next(stream).choices[0].text
    with pytest.raises(openai.APIError, match="the fuse has blown"):
        list(stream)
    assert server.complete(words(12))


def test_a_request_that_can_never_fit(serve: Serve, together: Together, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tinykv")
    # Eight pages of four tokens.
    server = serve(max_pages=8)
    expected = server.complete(words(12, 1), max_tokens=10)

    def ask(number: int) -> str:
        return server.complete(words(12, 1), max_tokens=10 if number else 200)

    refused, *answers = together(ask, range(4))
    assert answers == [expected] * 3
    assert isinstance(refused, openai.BadRequestError)
    assert refused.body["code"] == "request_too_large"
    assert refused.body["type"] == "invalid_request_error"
    for part in ("212 tokens", "53 pages", "of 8 pages", "--kv-max-pages 53"):
        assert part in refused.body["message"]
    with pytest.raises(openai.BadRequestError, match="--kv-max-pages 53"):
        server.complete(words(12, 1), max_tokens=200, stream=True)
    with pytest.raises(openai.BadRequestError, match="--kv-max-pages 53"):  # served alone
        server.complete(words(12, 1), max_tokens=200, seed=1)
    assert server.stats()["requests"] == {"finished": 4, "cancelled": 0, "refused": 3, "failed": 0}
    reasons = [line for line in caplog.messages if " ends with an error: " in line]
    assert len(reasons) == 3
    assert all("--kv-max-pages 53" in line for line in reasons)


def test_r06_out_of_pages_is_one_requests_error(serve: Serve, together: Together) -> None:
    server = serve(max_pages=8, on_full="error")
    solo = [server.complete(words(7, seed), max_tokens=8) for seed in range(2)]

    def ask(number: int) -> str:
        return server.complete(words(20 if number == 2 else 7, number), max_tokens=8)

    for _ in range(3):
        answers = together(ask, range(3))
        assert [answer for answer in answers if not isinstance(answer, Exception)]
        for answer, text in zip(answers, solo, strict=False):
            # With the policy "error", whoever finds no page fails; the others are as they would be alone.
            assert answer == text or answer.status_code in (400, 500)
    assert server.complete(words(7), max_tokens=8) == solo[0]


def test_an_error_nobody_expects_ends_what_was_under_way(
    serve: Serve, together: Together, monkeypatch: pytest.MonkeyPatch, no_stops: None
) -> None:
    server = serve()
    expected = server.complete(words(9))
    step = ServedBatch.step
    broken = [True]

    def break_once(batch: ServedBatch) -> None:
        step(batch)
        if broken and len(batch) == 3:
            broken.clear()
            raise KeyError("a bug")

    monkeypatch.setattr(ServedBatch, "step", break_once)
    # Long enough to meet in one batch on a busy machine.
    answers = together(lambda _: server.complete(words(9), max_tokens=400), range(3))
    assert all(isinstance(answer, openai.InternalServerError) for answer in answers)
    assert server.complete(words(9)) == expected
    assert server.stats()["running"] == server.stats()["waiting"] == 0


def test_a_prompt_that_cant_be_stored_is_answered(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("no")

    server = serve()
    expected = server.complete(words(9))
    monkeypatch.setattr(PrefixCache, "keep", refuse)
    assert server.complete(words(9)) == expected


def test_formatting_that_fails_ends_one_request(
    serve: Serve, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    expected = server.complete(words(9))
    form = mlx_lm.server._format_top_logprobs

    def fail_for_three(logprobs: Any, count: int, tokenizer: Any) -> Any:
        if count == 3:
            raise KeyError("an unknown token")
        return form(logprobs, count, tokenizer)

    monkeypatch.setattr(mlx_lm.server, "_format_top_logprobs", fail_for_three)
    first, second = together(
        lambda top: server.complete(words(9), extra_body={"top_logprobs": top} if top else {}), [0, 3]
    )
    assert first == expected
    assert isinstance(second, openai.InternalServerError)
    wait_until(server.idle)
