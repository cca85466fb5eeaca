"""Random rows in scattered pages, written through the backend, and their attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.pool import FULL_PRECISION

# Largest error allowed: what rounding inputs of about 1 and the output to the dtype leaves.
TOLERANCE = {mx.float32: 3e-5, mx.bfloat16: 1.6e-2, mx.float16: 2e-3}


@dataclass
class Metadata:
    """What a backend reads of PagedKVMetadata."""

    pages: LayerPages
    block_table: mx.array
    context_lens: mx.array
    query_lens: mx.array
    slot_mapping: mx.array
    window: int | None = None
    keep: int = 0
    open: None = None
    known: bool = True  # whether the block table is there when it is handed over

    @property
    def page_ids(self) -> mx.array:
        """The rows of the block table one after the other."""
        flat = self.block_table.reshape(-1)
        if self.known:
            mx.eval(flat)
        return flat

    @property
    def row_starts(self) -> mx.array:
        rows, width = self.block_table.shape
        return mx.array([row * width for row in range(rows)], dtype=mx.int32)


@dataclass
class Case:
    """``contexts`` tokens per row, of which the last ``query_lens`` (default: ``queries``, or all) are the step's."""

    contexts: Sequence[int]
    queries: int = 1
    query_lens: Sequence[int] | None = None
    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 0
    page_size: int = 16
    dtype: Any = mx.float32
    window: int | None = None
    keep: int = 0
    seed: int = 0
    kv_format: KVFormat = FULL_PRECISION
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.key_dim
        self.scale = self.key_dim**-0.5
        self.query_lens = list(self.query_lens or [min(self.queries, context) for context in self.contexts])

    def fill(self, backend: Any) -> None:
        """Write the rows into pages of a fresh pool where every other slot is NaN."""
        rng = np.random.default_rng(self.seed)
        batch, longest = len(self.contexts), max(1, *self.contexts)
        counts = [-(-context // self.page_size) for context in self.contexts]
        num_pages = sum(counts) + 2
        ids = iter(rng.permutation(num_pages).tolist())
        table = np.full((batch, max(1, *counts) + 1), -1, dtype=np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = [next(ids) for _ in range(count)]
        slots = np.full((batch, longest), -1, dtype=np.int32)
        for row, context in enumerate(self.contexts):
            positions = np.arange(context)
            slots[row, :context] = table[row, positions // self.page_size] * self.page_size + positions % self.page_size

        spec = LayerSpec(self.kv_heads, self.key_dim, self.value_dim, self.dtype, self.dtype).stored_as(self.kv_format)
        pages = LayerPages(spec, self.page_size)
        backend.resize(pages, num_pages)
        self.keys = self._random(rng, (batch, self.kv_heads, longest, self.key_dim))
        self.values = self._random(rng, (batch, self.kv_heads, longest, self.value_dim))
        self.q = self._random(rng, (batch, self.query_heads, self.queries, self.key_dim))
        lens = mx.array(list(self.contexts), dtype=mx.int32)
        query_lens = mx.array(list(self.query_lens or []), dtype=mx.int32)
        poison(backend, pages)
        self.metadata = Metadata(pages, mx.array(table), lens, query_lens, mx.array(slots), self.window, self.keep)
        self._write(backend)
        if self.window is not None and not self.keep:
            # Pages behind every query's window are gone.
            for row, context in enumerate(self.contexts):
                first = max(0, context - int(self.query_lens[row]) + 1 - self.window)  # type: ignore[index]
                table[row, : first // self.page_size] = -1
            self.metadata.block_table = mx.array(table)

    def attend(self, backend: Any, mask: Any = "causal", sinks: Any = None, **more: Any) -> mx.array:
        return backend.attend(self.q, self.metadata, scale=self.scale, mask=mask, sinks=sinks, **more)

    def row(self, index: int) -> Case:
        """The same tokens and queries of one row alone, in other pages of another pool."""
        query_len = int(self.query_lens[index])  # type: ignore[index]
        alone = Case(
            [self.contexts[index]], query_len, [query_len], self.query_heads, self.kv_heads, self.key_dim,
            self.value_dim, self.page_size, self.dtype, self.window, self.keep, self.seed + 1, self.kv_format,
        )  # fmt: skip
        alone._given = (  # type: ignore[attr-defined]
            self.q[index : index + 1, :, :query_len],
            self.keys[index : index + 1, :, : max(1, self.contexts[index])],
            self.values[index : index + 1, :, : max(1, self.contexts[index])],
        )
        return alone

    def refill(self, backend: Any) -> None:
        """As ``fill``, with the arrays that ``row`` handed over."""
        given = self._given  # type: ignore[attr-defined]
        self.fill(backend)
        self.q, self.keys, self.values = given
        self._write(backend)

    def expected(
        self, mask: Any = "causal", sinks: Any = None, softcap: float | None = None
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Attention in float64; zeros for padding and for queries that see nothing."""
        q, keys, values = (_float64(x) for x in (self.q, self.keys, self.values))
        batch, heads, queries, _ = q.shape
        rep = heads // self.kv_heads
        out = np.zeros((batch, heads, queries, self.value_dim))
        limit = min((w for w in (self.window, getattr(mask, "window", None)) if w is not None), default=None)
        keep = self.keep if limit == self.window else 0
        for row, (context, query_len) in enumerate(zip(self.contexts, self.query_lens or [], strict=True)):
            for head in range(heads):
                scores = q[row, head, :query_len] @ keys[row, head // rep, :context].T * self.scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                positions = np.arange(context)[None]
                own = np.arange(context - query_len, context)[:, None]
                visible = np.ones(scores.shape, dtype=bool)
                if mask is not None and not isinstance(mask, mx.array):
                    visible &= positions <= own
                if limit is not None:
                    visible &= (positions > own - (limit - keep)) | ((positions < keep) | (own < limit))
                if isinstance(mask, mx.array):
                    whole = np.broadcast_to(np.array(mask), (batch, heads, queries, mask.shape[-1]))
                    part = whole[row, head, :query_len, :context]
                    if part.dtype == bool:
                        visible &= part
                    else:
                        scores = scores + part
                scores = np.where(visible, scores, -np.inf)
                if sinks is not None:
                    sink = np.full((query_len, 1), float(sinks[head].item()))
                    scores = np.concatenate([scores, sink], axis=1)
                highest = scores.max(axis=1, keepdims=True, initial=-1e300)
                weights = np.exp(scores - highest)
                total = weights.sum(axis=1, keepdims=True)
                weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
                out[row, head, :query_len] = weights[:, :context] @ values[row, head // rep, :context]
        return out

    def _write(self, backend: Any) -> None:
        """Write K and V; what is expected is computed from what the pages then hold."""
        spec = self.metadata.pages.spec
        stored = spec.encode(self.keys.astype(self.dtype), self.values.astype(self.dtype))
        backend.write(self.metadata, *stored)
        # Not rounded to the dtype of the scales.
        self.keys, self.values = spec.decode(*stored, mx.float32)

    def _random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(self.dtype)


def _float64(x: mx.array | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return (np.array(x.astype(mx.float32)) if isinstance(x, mx.array) else x).astype(np.float64)


def poison(backend: Any, pages: LayerPages) -> None:
    """Fill every slot with NaN, or with words that are NaN as scales of any dtype."""
    slots = mx.arange(pages.num_pages * pages.page_size, dtype=mx.int32)[None]
    nan = [
        mx.full((1, pages.spec.kv_heads, slots.size, dim), 0xFFFFFFFF if dtype == mx.uint32 else mx.nan, dtype)
        for dim, dtype in pages.spec.stored
    ]
    nothing = mx.zeros((1,), mx.int32)
    backend.write(Metadata(pages, slots, nothing, nothing, slots), *nan)


def error(got: mx.array, expected: np.ndarray[Any, Any]) -> float:
    """The largest difference; NaN if there is one."""
    return float(np.abs(np.array(got.astype(mx.float32)) - expected).max(initial=0))


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays are equal bit for bit."""
    kind = mx.uint32 if a.dtype == mx.float32 else mx.uint16
    return a.shape == b.shape and bool(mx.all(a.view(kind) == b.view(kind)).item())
