"""Kernels: the calls of the Metal sources, with their grids, outputs and tokens."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .kernel import Kernel, Template, source
from .variant import PART, THREADS, variant_of

if TYPE_CHECKING:
    from tinykv_plugin.kv_format import Affine
    from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
    from tinykv_plugin.pages import LayerPages
    from tinykv_plugin.step import GroupStep

SOURCES = ("common", "attend", "reduce", "write", "copy", "gather")
_TOKEN = ((1,), mx.int32)
_POOLS = ("key_pages", "value_pages")
_AFTER = ("written", "last_read")
_OPEN = ("open_key_pages", "open_value_pages", "open_page_ids", "open_starts", "open_written", "open_last_read")
_MOST_THREADS = 256


class Kernels:
    """The kernels of one backend. What they return as a token is for ``pages.written`` or ``pages.last_read``."""

    def __init__(self) -> None:
        self._attend = Kernel(
            "attend",
            ["queries", *_POOLS, "page_ids", "rows", "extent", "numbers", "mask", "sinks", *_AFTER, *_OPEN],
            ["out", "stats", "token"],
        )
        self._reduce = Kernel("reduce", ["partial", "stats", "sinks"], ["out"])
        self._write = Kernel("write", [*_POOLS, "slot_mapping", "keys", "values", *_AFTER], ["token"])
        self._copy = Kernel("copy", [*_POOLS, "moves", *_AFTER], ["token"])
        self._gather = Kernel("gather", [*_POOLS, "page_ids", "rows", *_AFTER], ["keys", "values", "token"])
        # Stands for an input that isn't there.
        self._absent = mx.array(np.zeros((1, 1, 1, 1), dtype=np.int32))
        # For a pool that isn't there: so large that it arrives as ``device``, as pools do.
        self._no_pool = mx.array(np.zeros((1, 1, 1, 8), dtype=np.int32))
        self._numbers: dict[tuple[float, float], mx.array] = {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the sources and of mlx, which compiles them."""
        digest = hashlib.sha256("".join(source(name) for name in SOURCES).encode()).hexdigest()[:12]
        return f"mlx {version('mlx')}, kernels {digest}"

    def write(self, pages: LayerPages, slot_mapping: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Write tokens ``(batch, kv_heads, tokens, head_dim)`` in place, where a slot isn't -1. Returns the token."""
        key_pages, value_pages = _pools(pages)
        width = max(_dims(pages))
        if not slot_mapping.size:
            return self._absent if pages.written is None else pages.written
        (token,) = self._write(
            key_pages, value_pages, slot_mapping, keys, values if values.size else keys, *self._after(pages),
            template=_with_values(pages),
            grid=(width, slot_mapping.size, pages.spec.kv_heads),
            threadgroup=(min(width, _MOST_THREADS), 1, 1),
            outputs=[_TOKEN],
        )  # fmt: skip
        return token

    def copy(self, pages: LayerPages, moves: Sequence[tuple[int, int]]) -> mx.array:
        """Copy pages in place; no target may be a source or a target before. Returns the token."""
        key_pages, value_pages = _pools(pages)
        elements = pages.spec.kv_heads * pages.page_size * max(_dims(pages))
        (token,) = self._copy(
            key_pages, value_pages, _int32(moves), *self._after(pages),
            template=_with_values(pages),
            grid=(elements, len(moves), 1),
            threadgroup=(_MOST_THREADS, 1, 1),
            outputs=[_TOKEN],
        )  # fmt: skip
        return token

    def gather(
        self, metadata: PagedKVMetadata, spans: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Copies of each row's ``spans``, one or two (start, stop) of positions: K, V, and the token.

        ``(batch, kv_heads, columns, head_dim)``; zeros after a row's last token.
        """
        pages = metadata.pages
        key_pages, value_pages = _pools(pages)
        rows = metadata.step.cached("metal columns", lambda: _column_rows(metadata.step, spans))
        columns = max(1, max(sum(stop - start for start, stop in row) for row in spans))
        batch, heads = len(spans), pages.spec.kv_heads
        key_dim, value_dim = _dims(pages)
        keys, values, token = self._gather(
            key_pages, value_pages, self._page_ids(metadata), rows, *self._after(pages),
            template=[
                ("K", key_pages.dtype), ("V", value_pages.dtype), ("K_DIM", key_dim), ("V_DIM", value_dim),
                ("PAGE", pages.page_size),
            ],
            grid=(max(key_dim, value_dim), columns, batch * heads),
            threadgroup=(min(max(key_dim, value_dim), _MOST_THREADS), 1, 1),
            outputs=[
                ((batch, heads, columns, key_dim), key_pages.dtype),
                ((batch, heads, columns, value_dim) if value_dim else (1,), value_pages.dtype),
                _TOKEN,
            ],
        )  # fmt: skip
        return keys, values if value_dim else mx.zeros((batch, heads, columns, 0), value_pages.dtype), token

    def attend(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> tuple[mx.array, mx.array]:
        """Attention ``(batch, query_heads, tokens, value_dim)`` in the dtype of ``queries``, and the token."""
        pages, spec, opened = metadata.pages, metadata.pages.spec, metadata.open
        key_pages, value_pages = _pools(pages)
        batch, heads, width, _ = queries.shape
        kind, array = _mask(mask, (batch, heads, width))
        window, keep = _sight(metadata, mask)
        causal = width > 1 and mask is not None and not kind
        variant = variant_of(
            spec.key_dim, spec.value_dim, pages.page_size, heads // spec.kv_heads, width,
            causal, bool(window), sinks is not None, bool(softcap), kind, opened is not None,
        )  # fmt: skip
        rows, extent, parts = metadata.step.cached(
            ("metal rows", window, keep), lambda: _token_rows(metadata, window, keep)
        )
        whole = parts == 1
        vectors = batch * heads * width
        sinks_or_none = self._absent if sinks is None else sinks
        out, stats, token = self._attend(
            queries, key_pages, value_pages, self._page_ids(metadata), rows, extent, self._number_array(scale, softcap),
            self._absent if array is None else array, sinks_or_none, *self._after(pages), *self._open(opened),
            template=[
                ("T", queries.dtype if whole else mx.float32), ("WHOLE", whole), *variant.constants,
                *_storage("K", spec.keys, pages.shape(1)[0][3], spec.dtype),
                *_storage("V", spec.values, pages.shape(1)[1][3], spec.value_dtype),
            ],
            grid=(parts * THREADS, spec.kv_heads * variant.division.passes, batch),
            threadgroup=(THREADS, 1, 1),
            outputs=[
                ((batch, heads, width, spec.value_dim), queries.dtype) if whole
                else ((vectors, parts, spec.value_dim), mx.float32),
                ((vectors, parts, 2), mx.float32),
                _TOKEN,
            ],
        )  # fmt: skip
        if not whole:
            (out,) = self._reduce(
                out, stats, sinks_or_none,
                # Few constants: each is compiled again for others.
                template=[("T", queries.dtype), ("SINKS", variant.sinks), ("QUERIES", width if variant.sinks else 1)],
                grid=(spec.value_dim, vectors, 1),
                threadgroup=(min(spec.value_dim, _MOST_THREADS), 1, 1),
                outputs=[((batch, heads, width, spec.value_dim), queries.dtype)],
            )  # fmt: skip
        return out, token

    def _open(self, opened: PagedKVMetadata | None) -> list[mx.array]:
        """The inputs of open pages."""
        if opened is None:
            return [*(2 * [self._no_pool]), *(4 * [self._absent])]
        starts = opened.step.cached("metal starts", lambda: _open_starts(opened.step))
        return [*_pools(opened.pages), self._page_ids(opened), starts, *self._after(opened.pages)]

    def _after(self, pages: LayerPages) -> list[mx.array]:
        return [self._absent if token is None else token for token in (pages.written, pages.last_read)]

    def _page_ids(self, metadata: PagedKVMetadata) -> mx.array:
        page_ids = metadata.page_ids
        return page_ids if page_ids.size else self._absent

    def _number_array(self, scale: float, softcap: float | None) -> mx.array:
        numbers = (scale, softcap or 1.0)
        found = self._numbers.get(numbers)
        if found is None:
            found = self._numbers[numbers] = mx.array(np.asarray(numbers, dtype=np.float32))
        return found


def _pools(pages: LayerPages) -> tuple[mx.array, mx.array]:
    """The pools of K and V; where a model keeps keys only, theirs stands for the values', which has no memory."""
    assert pages.keys is not None
    assert pages.values is not None
    return pages.keys, pages.values if pages.values.size else pages.keys


def _dims(pages: LayerPages) -> tuple[int, int]:
    """Elements a token has in one head of K and of V, as they are stored."""
    (*_, key_dim), (*_, value_dim) = pages.shape(1)
    return key_dim, value_dim


def _with_values(pages: LayerPages) -> Template:
    return [("VALUES", bool(pages.spec.value_dim))]


def _storage(side: str, packed: Affine | None, elements: int, dtype: mx.Dtype) -> Template:
    """How a token's elements in one head are stored: 0 bits stand for not packed."""
    return [
        (f"{side}_ROW", elements),
        (f"{side}_BITS", 0 if packed is None else packed.bits),
        (f"{side}_GROUP", 1 if packed is None else packed.group_size),
        (f"{side}_SCALE", dtype),
    ]


def _sight(metadata: PagedKVMetadata, mask: object) -> tuple[int, int]:
    """Tokens a query may look back on, the cache's limit and the mask's (0 for all), and the first ones it sees, too.

    A model that looks back less far than its cache doesn't see what the cache keeps.
    """
    own, limit = metadata.window, getattr(mask, "window", None)
    if limit is not None and (own is None or limit < own):
        return limit, 0
    return own or 0, metadata.keep


def _mask(mask: object, shape: tuple[int, int, int]) -> tuple[int, mx.array | None]:
    """The kind of mask for a kernel, and the array with four axes, those of one made as long as they should be."""
    if not isinstance(mask, mx.array):
        if isinstance(mask, str) and mask != "causal":
            raise ValueError(f"mask {mask!r} is not known; there is 'causal'")
        return 0, None
    return 1 if mask.dtype == mx.bool_ else 2, mx.broadcast_to(mask, (*shape, mask.shape[-1]))


def _token_rows(metadata: PagedKVMetadata, window: int, keep: int) -> tuple[mx.array, mx.array, int]:
    """For attend.metal: ``rows``, ``extent``, and the number of parts.

    A row is its tokens, its query tokens, the first token after the kept ones that some query sees, and where its
    page ids begin.
    """
    step = metadata.step
    rows = []
    starts = step.host_row_starts().tolist()
    for context, count, start in zip(step.context_lens, step.query_lens, starts, strict=True):
        own = context - count
        rows.append([context, count, max(0, own - (window - keep) + 1) if window and own >= window else 0, start])
    first = 0 if keep else min((low for context, _, low, _ in rows if context), default=0) // PART
    parts = max(1, math.ceil(max(step.context_lens) / PART) - first)
    return _int32(rows), _int32([window, keep, first, parts]), parts


def _open_starts(step: GroupStep) -> mx.array:
    """For attend.metal: where each row's open page ids begin, and the position before which it reads only those."""
    starts = step.host_row_starts().tolist()
    return _int32([[start, table.retention.start] for start, table in zip(starts, step.tables, strict=True)])


def _column_rows(step: GroupStep, spans: Sequence[Sequence[tuple[int, int]]]) -> mx.array:
    """For gather.metal: a row's kept columns, the position of the column after them, its columns, its page ids."""
    rows = []
    for row, start in zip(spans, step.host_row_starts().tolist(), strict=True):
        kept = row[0][1] if len(row) > 1 else 0
        newest, end = row[-1]
        rows.append([kept, newest, kept + end - newest, start])
    return _int32(rows)


def _int32(values: object) -> mx.array:
    """An evaluated array, safe to use from any thread."""
    return mx.array(np.ascontiguousarray(values, dtype=np.int32))
