"""A request's own sampler and logits processors, wrapped so that an exception fails that request only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

Sampler = Callable[[mx.array], mx.array]
# Called with a request's uid and the exception its sampler or processor raised.
Report = Callable[[int, Exception], None]


def guard_sampler(uid: int, sampler: Sampler, report: Report) -> Sampler:
    """``sampler``, which on an exception reports it and takes the likeliest token: the row leaves after the step.

    mlx-lm's greedy sampler can't fail and stays as it is: rows that share a sampler are sampled in one call.
    """
    greedy: Sampler = greedy_sampler
    if sampler is greedy:
        return sampler

    def guarded(logprobs: mx.array) -> mx.array:
        try:
            return sampler(logprobs)
        except Exception as error:
            report(uid, error)
            return greedy(logprobs)

    return guarded


def guard_processors(
    uid: int, processors: Sequence[Callable[[Any, mx.array], mx.array]], report: Report
) -> list[Callable[[Any, mx.array], mx.array]]:
    """``processors``, each of which on an exception reports it and leaves the logits as they are."""

    def guard(processor: Callable[[Any, mx.array], mx.array]) -> Callable[[Any, mx.array], mx.array]:
        def guarded(tokens: Any, logits: mx.array) -> mx.array:
            try:
                return processor(tokens, logits)
            except Exception as error:
                report(uid, error)
                return logits

        return guarded

    return [guard(processor) for processor in processors]
