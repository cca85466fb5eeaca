"""batch_generate(): mlx-lm's function, within the page budget and with failures per prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchResponse

from ..errors import TinyKVError
from .generator import PagedBatchGenerator


@dataclass
class PagedBatchResponse(BatchResponse):  # type: ignore[misc]
    """mlx-lm's response, and for each prompt the error that ended it (None: it finished)."""

    errors: list[Exception | None] = field(default_factory=list)


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cache: list[Any] | None = None
    error: Exception | None = None


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> PagedBatchResponse:
    """Answers to ``prompts`` (lists of token ids) from an attached ``model``, as mlx-lm's function of the same name.

    A prompt that can never fit the budget, or whose sampler or processor raises, gets its exception in ``errors`` and
    what it had generated in ``texts``; the others are not affected. Caches in ``prompt_caches`` are not modified.
    ``options`` go to :class:`~tinykv_plugin.batching.generator.PagedBatchGenerator`.
    """
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    caches = list(prompt_caches) if prompt_caches is not None else [None] * len(prompts)
    generator = PagedBatchGenerator(model, stop_tokens=[[token] for token in tokenizer.eos_token_ids], **options)
    answers = [_Answer() for _ in prompts]
    by_uid: dict[int, _Answer] = {}
    try:
        for answer, prompt, limit, cache in zip(answers, prompts, limits, caches, strict=True):
            try:
                (uid,) = generator.insert([list(prompt)], [limit], caches=[cache])
                by_uid[uid] = answer
            except TinyKVError as error:
                answer.error = error.with_traceback(None)
        with generator.stats() as stats:
            while responses := generator.next_generated():
                for response in responses:
                    _take(by_uid[response.uid], response, return_logprobs, return_prompt_caches)
                    if verbose and response.finish_reason is not None:
                        _say(f"{len(answers) - generator.waiting - generator.running}/{len(answers)} prompts finished")
    finally:
        generator.close()
    if verbose:
        _say(f"prompts: {stats.prompt_tokens} tokens; answers: {stats.generation_tokens} tokens", end="\n")
    return PagedBatchResponse(
        [tokenizer.decode(answer.tokens) for answer in answers],
        stats,
        [answer.cache for answer in answers] if return_prompt_caches else None,
        [answer.tokens for answer in answers] if return_token_ids else None,
        [answer.logprobs for answer in answers] if return_logprobs else None,
        [answer.error for answer in answers],
    )


def _take(answer: _Answer, response: Any, logprobs: bool, cache: bool) -> None:
    if response.finish_reason == "error":
        answer.error = response.error
        return
    if response.finish_reason != "stop":
        answer.tokens.append(response.token)
        if logprobs:
            answer.logprobs.append(response.logprobs[response.token].item())
    if cache and response.finish_reason is not None:
        answer.cache = response.prompt_cache


def _say(text: str, end: str = "\r") -> None:
    print(f"[batch_generate] {text}", end=end, file=sys.stderr, flush=True)
