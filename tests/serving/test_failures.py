"""A request that fails gets its reason, in the form of OpenAI's errors; no other request notices."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm.server
import openai
import pytest
from served import Server, wait_until, words

from tinykv_plugin.prefix_cache import PrefixCache
from tinykv_plugin.serving import handler
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


def post(server: Server, body: object, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(rest)


NONSENSE: list[tuple[int, str, object]] = [
    (400, "/v1/completions", {"prompt": 3}),
    (400, "/v1/completions", {"prompt": ""}),
    (400, "/v1/completions", {"prompt": "w1", "logit_bias": {"5000": 1}}),
    (400, "/v1/completions", {"prompt": "w1", "logit_bias": {"5000": 1}, "seed": 1}),
    (400, "/v1/completions", {"prompt": ["w1", "w2"]}),
    (400, "/v1/completions", {"prompt": ["w1"]}),
    (400, "/v1/completions", {"prompt": "w1", "stop": 5}),
    (400, "/v1/completions", {"prompt": "w1", "stop": [None]}),
    (400, "/v1/completions", {"prompt": "w1", "stop": {"w2": 1}}),
    (400, "/v1/completions", {"prompt": "w1", "seed": -1}),
    (400, "/v1/completions", {"prompt": "w1", "seed": 2**64}),
    (404, "/v1/completions", {"prompt": "w1", "model": "/no/such/folder"}),
    (404, "/v1/completions", {"prompt": "w1", "model": "no-such-model", "stream": True}),
    (404, "/v1/completions", {"prompt": "w1", "model": "\0"}),
    (404, "/v1/completions", {"prompt": "w1", "draft_model": "/no/such/folder"}),
    (400, "/v1/completions", {"prompt": "w1", "draft_model": {"a": 1}}),
    (400, "/v1/completions", {"prompt": "w1", "max_tokens": "many"}),
    (400, "/v1/completions", {"max_tokens": 3}),
    (400, "/v1/completions", [1]),
    (400, "/v1/completions", b"[" * 100_000),
    (400, "/v1/completions", b"9" * 5000),
    (404, "/v1/embeddings", {"input": "w1"}),
    (400, "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "song"}]}]}),
    (400, "/v1/chat/completions", {"messages": []}),
    (400, "/v1/chat/completions", {"messages": ["w1"]}),
    (400, "/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": 3}),
    (400, "/v1/completions", b"\xff\xfe"),
    (400, "/v1/completions", b"[1"),
]


def test_nonsense_is_answered_and_the_server_goes_on(serve: Serve) -> None:
    server = serve()
    expected = server.complete(words(5))
    for status, path, body in NONSENSE:
        found, answer = post(server, body, path)
        assert found == status, (body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"]
        assert server.complete(words(5)) == expected
        assert json.loads(server.get("/health")) == {"status": "ok"}


def test_what_is_wrong_with_a_prompt_is_said(serve: Serve) -> None:
    server = serve()
    _, answer = post(
        server, {"messages": [{"role": "user", "content": "w1"}], "chat_template_kwargs": 3}, "/v1/chat/completions"
    )
    assert answer["error"]["message"].startswith("the prompt can't be tokenized: ")
    _, answer = post(server, {"prompt": ""})
    assert answer["error"]["message"] == "the prompt is empty: it has to have a token at least"
    _, answer = post(server, {"prompt": "w1", "logit_bias": {"5000": 1}})
    assert answer["error"]["message"] == "logit_bias: the model has 97 tokens, not 5000"
    _, answer = post(server, {"prompt": ["w1", "w2"]})
    assert answer["error"]["message"] == "the prompt has to be one text, not list"
    _, answer = post(server, {"prompt": "w1", "seed": -1})
    assert answer["error"]["message"] == "seed: it has to be from 0 to 18446744073709551615, not -1"
    _, answer = post(server, {"prompt": "w1", "stop": [5]})
    assert answer["error"]["message"] == "stop: it has to be a text or a list of texts, not [5]"
    _, answer = post(server, b"\xff")
    assert answer["error"]["message"].startswith("the request is no JSON text in UTF-8: ")
    _, answer = post(server, b"[1")  # from here on it is mlx-lm that refuses
    assert answer["error"]["message"].startswith("Invalid JSON in request body: ")
    _, answer = post(server, {"prompt": "w1", "max_tokens": "many"})
    assert answer["error"]["message"] == "max_tokens must be of type int"
    refused = server.stats()["requests"]["refused"]
    _, answer = post(server, {"prompt": "w1"}, "/v1/embeddings")
    assert answer["error"] == {
        "message": "Not Found",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_request",
    }
    assert server.stats()["requests"]["refused"] == refused + 1


def test_a_negative_length_is_refused_at_once(serve: Serve) -> None:
    # Read as "until the client goes", it would keep a thread, and a connection, for as long as that.
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: -1\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] == b"400"
    assert b"Content-Length: it can't be negative" in answer


def test_a_request_that_is_too_long_is_refused_before_it_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MOST_BODY", 3_000_000)
    server = serve()
    status, answer = post(server, {"prompt": "w1" + " " * 4_000_000})  # the client sends all of it before it listens
    assert status == 413
    assert answer["error"]["message"] == "the request has 4,000,016 bytes; at most 3,000,000 are taken"
    with pytest.raises(openai.APIStatusError, match="at most 3,000,000 are taken") as caught:
        server.complete("w1" + " " * 4_000_000)
    assert caught.value.status_code == 413
    status, _ = post(server, {"prompt": "w1" + " " * 2_900_000, "max_tokens": 1})
    assert status == 200


def test_a_client_that_sends_no_more_is_let_go(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "SILENT_SECONDS", 0.05)
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 1000000000000\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split()[1] == b"413"


def test_a_model_that_cant_be_had_disturbs_nobody(
    serve: Serve, together: Together, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """It is looked for before the loaded model is given up, and no request waits for that."""
    broken = {
        "unknown": {"model_type": "no_such_architecture"},
        "foreign": {"model_type": "llama", "model_file": "model.py"},
        "bare": {"model_type": "llama"},
        "odd": {"hidden_size": 3},
    }
    for name, config in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = {
        "unknown": "Model type no_such_architecture not supported.",
        "foreign": "it brings code of its own (model.py), and the server runs without --trust-remote-code",
        "bare": f"there is no model*.safetensors in {tmp_path / 'bare'}",
        "odd": "its config.json has no 'model_type'",
        "absent": "there is no such folder, and it can't be fetched: ",
    }
    server = serve()
    prompt = words(40, 2)
    expected = server.complete(prompt, max_tokens=60)
    stored = server.stats()["stored_prompts"]

    def ask(name: str | None) -> Any:
        if name is None:
            return server.complete(prompt, max_tokens=60)
        return server.client.completions.create(model=str(tmp_path / name), prompt="w1", max_tokens=1)

    answers = dict(zip([None, *said], together(ask, [None, *said]), strict=True))
    assert answers.pop(None) == expected
    for name, error in answers.items():
        assert isinstance(error, openai.NotFoundError), (name, error)
        assert error.body["code"] == "model_not_found"
        assert error.body["message"].startswith(f"the model '{tmp_path / name}' can't be had: {said[name]}")
    adapted = {"prompt": "w1", "model": str(model_dir("llama", seed=4)), "adapters": str(tmp_path / "bare")}
    status, answer = post(server, adapted)
    assert (status, answer["error"]["message"]) == (
        404,
        f"the adapter '{tmp_path / 'bare'}' can't be had: there is no adapter_config.json in it",
    )
    _, answer = post(server, {"prompt": "w1", "draft_model": 5})
    assert answer["error"]["message"] == "draft_model: it has to be a name, not 5"
    stats = server.stats()
    assert (stats["stored_prompts"], stats["requests"]["refused"]) == (stored, len(said) + 2)


def test_the_model_of_the_start_is_known_by_other_paths_too(serve: Serve, model_dir: Callable[..., Path]) -> None:
    """Such as the one that /v1/models tells: it is not loaded again for it."""
    server = serve()
    expected, provider = server.complete(words(9)), server.generator.model_provider
    model, folder = provider.model, model_dir("llama")
    (link := folder.parent / "link").symlink_to(folder)
    for name in (str(link), f"{folder.parent}/./{folder.name}", str(folder.resolve())):
        assert server.client.completions.create(model=name, prompt=words(9), max_tokens=24).choices[0].text == expected
    assert provider.model is model


def test_without_a_model_a_request_has_to_name_one(serve: Serve, model_dir: Callable[..., Path]) -> None:
    server = serve()
    provider = server.generator.model_provider
    provider.cli_args.model = provider._model_map["default_model"] = None
    with pytest.raises(openai.NotFoundError, match="started without --model, so a request has to name one"):
        server.complete("w1")
    assert server.client.completions.create(model=str(model_dir("llama")), prompt="w1", max_tokens=1)


def test_without_a_model_requests_say_why(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(folder=tmp_path / "absent")
    (line,) = [line for line in caplog.messages if "could not be loaded, requests that need it will fail: " in line]
    assert "absent" in line
    assert "\n" not in line
    with pytest.raises(Exception, match="503"):
        server.get("/health")
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="absent"):
            server.complete("w1")


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
