"""What clients get is what they get from stock's server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import openai
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from served import Server, wait_until, words

import tinykv_plugin as tinykv

Serve = Callable[..., Server]
Stock = Callable[..., Server]

PROMPTS = [words(9, 1), words(40, 2), words(1, 3), words(23, 4)]
QUESTION = [{"role": "system", "content": words(6, 5)}, {"role": "user", "content": words(9, 6)}]


def streamed(server: Server, prompt: str, **fields: Any) -> tuple[str, str | None, list[int]]:
    """Text, finish reason, and the length of each piece."""
    pieces, finish = [], None
    for chunk in server.client.completions.create(
        model="default_model", prompt=prompt, max_tokens=24, stream=True, **fields
    ):
        pieces.append(chunk.choices[0].text)
        finish = chunk.choices[0].finish_reason or finish
    return "".join(pieces), finish, [len(piece) for piece in pieces]


# Of gemma3 every second layer has a window, of qwen3_next every second one is recurrent.
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_texts_equal_stock(serve: Serve, stock: Stock, kind: str) -> None:
    ours, theirs = serve(kind), stock(kind)
    for prompt in PROMPTS:
        assert ours.complete(prompt) == theirs.complete(prompt)
        assert streamed(ours, prompt) == streamed(theirs, prompt)
    mine, yours = ours.chat(QUESTION), theirs.chat(QUESTION)
    assert mine.choices[0].message.content == yours.choices[0].message.content
    assert mine.choices[0].finish_reason == yours.choices[0].finish_reason


OPTIONS: list[dict[str, Any]] = [
    {"logprobs": True},
    {"extra_body": {"top_logprobs": 3}},
    {"stop": ["w12", "w30 w5"]},
    {"logit_bias": {"7": -100.0, "9": 4.0}},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"seed": 7, "temperature": 0.8},
    {"extra_body": {"repetition_penalty": 1.3, "top_k": 4}, "seed": 3, "temperature": 1.2},
    {"extra_body": {"xtc_probability": 0.5}, "seed": 3, "temperature": 1.2},
]


def test_options_do_what_they_do_in_stock(serve: Serve, stock: Stock) -> None:
    def ask(server: Server, prompt: str, fields: dict[str, Any]) -> Any:
        # What a penalty counts in stock depends on what of a prompt was stored.
        server.generator.prompt_cache.trim_to(n_sequences=0)
        answer = server.client.completions.create(model="default_model", prompt=prompt, max_tokens=24, **fields)
        return answer.choices[0].to_dict()

    ours, theirs = serve(), stock()
    for fields in OPTIONS:
        for prompt in PROMPTS[:2]:
            assert_close(ask(ours, prompt, fields), ask(theirs, prompt, fields))


def assert_close(mine: Any, yours: Any) -> None:
    """Equal, but for numbers that were computed in another order."""
    if isinstance(mine, dict):
        assert mine.keys() == yours.keys()
        for key, value in mine.items():
            assert_close(value, yours[key])
    elif isinstance(mine, list):
        assert len(mine) == len(yours)
        for one, other in zip(mine, yours, strict=True):
            assert_close(one, other)
    else:
        assert mine == (pytest.approx(yours, abs=1e-3) if isinstance(yours, float) else yours)


def test_draft_model(serve: Serve, stock: Stock, model_dir: Callable[..., Path]) -> None:
    draft = str(model_dir("llama", num_hidden_layers=2, seed=5))
    ours, theirs = serve(draft_model=draft), stock(draft_model=draft)
    for prompt in PROMPTS:
        expected = theirs.complete(prompt)
        # Stock stores one token too many after such a request: asked again, it answers something else.
        assert ours.complete(prompt) == ours.complete(prompt) == expected
    assert ours.metric("tinykv_prompt_tokens_total", source="reused") == sum(len(p.split()) - 1 for p in PROMPTS)
    assert set(ours.stats()["pools"]) == {"main", "draft"}


def test_r40_a_hybrid_model_with_a_draft_model(serve: Serve, stock: Stock, model_dir: Callable[..., Path]) -> None:
    """Stock refuses the first request."""
    draft = str(model_dir("llama", num_hidden_layers=2, seed=5))
    ours, theirs = serve("qwen3_next", draft_model=draft), stock("qwen3_next")
    for prompt in PROMPTS:
        assert ours.complete(prompt) == theirs.complete(prompt)


def test_r39_more_drafts_than_can_be_taken_back_are_the_clients_error(serve: Serve, model_dir: Any) -> None:
    server = serve("gemma3_text", draft_model=str(model_dir("llama", num_hidden_layers=2, seed=5)))
    expected = server.complete(PROMPTS[0])
    with pytest.raises(openai.BadRequestError, match=r"rewind: 16 is too small for these drafts: .*--kv-rewind 40"):
        server.complete(PROMPTS[0], extra_body={"num_draft_tokens": 40})
    assert server.complete(PROMPTS[0], extra_body={"num_draft_tokens": 16}) == expected


@pytest.mark.parametrize(
    ("rewind", "drafts", "reason"),
    [
        (4, 5, r"^rewind: 4 is too small for these drafts: .* 8 tokens must keep 5 more, .* \(--kv-rewind 5\)"),
        (16, 17, r"^rewind: 16 is too small for these drafts: .* \(--kv-rewind 17\)"),
    ],
)
def test_drafts_that_can_not_be_are_refused_at_the_start(
    serve: Serve, model_dir: Any, caplog: pytest.LogCaptureFixture, rewind: int, drafts: int, reason: str
) -> None:
    draft = str(model_dir("llama", num_hidden_layers=2, seed=5))
    server = serve("gemma3_text", draft_model=draft, num_draft_tokens=drafts, rewind=rewind)
    wait_until(lambda: not server.generator.is_healthy, what="the refusal")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tinykv"]
    assert re.search(reason, line)
    with pytest.raises(Exception, match="503"):
        server.get("/health")
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="is too small for these drafts"):
            server.complete(PROMPTS[0])
    assert server.stats()["pools"]["main"]["pages_used"] == 0


def test_a_draft_model_that_can_not_take_back_is_refused_at_the_start(
    serve: Serve, model_dir: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StrangeCache(KVCache):
        """Of a kind nobody knows: it stays as it is."""

    monkeypatch.setattr(llama.Model, "make_cache", lambda own: [StrangeCache() for _ in own.layers], raising=False)
    server = serve("gemma3_text", draft_model=str(model_dir("llama", num_hidden_layers=2, seed=5)))
    wait_until(lambda: not server.generator.is_healthy, what="the refusal")
    assert "drafts can't be used with this model: its StrangeCache can't take tokens back" in caplog.text
    with pytest.raises(openai.BadRequestError, match="drafts can't be used with this model"):
        server.complete(PROMPTS[0])


@pytest.mark.parametrize(
    ("kind", "draft", "settings"),
    [
        ("gemma3_text", "gemma3_text", {"key_bits": 8, "value_bits": 4}),
        ("qwen3_next", "llama", {"bits": 5, "max_kv_size": 24}),
    ],
)
def test_quantized_pages_with_a_draft_model(
    serve: Serve, together: Callable[..., list[Any]], model_dir: Any, kind: str, draft: str, settings: dict[str, int]
) -> None:
    """Both models' pages are quantized; the texts are those of the model alone."""
    folder = model_dir(kind, head_dim=32)
    model, tokenizer = mlx_lm.load(str(folder))
    with tinykv.attach(model, page_size=4, **settings):
        alone = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=24) for prompt in PROMPTS]
    server = serve(kind, folder=folder, draft_model=str(model_dir(draft, head_dim=32, seed=5)), **settings)
    for _ in range(2):
        assert together(server.complete, PROMPTS) == alone


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_r48_quantized_pages(serve: Serve, together: Callable[..., list[Any]], model_dir: Any, kind: str) -> None:
    """Together and with stored prompts, the texts are those of each request alone."""
    folder = model_dir(kind, head_dim=32)
    model, tokenizer = mlx_lm.load(str(folder))
    with tinykv.attach(model, bits=8):
        alone = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=24) for prompt in PROMPTS]
    server = serve(kind, folder=folder, bits=8)
    assert together(server.complete, PROMPTS) == alone
    assert together(server.complete, PROMPTS) == alone
    assert server.metric("tinykv_prompt_tokens_total", source="reused") > 0


