"""Which columns of a step each query reads from open pages, and which from the others; for gathered K and V."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .columns import column_count, positions, visible
from .masks import causal_array
from .metadata import PagedKVMetadata, int32
from .step import GroupStep


@dataclass(frozen=True)
class OpenColumns:
    """The columns of a step that some query reads from open pages, which are gathered behind all the others.

    ``spans`` are their positions, row by row, ``columns`` int32 ``(rows, 1, 1, open columns)`` their places among all
    columns, ``valid`` which of them are no padding. ``own``, bool ``(rows, 1, width, columns)``: whether a column is in
    the query's own page. ``index`` are page ids and slots ``(rows, open columns)``. ``cut``: where a single query reads
    its own page only from behind, the columns before it (else None).
    """

    spans: list[list[tuple[int, int]]]
    index: tuple[mx.array, mx.array]
    columns: mx.array
    valid: mx.array
    own: mx.array
    cut: int | None

    def mask(self, mask: mx.array) -> mx.array:
        """``mask`` ``(…, width, columns)``, boolean or added to scores, for the columns and those behind them."""
        hidden = mx.array(False) if mask.dtype == mx.bool_ else mx.array(-mx.inf, mask.dtype)
        while mask.ndim < 4:
            mask = mask[None]
        shape = (max(mask.shape[0], self.own.shape[0]), *mask.shape[1:])
        mask = mx.broadcast_to(mask, shape)
        again = [mx.broadcast_to(self.columns, (*each.shape[:3], self.columns.shape[3])) for each in (mask, self.own)]
        seen = mx.take_along_axis(self.own, again[1], axis=3) & self.valid
        behind = mx.where(seen, mx.take_along_axis(mask, again[0], axis=3), hidden)
        return mx.concatenate([mx.where(self.own, hidden, mask), behind], axis=3)


def with_open(
    metadata: PagedKVMetadata,
    opened: PagedKVMetadata,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | str | None,
) -> tuple[mx.array, mx.array, mx.array | str | None]:
    """Gathered K and V with the open pages' columns behind the others, and the mask that gives each query its own."""
    step = metadata.step
    places = step.cached("open columns", lambda: open_columns(step, opened.step))
    more = _open_rows(opened, places)
    if mask is None and places.cut is not None:
        keys, values = keys[:, :, : places.cut], values[:, :, : places.cut]
    elif isinstance(mask, mx.array):
        mask = places.mask(mask)
    else:
        plain = mask
        mask = step.cached(("open mask", plain), lambda: places.mask(_whole_mask(step, plain)))
    return mx.concatenate([keys, more[0]], axis=2), mx.concatenate([values, more[1]], axis=2), mask


def open_columns(step: GroupStep, opened: GroupStep) -> OpenColumns:
    """The open columns of ``step``, whose open pages are those of ``opened``."""
    size = step.page_size
    spans, places = [], []
    seen = [positions(step, row) for row in range(len(step.tables))]
    columns = max(1, max(len(held) for held in seen))
    own = np.zeros((len(step.tables), 1, step.width, columns), dtype=bool)
    for row, (held, start, count) in enumerate(zip(seen, step.starts, step.query_lens, strict=True)):
        first = opened.tables[row].retention.first_needed(start)
        parts = [(max(a, first), b) for a, b in visible(step, row) if b > first] if count else []
        spans.append(parts or [(0, 0)])
        places.append(np.flatnonzero(held >= first) if count else held[:0])
        queries = np.arange(start, start + count)[:, None]
        from_first = (queries < opened.tables[row].retention.start) & (held[None] < queries)
        own[row, 0, :count, : len(held)] = from_first | (held[None] // size == queries // size)
    widest = max(1, max(len(found) for found in places))
    index = np.zeros((3, len(spans), widest), dtype=np.int32)
    valid = np.zeros((len(spans), 1, 1, widest), dtype=bool)
    for row, (found, held, table) in enumerate(zip(places, seen, opened.tables, strict=True)):
        index[0, row, : len(found)] = np.asarray(table.pages, dtype=np.int32)[held[found] // size]
        index[1, row, : len(found)] = held[found] % size
        index[2, row, : len(found)] = found
        valid[row, ..., : len(found)] = True
    cut = None
    if step.alone and step.width == 1 and len(spans[0]) == 1:
        cut = columns - len(places[0])
    assert index.min() >= 0, "a query's own page has no open page"
    return OpenColumns(
        spans,
        (int32(index[0]), int32(index[1])),
        int32(index[2][:, None, None]),
        mx.array(valid),
        mx.array(own),
        cut,
    )


def _open_rows(opened: PagedKVMetadata, places: OpenColumns) -> tuple[mx.array, mx.array]:
    """K and V of the open columns ``(batch, kv_heads, columns, head_dim)``; zeros for padding."""
    pages = opened.pages
    if pages.copy_out is not None:
        return pages.copy_out(opened, places.spans)
    page_ids, slots = places.index
    held = places.valid.transpose(0, 1, 3, 2)
    copies = []
    for side in pages.readable():
        if side.shape[3]:
            copies.append(mx.where(held, side[page_ids, :, slots].transpose(0, 2, 1, 3), 0))
        else:  # mlx can't index an array without elements
            copies.append(mx.zeros((page_ids.shape[0], side.shape[1], page_ids.shape[1], 0), side.dtype))
    pages.note_read(*copies)
    return copies[0], copies[1]


def _whole_mask(step: GroupStep, mask: str | None) -> mx.array:
    """A mask of one row, given by name or not at all, as an array over all columns."""
    columns = column_count(step)
    if mask is None:
        return mx.ones((1, 1, step.width, columns), dtype=mx.bool_)
    return causal_array(step.width, columns - step.width, None)
