"""What can't be understood, or is too long, is refused with the reason; the server goes on."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest
from served import Server, post, words

from tinykv_plugin.serving import handler

Serve = Callable[..., Server]
Together = Callable[..., list[Any]]


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
    (400, "/v1/completions", {"prompt": "w1", "stream": True, "stream_options": 5}),
    (400, "/v1/completions", {"prompt": "w1", "temperature": math.nan}),
    (400, "/v1/completions", {"prompt": "w1", "logit_bias": {"3": math.nan}}),
    (404, "/v1/completions", {"prompt": "w1", "model": ""}),
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
    _, answer = post(server, {"prompt": "w1", "stream": True, "stream_options": []})
    assert answer["error"]["message"] == "stream_options must be of type dict"
    _, answer = post(server, {"prompt": "w1", "min_p": math.nan})
    assert answer["error"]["message"] == "min_p must be a number, not NaN"
    _, answer = post(server, {"prompt": "w1", "logit_bias": {"3": math.nan}})
    assert answer["error"]["message"] == "logit_bias of token 3 must be a number, not NaN"
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


def test_a_stream_without_the_only_option_ends_as_it_should(serve: Serve) -> None:
    server = serve()
    expected = server.complete(words(5))
    stream = server.client.completions.create(
        model="default_model", prompt=words(5), max_tokens=24, stream=True, stream_options={}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


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
