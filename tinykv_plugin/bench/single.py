"""One request: time to the first token and decode speed."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from .ways import Way, attached, clean, random_prompt


@dataclass(frozen=True)
class Single:
    """Seconds to the first token, decode tokens/s (from the median step), the tokens; medians of ``runs``."""

    first_token: float
    tokens_per_second: float
    tokens: list[int]
    runs: int = 1


def generate(model: Any, length: int, tokens: int, known: int) -> Single:
    """Answer a random prompt of ``length`` of the ``known`` tokens with ``tokens`` tokens, greedily."""
    clean()
    prompt = mx.array(random_prompt(length, length, known))
    times, found = [], []
    start = time.perf_counter()
    for token, _ in generate_step(prompt, model, max_tokens=tokens, prefill_step_size=512):
        times.append(time.perf_counter())
        found.append(int(token))
    return Single(times[0] - start, _speed(times), found)


def decode_at(model: Any, context: int, tokens: int, way: Way) -> float:
    """Decode tokens/s after ``context`` tokens whose K/V are random: what matters here is how many there are."""
    one = make_prompt_cache(model)
    model(mx.array([[7]]), cache=one)  # not evaluated: the shapes are wanted
    shapes = [[(*side.shape[:2], context, side.shape[3]) for side in layer.state[:2]] for layer in one]
    del one
    with attached(model, way):
        clean()
        cache = make_prompt_cache(model)
        for layer, sizes in zip(cache, shapes, strict=True):
            layer.update_and_fetch(*(mx.random.normal(size) for size in sizes))
            mx.eval(layer.state)
        steps = generate_step(mx.array([7]), model, max_tokens=tokens, prompt_cache=cache)
        return _speed([time.perf_counter() for _ in steps][2:])


def compare(
    model: Any,
    length: int,
    tokens: int,
    known: int,
    wanted: dict[str, Way],
    repeats: int,
    seconds: float = float("inf"),
) -> dict[str, Single]:
    """Each way ``repeats`` times, taking turns; medians. After the first turn only what fits into ``seconds``."""
    runs: dict[str, list[Single]] = {name: [] for name in wanted}
    start = time.perf_counter()
    for done in range(1, repeats + 1):
        for name, way in wanted.items():
            with attached(model, way):
                runs[name].append(generate(model, length, tokens, known))
        spent = time.perf_counter() - start
        if spent + spent / done > seconds:
            break
    return {
        name: Single(
            statistics.median(run.first_token for run in found),
            statistics.median(run.tokens_per_second for run in found),
            found[0].tokens,
            len(found),
        )
        for name, found in runs.items()
    }


def _speed(times: list[float]) -> float:
    steps = [b - a for a, b in itertools.pairwise(times)]
    return 1 / statistics.median(steps) if steps else 0.0
