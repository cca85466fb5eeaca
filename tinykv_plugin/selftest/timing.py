"""How long a decode step's attention takes: dense tensors, gather, and a backend that reads pages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..protocols import AttentionBackend, AttentionRequest
from .outcomes import Outcome
from .sample import Sample

# Calls that are evaluated together, so that starting an evaluation counts for little.
TOGETHER = 8


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call of ``batch`` rows of ``context`` tokens: mlx's attention on tensors, gather, the backend."""

    batch: int
    context: int
    dense: float
    gather: float
    paged: float


def measure(
    backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest, batch: int, context: int
) -> Timing:
    """Time a kind of decode call. Raises what the backend raises, and MemoryError or RuntimeError without memory."""
    sample = Sample(request, [context] * batch)
    keys, values = sample.tokens()
    pages = sample.pages(backend)
    sample.write(backend, pages)
    mx.eval(keys, values, sample.queries, pages.state())
    window = slice(-request.window, None) if request.window is not None else slice(None)
    mask = sample.masks()[0]
    keys, values = mx.contiguous(keys[:, :, window]), mx.contiguous(values[:, :, window])
    mx.eval(keys, values)
    return Timing(
        batch,
        context,
        _milliseconds(
            lambda: mx.fast.scaled_dot_product_attention(
                sample.queries, keys, values, scale=sample.scale, sinks=sample.sinks
            )
        ),
        _milliseconds(lambda: sample.attend(gather, pages, mask)),
        _milliseconds(lambda: sample.attend(backend, pages, mask)),
    )


def outcome_of(timings: Sequence[Timing]) -> Outcome:
    """From which context on the backend is faster than gather, for single rows and for batches."""
    return Outcome(
        _gather_below([timing for timing in timings if timing.batch == 1]),
        _gather_below([timing for timing in timings if timing.batch > 1]),
    )


def _gather_below(timings: Sequence[Timing]) -> int:
    """The shortest measured context from which on gather is never faster by more than chance; 0 if it never is."""
    slower = [timing.context for timing in timings if timing.paged > 1.05 * timing.gather]
    if not slower:
        return 0
    longer = [timing.context for timing in timings if timing.context > max(slower)]
    return min(longer) if longer else max(slower) + 1


def _milliseconds(call: Callable[[], mx.array], seconds: float = 0.2) -> float:
    """The median time of one call."""
    mx.eval(call())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval([call() for _ in range(TOGETHER)])
        times.append((time.perf_counter() - start) / TOGETHER)
    return statistics.median(times) * 1e3