def test_usage(serve: Serve) -> None:
    server = serve()
    answer = server.client.completions.create(model="default_model", prompt=words(9), max_tokens=5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 5)
    *_, last = server.client.completions.create(
        model="default_model", prompt=words(9), max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    assert (last.usage.prompt_tokens, last.usage.prompt_tokens_details.cached_tokens) == (9, 8)


def test_other_paths_are_stocks(serve: Serve, stock: Stock) -> None:
    ours, theirs = serve(), stock()
    assert ours.get("/health") == theirs.get("/health") == '{"status": "ok"}'
    with pytest.raises(Exception, match="404"):
        ours.get("/no/such/path")


@pytest.mark.parametrize(
    ("kind", "draft", "settings"),
    [
        ("llama", "gemma3_text", {}),
        ("gemma3_text", "llama", {}),
        ("qwen3_next", "llama", {}),
        ("llama", "llama", {"max_kv_size": 48}),
    ],
)
def test_a_chat_with_a_draft_model_runs_only_what_is_new(
    serve: Serve, model_dir: Callable[..., Path], kind: str, draft: str, settings: dict[str, int]
) -> None:
    """The first turn again, and a turn that continues it: the answers are the model's own without stored prompts."""
    first = [{"role": "user", "content": words(40)}]
    alone = serve(kind, **settings, prefix_cache=0)
    server = serve(kind, draft_model=str(model_dir(draft, num_hidden_layers=2, seed=5)), **settings)

    def ask(messages: list[dict[str, str]], most: int) -> str:
        answer, expected = (each.chat(messages, max_tokens=12) for each in (server, alone))
        text: str = answer.choices[0].message.content
        assert text == expected.choices[0].message.content
        usage = answer.usage
        assert usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens <= most
        return text

    ask(first, 100)
    text = ask(first, 4)
    # Its answer is stored but for its last token, which was not run; a page's tokens at most are run again.
    ask([*first, {"role": "assistant", "content": text}, {"role": "user", "content": words(5, 3)}], 5 + 4 + 4)
