"""estimate(): how long requests will take, from what was measured before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .batches import Request
from .ways import STOCK

Row = dict[str, Any]

ATTENTION_TOKENS = 1024
"""From how many tokens on attention is most of the work. That of larger models is higher, so the estimate is safe."""


def estimate(results: dict[str, Any], requests: Sequence[Request], ways: Sequence[str]) -> float | None:
    """Seconds to answer ``requests`` in all of ``ways``, rather more than less; None before anything is measured.

    Stock mlx-lm pads the prompts that arrive together to the longest of them.
    """
    total = 0.0
    for way in ways:
        single = [row for row in results["single"] if row["way"] == way]
        if not single:
            return None
        longest: dict[int, int] = {}
        for request in requests:
            longest[request.after] = max(longest.get(request.after, 0), len(request.prompt))
        lengths = [longest[request.after] if way == STOCK else len(request.prompt) for request in requests]
        lengths += map(len, {tuple(request.prefix) for request in requests})
        speeds = [row["tokens_per_s"] for row in (*single, *results["batch"]) if row["way"] == way]
        total += sum(_first_token(single, length) for length in lengths)
        total += sum(request.tokens for request in requests) / (max(speeds) or 1.0)
    return total


def _first_token(single: Sequence[Row], length: int) -> float:
    """By the nearest length that was measured."""
    nearest = min(single, key=lambda row: abs(row["prompt"] - length))
    ratio: float = _work(length) / _work(nearest["prompt"])
    return float(nearest["first_token_s"]) * ratio


def _work(length: int) -> float:
    """A prompt's, in tokens: attention, which goes with the square, equals the rest at :data:`ATTENTION_TOKENS`."""
    return length * (1 + length / ATTENTION_TOKENS)
