"""Random rows in scattered pages, and their attention in float64."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.journal import Journal
from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.pool import FULL_PRECISION
from tinykv_plugin.retention import Retention
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable

# Largest error allowed, see error(). Sums are formed in float32 whatever the dtype, so for the half types nothing is
# left but the rounding of the output to 11 and 8 bits; float32 feels the order of up to 5,000 additions instead.
TOLERANCE = {mx.float32: 5e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}


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
    layout: str = "random"  # of the pages: "random", "reversed", or "shared": all rows begin with row 0's pages
    seed: int = 0
    kv_format: KVFormat = FULL_PRECISION

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.key_dim
        self.scale = self.key_dim**-0.5
        self.query_lens = list(self.query_lens or [min(self.queries, context) for context in self.contexts])
        rng = np.random.default_rng(self.seed)
        counts = [-(-context // self.page_size) for context in self.contexts]
        shared = counts[0] if self.layout == "shared" else 0
        num_pages = sum(counts) + 2
        ids = list(range(num_pages)) if self.layout == "reversed" else rng.permutation(num_pages).tolist()
        tables = []
        for count in counts:
            first = tables[0][: min(shared, count)] if tables else []
            tables.append(first + [ids.pop() for _ in range(count - len(first))])
        journal = Journal()
        retention = Retention(self.window, self.keep)
        made = [PageTable(PageAllocator(journal), journal, self.page_size, retention) for _ in tables]
        for row, (table, pages) in enumerate(zip(made, tables, strict=True)):
            if self.window is not None:
                # As a window drops them: nothing may look at these entries.
                first = retention.first_needed(self.contexts[row] - self.query_lens[row]) // self.page_size
                kept = -(-self.keep // self.page_size)
                pages = pages[:kept] + [-1] * max(0, first - kept) + pages[max(first, kept) :]
            table.pages = array("i", pages)
        spec = LayerSpec(self.kv_heads, self.key_dim, self.value_dim, self.dtype, self.dtype).stored_as(self.kv_format)
        self.pages = LayerPages(spec, self.page_size)
        self.full_tables = tables
        self.step = GroupStep(made, list(self.contexts), self.query_lens, self.queries)
        self.metadata = PagedKVMetadata(self.pages, self.step)
        self.num_pages = num_pages
        self.q = self._random(rng, (len(tables), self.query_heads, self.queries, self.key_dim))
        shape = (num_pages, self.kv_heads, self.page_size)
        self._stored = spec.encode(
            self._random(rng, (*shape, self.key_dim)), self._random(rng, (*shape, self.value_dim))
        )
        self._keys, self._values = spec.decode(*self._stored, mx.float32)

    def fill(self, backend: Any) -> Case:
        """Put the tokens into a pool where every other slot is NaN."""
        held = np.zeros((self.num_pages, 1, self.page_size, 1), bool)
        for table, context in zip(self.full_tables, self.contexts, strict=True):
            for position in range(context):
                held[table[position // self.page_size], 0, position % self.page_size] = True
        backend.resize(self.pages, self.num_pages)
        # Quantized, words that are NaN as scales of any dtype.
        keys, values = (
            mx.where(mx.array(held), side, mx.array(0xFFFFFFFF if side.dtype == mx.uint32 else mx.nan, side.dtype))
            for side in self._stored
        )
        self.pages.keys, self.pages.values = keys, values
        mx.eval(self.pages.keys, self.pages.values)
        return self

    def attend(self, backend: Any, mask: Any = "causal", sinks: Any = None, **more: Any) -> mx.array:
        return backend.attend(self.q, self.metadata, scale=self.scale, mask=mask, sinks=sinks, **more)

    def row(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """K and V of a row, ``(kv_heads, tokens, dim)``, in float64."""
        context = self.contexts[index]
        positions = np.arange(context)
        pages = np.array(self.full_tables[index], dtype=int)[positions // self.page_size] if context else positions
        return tuple(  # type: ignore[return-value]
            wide(side)[pages, :, positions % self.page_size].transpose(1, 0, 2) for side in (self._keys, self._values)
        )

    def expected(self, mask: Any = "causal", sinks: Any = None, softcap: float | None = None) -> np.ndarray[Any, Any]:
        """Attention in float64; zeros for padding and for queries that see nothing."""
        queries = wide(self.q)
        batch, heads, width, _ = queries.shape
        group = heads // self.kv_heads
        out = np.zeros((batch, heads, width, self.value_dim))
        limits = [w for w in (self.window, getattr(mask, "window", None)) if w is not None]
        limit = min(limits, default=None)
        keep = self.keep if limit == self.window else 0
        for row in range(batch):
            keys, values = self.row(row)
            context, count = self.contexts[row], self.query_lens[row]  # type: ignore[index]
            positions, own = np.arange(context)[None], np.arange(context - count, context)[:, None]
            seen = np.ones((count, context), bool)
            if isinstance(mask, str | PagedMask):
                seen &= positions <= own
            if limit is not None:
                seen &= (positions > own - (limit - keep)) | (positions < keep) | (own < limit)
            for head in range(heads):
                scores = queries[row, head, :count] @ keys[head // group].T * self.scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                visible = seen
                if isinstance(mask, mx.array):
                    part = np.broadcast_to(np.array(mask), (batch, heads, width, mask.shape[-1]))[
                        row, head, :count, :context
                    ]
                    visible = seen & part if part.dtype == bool else seen
                    scores = scores if part.dtype == bool else scores + part
                scores = np.where(visible, scores, -np.inf)
                if sinks is not None:
                    scores = np.concatenate([scores, np.full((count, 1), float(sinks[head]))], axis=1)
                top = scores.max(axis=1, keepdims=True, initial=-1e300)
                weights = np.where(scores == -np.inf, 0, np.exp(scores - top))
                total = weights.sum(axis=1, keepdims=True)
                weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
                out[row, head, :count] = weights[:, :context] @ values[head // group]
        return out

    def _random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(self.dtype)


def new_tokens(case: Case, width: int, seed: int = 3) -> tuple[mx.array, mx.array]:
    """K and V as a model passes them: transposed views of (batch, tokens, heads, dim)."""
    keys = [mx.random.key(seed), mx.random.key(seed + 100)]
    return tuple(  # type: ignore[return-value]
        mx.random.normal((len(case.contexts), width, case.kv_heads, dim), key=key)
        .astype(case.dtype)
        .transpose(0, 2, 1, 3)
        for dim, key in zip((case.key_dim, case.value_dim), keys, strict=True)
    )


def wide(values: mx.array) -> np.ndarray[Any, Any]:
    return np.array(values.astype(mx.float32)).astype(np.float64)


def error(got: mx.array, expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative where more than 1 is expected; NaN if there is one."""
    assert got.shape == expected.shape
    return float((np.abs(wide(got) - expected) / np.maximum(1, np.abs(expected))).max(initial=0))


def same_bits(a: mx.array, b: mx.array) -> bool:
    kind = mx.uint32 if a.dtype == mx.float32 else mx.uint16
    return a.shape == b.shape and bool(mx.all(a.view(kind) == b.view(kind)).item())
