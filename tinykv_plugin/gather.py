"""The gather backend: pages copied together by mlx operations, then mlx's own attention. Serves everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .hookspecs import hookimpl
from .masks import causal_array, prior_tokens, row_masks
from .metadata import PagedKVMetadata, PagedMask, int32

if TYPE_CHECKING:
    from .pages import LayerPages
    from .protocols import AttentionBackend, AttentionRequest
    from .step import GroupStep

# A row of at most this many runs of consecutive pages is joined run by run, which copies each token once.
MAX_RUNS = 8


class GatherBackend:
    """The reference: exact on every device, at the price of copying the context once a step and layer.

    Writes are mlx scatters that are donated the pool's buffer: in place when nothing pending reads it, else a copy.
    """

    name = "gather"
    direct = False
    priority = 0

    def supports(self, request: AttentionRequest) -> list[str]:
        return []

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        shapes = pages.shape(num_pages)
        dtypes = (pages.spec.dtype, pages.spec.value_dtype)
        for side, shape, dtype in zip(("keys", "values"), shapes, dtypes, strict=True):
            old: mx.array | None = getattr(pages, side)
            if num_pages == 0:
                setattr(pages, side, None)
            elif old is None:
                new = mx.zeros(shape, dtype)
                mx.eval(new)
                setattr(pages, side, new)
            elif old.shape[0] != num_pages:
                more = num_pages - old.shape[0]
                kept = mx.pad(old, [(0, more)] + 3 * [(0, 0)]) if more > 0 else old[mx.arange(num_pages)]
                mx.eval(kept)
                setattr(pages, side, kept)

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        step, pages = metadata.step, metadata.pages
        assert pages.keys is not None
        assert pages.values is not None
        if step.alone and step.width == 1:
            # The usual decode step: one slot, known on the host.
            page, slot = step.cached("slot", lambda: _one_slot(step))
            pages.keys[page, :, slot] = keys[0, :, 0]
            pages.values[page, :, slot] = values[0, :, 0]
            return
        page_ids, slots, tokens = step.cached("scatter", lambda: _scatter(step))
        if page_ids.size:
            pages.keys[page_ids, :, slots] = _by_token(keys, tokens)
            pages.values[page_ids, :, slots] = _by_token(values, tokens)

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        if pages.keys is None or pages.values is None:
            return
        # Read before the write is made: mlx copies a whole pool that it writes to while a read of it is pending.
        keys, values = pages.keys[int32(sources)], pages.values[int32(sources)]
        mx.eval(keys, values)
        pages.keys[int32(targets)] = keys
        pages.values[int32(targets)] = values

    def attend(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        *,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
    ) -> mx.array:
        keys, values = self.dense(metadata)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=_array_mask(metadata.step, mask), sinks=sinks
        )

    def dense(self, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
        step = metadata.step
        keys, values = metadata.pages.readable()
        if step.alone:
            spans = step.cached("spans", lambda: _spans(step))
            return _join(keys, spans), _join(values, spans)
        index, valid = step.cached("columns", lambda: _columns(step))
        return _columns_of(keys, index, valid), _columns_of(values, index, valid)


def _one_slot(step: GroupStep) -> tuple[int, int]:
    position = step.context_lens[0] - 1
    return step.tables[0].pages[position // step.page_size], position % step.page_size


def _scatter(step: GroupStep) -> tuple[mx.array, mx.array, mx.array | None]:
    """Page ids and slots of the valid new tokens, and their places in the flattened tensors (None: all of them)."""
    slots = step.slots().reshape(-1)
    tokens = np.flatnonzero(slots >= 0)
    kept = slots[tokens]
    return (
        int32(kept // step.page_size),
        int32(kept % step.page_size),
        None if len(tokens) == len(slots) else int32(tokens),
    )


def _by_token(tensor: mx.array, tokens: mx.array | None) -> mx.array:
    """``(batch, heads, tokens, dim)`` as ``(token, heads, dim)``, only ``tokens`` if given."""
    batch, heads, width, dim = tensor.shape
    flat = tensor.transpose(0, 2, 1, 3).reshape(batch * width, heads, dim)
    return flat if tokens is None else flat[tokens]


def _visible(step: GroupStep, row: int) -> list[tuple[int, int]]:
    """The positions a row's queries may see, as ascending (start, stop) spans: kept tokens and newest ones."""
    context = step.context_lens[row]
    start = context - step.query_lens[row]
    prior = prior_tokens(start, step.window)
    kept = min(step.keep, prior)
    newest = start - prior + kept
    return [(newest - kept, context)] if newest == kept else [(0, kept), (newest, context)]


