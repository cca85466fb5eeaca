"""Calls of attention to be timed: mlx's dense one, and a backend's on pages in random order."""

from __future__ import annotations

import os
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.journal import Journal
from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.metadata import PagedKVMetadata
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.pool import FULL_PRECISION
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.retention import Retention
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable

COLD_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """One case: rows with their context lengths, heads, and query tokens per row."""

    name: str
    contexts: tuple[int, ...]
    query_heads: int
    kv_heads: int
    dim: int
    queries: int = 1

    def cut(self, longest: int) -> Shape:
        """The same with at most ``longest`` tokens in a row."""
        contexts = tuple(min(context, longest) for context in self.contexts)
        return replace(self, contexts=contexts, queries=min(self.queries, longest))

    def kv_bytes(self, dtype: mx.Dtype) -> int:
        return 2 * sum(self.contexts) * self.kv_heads * self.dim * dtype.size


class MemoryLoop:
    """Reads a large array with as many threads as there are processors; each pass is timed."""

    def __init__(self, megabytes: int = 256) -> None:
        threads = os.cpu_count() or 1
        self._parts = [np.ones((megabytes << 20) // 4 // threads, dtype=np.float32) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self.times: list[float] = []
        self()
        self.times.clear()

    def __call__(self) -> None:
        start = time.perf_counter()
        list(self._pool.map(np.max, self._parts))
        self.times.append(time.perf_counter() - start)

    def some(self) -> None:
        """A few passes."""
        for _ in range(5):
            self()

    def speed(self) -> float:
        """The median GB/s of the passes so far."""
        return sum(part.nbytes for part in self._parts) / statistics.median(self.times) / 1e9


def median_ms(calls: list[Callable[[], Any]], seconds: float) -> float:
    """The median time of one call; the calls take turns, so that each finds its data out of the caches.

    A call that takes longer than ``seconds`` is timed once more only.
    """
    mx.eval(calls[0]())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while True:
        for call in calls:
            start = time.perf_counter()
            mx.eval(call())
            times.append(time.perf_counter() - start)
            if time.perf_counter() > end and (len(times) >= 3 or times[-1] > seconds):
                return statistics.median(times) * 1e3


def medians_ms(cases: dict[str, list[Callable[[], Any]]], seconds: float) -> dict[str, float]:
    """As :func:`median_ms` for several cases that take turns, so that what disturbs a shared machine disturbs all."""
    for calls in cases.values():
        mx.eval(calls[0]())
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 3 or time.perf_counter() < end:
        for name, calls in cases.items():
            start = time.perf_counter()
            mx.eval(calls[turn % len(calls)]())
            times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def stay_in_cache() -> None:
    """From now on every call reads the same tokens, which stay in the processor's cache if they fit."""
    global COLD_BYTES
    COLD_BYTES = 0


def copies_for(shape: Shape, dtype: mx.Dtype) -> int:
    return max(1, min(16, COLD_BYTES // shape.kv_bytes(dtype)))


def some_tokens(shape: Shape, context: int, dtype: mx.Dtype) -> mx.array:
    """A row's keys or values, ``(1, kv_heads, context, dim)``: a few random ones again and again, which is quick."""
    few = mx.random.normal((1, shape.kv_heads, min(context, 256), shape.dim)).astype(dtype)
    return mx.contiguous(mx.tile(few, (1, 1, -(-context // few.shape[2]), 1))[:, :, :context])


def dense(shape: Shape, dtype: mx.Dtype, seconds: float) -> float:
    """The median time of :func:`dense_calls`."""
    return median_ms(dense_calls(shape, dtype), seconds)


def dense_calls(shape: Shape, dtype: mx.Dtype) -> list[Callable[[], mx.array]]:
    """Mlx's own attention on tensors padded to the longest row, as a batch of stock mlx-lm has them."""
    rows, longest = len(shape.contexts), max(shape.contexts)
    queries = mx.random.normal((rows, shape.query_heads, shape.queries, shape.dim)).astype(dtype)
    mask: Any = "causal" if shape.queries > 1 else None
    if len(set(shape.contexts)) > 1:
        mask = (mx.arange(longest)[None] < mx.array(shape.contexts)[:, None])[:, None, None]
    copies = copies_for(shape, dtype) if rows * longest * shape.kv_heads * shape.dim < 2**26 else 1
    tensors = [
        tuple(mx.tile(some_tokens(shape, longest, dtype), (rows, 1, 1, 1)) for _ in range(2)) for _ in range(copies)
    ]
    mx.eval(queries, tensors)
    scale = shape.dim**-0.5
    return [
        lambda keys=keys, values=values: mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask
        )
        for keys, values in tensors
    ]


def paged(
    shape: Shape,
    dtype: mx.Dtype,
    page_size: int,
    backend: Any,
    writer: Any,
    seconds: float,
) -> float | None:
    """The median time of :func:`paged_calls`; None if the backend doesn't support the case."""
    calls = paged_calls(shape, dtype, page_size, backend, writer)
    return None if calls is None else median_ms(calls, seconds)


def paged_calls(
    shape: Shape,
    dtype: mx.Dtype,
    page_size: int,
    backend: Any,
    writer: Any,
    kv_format: KVFormat = FULL_PRECISION,
) -> list[Callable[[], mx.array]] | None:
    """A backend on pages in random order; None if it doesn't support the case."""
    spec = LayerSpec(shape.kv_heads, shape.dim, shape.dim, dtype, dtype).stored_as(kv_format)
    mask = "causal" if shape.queries > 1 else None
    request = AttentionRequest(
        shape.query_heads, shape.kv_heads, shape.dim, shape.dim, dtype, page_size, shape.queries, mask or "none", None,
        0, False,
    )  # fmt: skip
    if backend.supports(request):
        return None
    journal = Journal()
    allocator = PageAllocator(journal)
    total = sum(-(-context // page_size) for context in shape.contexts)
    allocator.resize(total)
    order = np.random.default_rng(0).permutation(allocator.allocate(total)).tolist()
    tables = []
    for context in shape.contexts:
        table = PageTable(allocator, journal, page_size, Retention())
        table.append([order.pop() for _ in range(-(-context // page_size))])
        tables.append(table)
    layers = [LayerPages(spec, page_size, kv_format.opens) for _ in range(copies_for(shape, dtype))]
    opened = [_open_table(allocator, journal, page_size, *row) for row in enumerate(shape.contexts)]
    for pages in layers:
        writer.resize(pages, total)
        if pages.open is not None:
            writer.resize(pages.open, len(opened))
    for table, open_table, context in zip(tables, opened, shape.contexts, strict=True):
        step, open_step = (GroupStep([one], [context], [context], context) for one in (table, open_table))
        tokens = [some_tokens(shape, context, dtype) for _ in range(2)]
        stored = spec.encode(*tokens)
        for pages in layers:
            writer.write(PagedKVMetadata(pages, step), *stored)
            if pages.open is not None:
                writer.write(PagedKVMetadata(pages.open, open_step), *tokens)
        mx.eval([pages.state() for pages in layers])
    queries = mx.random.normal((len(tables), shape.query_heads, shape.queries, shape.dim)).astype(dtype)
    mx.eval(queries)
    step, step.open = (
        GroupStep(each, list(shape.contexts), [shape.queries] * len(tables), shape.queries) for each in (tables, opened)
    )
    return [
        lambda pages=pages: backend.attend(
            queries, PagedKVMetadata(pages, step, pages.open), scale=shape.dim**-0.5, mask=mask, sinks=None
        )
        for pages in layers
    ]


def _open_table(allocator: PageAllocator, journal: Journal, page_size: int, row: int, context: int) -> PageTable:
    """The table of a row that has only its last page among the open ones, as page ``row``."""
    table = PageTable(allocator, journal, page_size, Retention(page=page_size))
    table.dropped = max(0, -(-context // page_size) - 1)
    table.pages = array("i", [-1] * table.dropped + [row])
    return table
