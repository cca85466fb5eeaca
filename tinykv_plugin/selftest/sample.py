"""Sample: random tokens in scattered pages, to compare backends with and to time them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..allocator import PageAllocator
from ..journal import Journal
from ..metadata import PagedKVMetadata, PagedMask
from ..pages import LayerPages, LayerSpec
from ..protocols import AttentionBackend, AttentionRequest, GatheringBackend
from ..retention import Retention
from ..step import GroupStep
from ..table import PageTable


def usual_request(page_size: int) -> AttentionRequest:
    """A decode call of a common model, for when no model is given."""
    dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.float16
    return AttentionRequest(32, 8, 128, 128, dtype, page_size, 1, "none", None, 0, False)


class Sample:
    """Rows of ``contexts`` tokens for calls of the kind of ``request``; the same numbers for the same arguments.

    Queries before position ``full_until`` read open pages only, where there are such.
    """

    def __init__(self, request: AttentionRequest, contexts: Sequence[int], seed: int = 0, full_until: int = 0) -> None:
        self.request = request
        self.contexts = list(contexts)
        size, journal = request.page_size, Journal()
        allocator = PageAllocator(journal)
        counts = [-(-context // size) for context in contexts]
        self.num_pages = sum(counts)
        allocator.resize(self.num_pages)
        ids = np.random.default_rng(seed).permutation(allocator.allocate(self.num_pages)).tolist()
        width = request.query_len
        self._lens = [min(width, context) for context in contexts]
        pages = [[ids.pop() for _ in range(count)] for count in counts]
        # Open pages are others than those of the same tokens.
        others = [[self.num_pages - 1 - page for page in row] for row in pages]
        retentions = [Retention(request.window, request.keep), Retention(page=size, start=full_until)]
        # Tables to write all tokens by, and tables from which a window has dropped pages, to read by.
        self._tables, self._reading = (
            [[PageTable(allocator, journal, size, retention) for _ in contexts] for retention in retentions]
            for _ in range(2)
        )
        for way in (self._tables, self._reading):
            for tables, rows in zip(way, (pages, others), strict=True):
                for table, row in zip(tables, rows, strict=True):
                    allocator.share(row)
                    table.append(row)
        for tables in self._reading:
            for table, context, query_len in zip(tables, contexts, self._lens, strict=True):
                table.drop_unreadable(context - query_len)
        self._keys = list(mx.random.split(mx.random.key(seed), 6))
        self.queries = self._random(0, (len(contexts), request.query_heads, width, request.key_dim))
        if request.softcap is not None:
            # Scores that a cap changes by more than their rounding in the half types.
            self.queries = (self.queries * max(1, request.softcap / 8)).astype(request.dtype)
        self.sinks = self._random(3, (request.query_heads,)) if request.sinks else None
        self.scale = request.key_dim**-0.5

    @property
    def spec(self) -> LayerSpec:
        """The shapes of K and V."""
        request = self.request
        spec = LayerSpec(request.kv_heads, request.key_dim, request.value_dim, request.dtype, request.dtype)
        return replace(spec, keys=request.keys, values=request.values)

    def tokens(self, which: int = 0) -> tuple[mx.array, mx.array]:
        """K and V of all rows, ``(batch, kv_heads, tokens, head_dim)``; another ``which`` gives others."""
        longest, request = max(self.contexts), self.request
        shape = (len(self.contexts), request.kv_heads, longest)
        return (
            self._random(1, (*shape, request.key_dim), which),
            self._random(2, (*shape, request.value_dim), which),
        )

    def pages(self, backend: AttentionBackend, dtype: mx.Dtype | None = None) -> LayerPages:
        """Empty pages; with ``dtype`` in that one, and not quantized."""
        spec = self.spec
        if dtype is not None:
            spec = LayerSpec(spec.kv_heads, spec.key_dim, spec.value_dim, dtype, dtype)
        pages = LayerPages(spec, self.request.page_size, self.request.open_page)
        self.resize(backend, pages, self.num_pages)
        return pages

    @staticmethod
    def resize(backend: AttentionBackend, pages: LayerPages, num_pages: int) -> None:
        """Give ``pages``, and open ones, room for ``num_pages``."""
        for each in _both(pages):
            backend.resize(each, num_pages)

    @staticmethod
    def copy_page(backend: AttentionBackend, pages: LayerPages, source: int, target: int) -> None:
        """Copy a page, and the open one with its id."""
        for each in _both(pages):
            backend.copy_pages(each, [source], [target])

    def write(self, backend: AttentionBackend, pages: LayerPages, which: int = 0) -> None:
        """Put all tokens into ``pages``."""
        step = self._step(self._tables, self.contexts, max(self.contexts))
        tokens = self.tokens(which)
        stored = self.spec.encode(*tokens)
        if pages.spec != self.spec:
            # Full precision, to compare with: what the stored tokens stand for.
            stored = self.spec.decode(*stored, pages.spec.dtype)
        metadata = PagedKVMetadata(pages, step, pages.open)
        if metadata.open is not None:
            keys, values = (side.astype(pages.spec.dtype) for side in tokens)
            backend.write(metadata.open, keys, values)
        backend.write(metadata, *stored)

    def attend(self, backend: AttentionBackend, pages: LayerPages, mask: Any = None) -> mx.array:
        """The call to compare, with one of :meth:`masks`, its result in the dtype of ``pages``."""
        more = {} if self.request.softcap is None else {"softcap": self.request.softcap}
        return backend.attend(
            self.queries.astype(pages.spec.dtype),
            self._reads(pages),
            scale=self.scale,
            mask=mask,
            sinks=None if self.sinks is None else self.sinks.astype(pages.spec.dtype),
            **more,
        )

    def dense(self, gather: AttentionBackend, pages: LayerPages) -> list[mx.array]:
        """K and V that the queries see, copied out of ``pages`` as for a prefill."""
        assert isinstance(gather, GatheringBackend)
        return [side.astype(mx.float32) for side in gather.dense(self._reads(pages))]

    def valid(self, output: mx.array) -> mx.array:
        """``output`` with zeros for queries that only pad a row, whose results nobody uses."""
        there = mx.arange(self.request.query_len)[None] < mx.array(self._lens)[:, None]
        return mx.where(there[:, None, :, None], output, 0)

    def masks(self) -> list[Any]:
        """Masks of the request's kind, as models and caches make them."""
        request = self.request
        if request.mask == "array":
            # A mask given as an array says itself where a shorter row ends.
            columns = mx.arange(max(self.contexts))
            there = (columns < mx.array(self.contexts)[:, None])[:, None, None]
            added = self._random(4, (len(self.contexts), request.query_heads, 1, len(columns)))
            return [there & (columns % 3 != 1), mx.where(there, added, mx.array(-mx.inf, request.dtype))]
        if request.chunk is not None:
            return [PagedMask(min(request.window or request.chunk, request.chunk), request.chunk)]
        if request.mask == "none":
            return [None]
        return ["causal" if request.window is None else PagedMask(request.window)]

    def _reads(self, pages: LayerPages) -> PagedKVMetadata:
        """A step of its own for each call: backends keep with it what they work out."""
        return PagedKVMetadata(pages, self._step(self._reading, self._lens, self.request.query_len), pages.open)

    def _step(self, tables: Sequence[list[PageTable]], query_lens: Sequence[int], width: int) -> GroupStep:
        step, step.open = (GroupStep(each, self.contexts, query_lens, width) for each in tables)
        return step

    def _random(self, number: int, shape: tuple[int, ...], which: int = 0) -> mx.array:
        key = self._keys[number] if not which else mx.random.split(self._keys[number], which + 1)[which]
        return mx.random.normal(shape, key=key).astype(self.request.dtype)


def _both(pages: LayerPages) -> list[LayerPages]:
    return [pages] if pages.open is None else [pages, pages.open]