Span = tuple[list[tuple[int, int]] | mx.array, int, int]


def _spans(step: GroupStep) -> list[Span]:
    """For each span of row 0: its pages (runs of consecutive ids, or an index array), tokens to skip, tokens."""
    found: list[Span] = []
    size = step.page_size
    for start, stop in _visible(step, 0):
        if start == stop:
            continue
        ids = step.tables[0].pages[start // size : -(-stop // size)]
        runs = _runs(ids)
        pages = runs if len(runs) <= MAX_RUNS else int32(ids)
        found.append((pages, start % size, stop - start))
    return found


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive page ids as (start, stop); gives up once there are more than MAX_RUNS."""
    cuts = np.flatnonzero(np.diff(np.asarray(ids)) != 1) + 1
    if len(cuts) >= MAX_RUNS:
        return [(0, 0)] * (MAX_RUNS + 1)
    bounds = [0, *cuts.tolist(), len(ids)]
    return [(ids[a], ids[b - 1] + 1) for a, b in itertools.pairwise(bounds)]


def _join(pages: mx.array, spans: list[Span]) -> mx.array:
    """The spans' tokens as ``(1, heads, tokens, dim)``."""
    parts = []
    for which, skip, count in spans:
        if isinstance(which, list):
            runs = [pages[start:stop].transpose(1, 0, 2, 3) for start, stop in which]
            joined = runs[0] if len(runs) == 1 else mx.concatenate(runs, axis=1)
        else:
            joined = pages[which].transpose(1, 0, 2, 3)
        heads, ids, size, dim = joined.shape
        parts.append(joined.reshape(1, heads, ids * size, dim)[:, :, skip : skip + count])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _columns(step: GroupStep) -> tuple[tuple[mx.array, mx.array], mx.array | None]:
    """(page id, slot) of every column of every row ``(batch, columns)``, and which hold a token (None: all)."""
    size = step.page_size
    rows = [
        np.concatenate([np.arange(start, stop) for start, stop in _visible(step, row)])
        for row in range(len(step.tables))
    ]
    columns = max(1, max(len(row) for row in rows))
    page_ids = np.zeros((len(rows), columns), dtype=np.int32)
    slots = np.zeros_like(page_ids)
    valid = np.zeros((len(rows), 1, columns, 1), dtype=bool)
    for index, (row, table) in enumerate(zip(rows, step.tables, strict=True)):
        page_ids[index, : len(row)] = np.asarray(table.pages, dtype=np.int32)[row // size]
        slots[index, : len(row)] = row % size
        valid[index, 0, : len(row)] = True
    return (int32(page_ids), int32(slots)), None if valid.all() else mx.array(valid)


def _columns_of(pages: mx.array, index: tuple[mx.array, mx.array], valid: mx.array | None) -> mx.array:
    """Gathered columns ``(batch, heads, columns, dim)``; those without a token are zeros.

    Zeroed and not only masked: a slot that holds NaN from another request would survive a mask as 0 x NaN.
    """
    page_ids, slots = index
    gathered = pages[page_ids, :, slots].transpose(0, 2, 1, 3)
    return gathered if valid is None else mx.where(valid, gathered, mx.array(0, dtype=pages.dtype))


def _array_mask(step: GroupStep, mask: mx.array | str | PagedMask | None) -> mx.array | str | None:
    """The mask over gathered columns; the cache's own window is exact in the columns and needs none for one token."""
    if isinstance(mask, mx.array) or (mask is None and step.alone):
        return mask
    if step.alone and step.window is None and isinstance(mask, str):
        return mask if step.width > 1 else None
    limit = mask.window if isinstance(mask, PagedMask) else step.window if isinstance(mask, str) else None
    causal = mask is not None or step.width == 1

    def make() -> mx.array | str | None:
        priors = [prior_tokens(start, step.window) for start in step.starts]
        if not step.alone:
            columns = max(1, max(prior + query for prior, query in zip(priors, step.query_lens, strict=True)))
            return row_masks(step.width, priors, step.query_lens, columns, limit, causal)
        if limit is not None and priors[0] + step.width > limit:
            return causal_array(step.width, priors[0], limit)
        return "causal" if step.width > 1 else None

    return step.cached(("mask", limit, causal), make)


_BACKEND = GatherBackend()


@hookimpl
def tinykv_attention_backends() -> list[AttentionBackend]:
    """The backend of last resort."""
    return [_BACKEND]
