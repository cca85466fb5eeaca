"""SmolLM2-135M: stock mlx-lm's tokens, from pages of every size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import greedy

import tinykv_plugin as tinykv

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list, and explain how it works.",
    "List five cities in Europe with one sentence on each of them.",
    "What is 17 times 23? Work it out step by step.",
    "Tell a very short story about a lighthouse keeper who found a letter on the beach.",
    "Translate to French: the cat sleeps on the warm stone wall.",
)


class Stock:
    """Stock's tokens, computed once."""

    def __init__(self, model: Any, prompts: list[list[int]], long: list[int], extent: Any) -> None:
        self.prompts = prompts
        self.long = long
        self.step = extent.step
        self.count = extent.tokens
        self.tokens = [greedy(model, prompt, self.count) for prompt in prompts]
        self.long_tokens = self.after_long(model)

    def after_long(self, model: Any, cache: Any = None) -> list[int]:
        return greedy(model, self.long, 8, cache=cache, prefill_step_size=self.step)


@pytest.fixture(scope="module")
def model_and_tokenizer(smollm2_path: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(smollm2_path))


@pytest.fixture(scope="module")
def model(model_and_tokenizer: tuple[Any, Any]) -> Any:
    return model_and_tokenizer[0]


@pytest.fixture(scope="module")
def chat(model_and_tokenizer: tuple[Any, Any]) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return list(model_and_tokenizer[1].apply_chat_template(messages, add_generation_prompt=True))

    return encode


@pytest.fixture(scope="module")
def stock(model: Any, chat: Callable[[str], list[int]], extent: Any) -> Stock:
    prompts = [chat(text) for text in PROMPTS[: extent.prompts]]
    story = " ".join(f"Chapter {number}. {text}" for number, text in enumerate(PROMPTS * 60))
    return Stock(model, prompts, chat(story)[: extent.long], extent)


def test_the_oracle_says_something_sensible(stock: Stock, model_and_tokenizer: tuple[Any, Any], extent: Any) -> None:
    text = model_and_tokenizer[1].decode(stock.tokens[0])
    assert "sky appears blue" in text, text
    assert len(stock.long) == extent.long


def test_short_prompts_give_the_tokens_of_stock(page_size: int, model: Any, stock: Stock) -> None:
    with tinykv.attach(model, page_size=page_size) as kv:
        caches = [make_prompt_cache(model) for _ in stock.prompts]
        for prompt, cache, tokens in zip(stock.prompts, caches, stock.tokens, strict=True):
            assert greedy(model, prompt, stock.count, cache=cache) == tokens
        kv.check()
        # mlx-lm runs one token ahead of what it returns.
        lengths = [len(prompt) + stock.count for prompt in stock.prompts]
        assert [cache[0].offset for cache in caches] == lengths
        assert kv.stats().pages_used == sum(-(-length // page_size) for length in lengths)
        assert kv.stats().slots_filled == sum(lengths)


def test_a_long_prompt_in_pieces_gives_the_tokens_of_stock(page_size: int, model: Any, stock: Stock) -> None:
    with tinykv.attach(model, page_size=page_size) as kv:
        cache = make_prompt_cache(model)
        assert stock.after_long(model, cache) == stock.long_tokens
        kv.check()
        assert kv.stats().waste == pytest.approx(-cache[0].offset % page_size / kv.stats().slots_used, abs=1e-9)
