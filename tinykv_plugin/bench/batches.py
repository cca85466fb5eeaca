"""Batches of unlike requests: what they take in time and memory, stock mlx-lm and paged."""

from __future__ import annotations

import contextlib
import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from ..attachment import attach
from ..batching.generator import PagedBatchGenerator
from .ways import STOCK, clean

RATIO = "paged / stock"


@dataclass
class Request:
    """A prompt, the tokens to generate, and after how many decode steps of the others it arrives."""

    prompt: list[int]
    tokens: int
    after: int = 0
    prefix: list[int] = field(default_factory=list)


@dataclass
class Outcome:
    """What one run gave. ``samples`` are the K/V bytes held, as (seconds, bytes), after each step."""

    wall: float
    answers: list[list[int]]
    first: list[float]
    steps: list[float]
    moving: float
    peak_bytes: int
    token_bytes: int
    samples: list[tuple[float, int]]

    def row(self) -> dict[str, float]:
        """The figures of a table's row, by name."""
        generated = sum(map(len, self.answers))
        waits = sorted(self.first)
        return {
            "wall s": self.wall,
            "tokens/s": generated / self.wall,
            "first token p50 s": waits[len(waits) // 2],
            "first token p95 s": waits[min(len(waits) - 1, int(len(waits) * 0.95))],
            "decode step ms": statistics.median(self.steps) * 1e3,
            "K/V peak MB": self.peak_bytes / 1e6,
            # Below zero where rows share pages.
            "padding %": 100 * (1 - self.token_bytes / self.peak_bytes) if self.peak_bytes else 0.0,
            "join/leave ms": self.moving * 1e3,
        }


@contextlib.contextmanager
def timed_moves(spent: list[float]) -> Iterator[None]:
    """Measure joining, leaving, splitting and extracting, what they leave to be evaluated included."""
    patched = []
    for owner, name in (
        (PromptProcessingBatch, "extend"),
        (PromptProcessingBatch, "split"),
        (GenerationBatch, "extend"),
        (GenerationBatch, "filter"),
        (GenerationBatch, "extract_cache"),
    ):
        original = getattr(owner, name)

        def measured(self: Any, *arguments: Any, original: Callable[..., Any] = original) -> Any:
            mx.eval([cache.state for cache in self.prompt_cache])
            start = time.perf_counter()
            result = original(self, *arguments)
            moved = [self.prompt_cache, getattr(result, "prompt_cache", result if isinstance(result, list) else [])]
            mx.eval([cache.state for caches in moved for cache in caches])
            spent.append(time.perf_counter() - start)
            return result

        setattr(owner, name, measured)
        patched.append((owner, name, original))
    try:
        yield
    finally:
        for owner, name, original in patched:
            setattr(owner, name, original)


def run(model: Any, make: Callable[[], Any], requests: Sequence[Request], held: Callable[[Any], int]) -> Outcome:
    """Serve ``requests``; ``held(generator)`` is the K/V bytes it holds right now."""
    clean()
    prefixes: dict[tuple[int, ...], list[Any]] = {}
    for request in requests:
        key = tuple(request.prefix)
        if key and key not in prefixes:
            prefixes[key] = make_prompt_cache(model)
            model(mx.array([request.prefix]), cache=prefixes[key])
            mx.eval([cache.state for cache in prefixes[key]])
    spent: list[float] = []
    with timed_moves(spent):
        generator = make()
        waiting = list(enumerate(requests))
        index_of: dict[int, int] = {}
        answers: list[list[int]] = [[] for _ in requests]
        inserted: dict[int, float] = {}
        first: dict[int, float] = {}
        decoded: list[tuple[int, float]] = []
        steps = 0
        peak = tokens_at_peak = 0
        samples: list[tuple[float, int]] = []
        start = time.perf_counter()
        while waiting or len(first) < len(requests) or generator_busy(generator):
            for index, request in [item for item in waiting if item[1].after <= steps]:
                cache = copy.deepcopy(prefixes[tuple(request.prefix)]) if request.prefix else None
                (uid,) = generator.insert(
                    [request.prompt], [request.tokens], caches=[cache], all_tokens=[list(request.prefix)]
                )
                index_of[uid] = index
                inserted[index] = time.perf_counter()
                waiting.remove((index, request))
            begin = time.perf_counter()
            prompts, generated = generator.next()
            now = time.perf_counter()
            rows = len(generator._generation_batch)
            if generated and not prompts:
                decoded.append((rows, now - begin))
            steps += bool(generated)
            for response in generated:
                index = index_of[response.uid]
                if response.finish_reason == "error":
                    raise response.error
                answers[index].append(response.token)
                first.setdefault(index, now - inserted[index])
            bytes_now = held(generator)
            samples.append((now - start, bytes_now))
            if bytes_now > peak:
                peak = bytes_now
                tokens_at_peak = sum(
                    len(tokens)
                    for batch in (generator._prompt_batch, generator._generation_batch)
                    for tokens in batch.tokens
                )
        wall = time.perf_counter() - start
        generator.close()
    return Outcome(wall, answers, list(first.values()), fullest(decoded), sum(spent), peak, tokens_at_peak, samples)


def fullest(decoded: list[tuple[int, float]]) -> list[float]:
    """The durations of the decode steps that had the most rows."""
    most = max((rows for rows, _ in decoded), default=0)
    return [seconds for rows, seconds in decoded if rows == most] or [0.0]


def generator_busy(generator: Any) -> bool:
    """Whether any request waits or runs."""
    return bool(generator._unprocessed_sequences or len(generator._prompt_batch) or len(generator._generation_batch))


def scenarios(scale: int, known: int) -> dict[str, list[Request]]:
    """The requests of each scenario, of ``known`` tokens; their lengths are divided by ``scale``."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(min(100, known // 2), known) for _ in range(length)]

    answer = max(8, 64 // scale)
    shared = prompt(1000 // scale)
    return {
        "a": [Request(prompt(length // scale or 4), answer) for length in (3000, 500, 10)],
        "b": [
            *(Request(prompt(64 // scale or 4), answer) for _ in range(16)),
            Request(prompt(2048 // scale), answer // 2, after=4),
        ],
        "c": [Request(prompt(rng.choice((16, 32, 64, 128, 512)) // scale or 4), answer // 2) for _ in range(32)],
        "d": [Request(prompt(24), answer, prefix=shared) for _ in range(8)],
    }


@dataclass(frozen=True)
class Compared:
    """Stock and paged, and how many answers are equal. ``rows``: figures by name, of each and as paged / stock."""

    stock: Outcome
    paged: Outcome
    backend: str
    equal: int
    rows: dict[str, dict[str, float]]

    @property
    def losing(self) -> list[str]:
        """Figures that are worse than stock's."""
        ratios = self.rows[RATIO]
        return [key for key, ratio in ratios.items() if ratio != 1 and (ratio < 1) == (key == "tokens/s")]


def compare(model: Any, name: str, requests: Sequence[Request], attention: str = "auto", **settings: Any) -> Compared:
    """Run the requests of scenario ``name`` both ways. In scenario c paged gets the bytes that stock needed."""

    def stock_bytes(generator: Any) -> int:
        # The stored prefix's copy is held as well, but counted in neither run.
        return int(generator.prompt_cache_nbytes)

    options: dict[str, Any] = {"prefill_batch_size": 8, "prefill_step_size": 2048}
    stock_options = dict(options)
    if name == "c":
        stock_options |= {"completion_batch_size": 6, "prefill_batch_size": 6}
    stock = run(model, lambda: BatchGenerator(model, **stock_options), requests, stock_bytes)
    budget: dict[str, Any] = {"memory": max(stock.peak_bytes, 1)} if name == "c" else {}
    with attach(model, attention=attention, **settings, **budget) as kv:
        paged = run(
            model,
            lambda: PagedBatchGenerator(model, **options),
            requests,
            lambda generator: kv.stats().bytes_used,
        )
        per_token = sum(group.token_bytes for group in kv.groups)
        backend = next((line.backend for line in kv.plan if line.kind != "dense"), kv.plan[0].backend)
    for outcome in (stock, paged):
        outcome.token_bytes = int(outcome.token_bytes * per_token)
    equal = sum(a == b for a, b in zip(stock.answers, paged.answers, strict=True))
    first, second = stock.row(), paged.row()
    ratio = {key: second[key] / first[key] if first[key] else float("nan") for key in first}
    return Compared(stock, paged, backend, equal, {STOCK: first, backend: second, RATIO: ratio})
