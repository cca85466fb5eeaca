"""Open pages: those in which tokens are in the model's dtype until their page is full.

A request keeps the page that is being filled, and those that the setting ``rewind`` may lead back into. A part of a
prompt fills other pages, too, which are read in this step only: they are made for each layer when it attends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .metadata import PagedKVMetadata
from .pages import LayerPages
from .step import GroupStep

if TYPE_CHECKING:
    from .protocols import AttentionBackend, GatheringBackend
    from .sequence import PagedSequence
    from .table import PageTable


def open_step(kept: GroupStep) -> GroupStep:
    """Where a step's queries read their own pages: in those that are ``kept``, or in pages made for the step.

    The latter are numbered row by row, as many for each, from the first page that a row's queries read on.
    """
    if kept.width == 1:
        return kept  # the page that is being filled is always there
    size, firsts = kept.page_size, _firsts(kept)
    if all(table.dropped <= first for table, first in zip(kept.tables, firsts, strict=True)):
        return kept
    count = _pages_a_row(kept)
    tables = []
    for row, (table, first, context) in enumerate(zip(kept.tables, firsts, kept.context_lens, strict=True)):
        tables.append(table.view(0))
        pages = range(row * count, row * count + -(-context // size) - first)
        tables[-1].pages = array("i", [*([-1] * first), *pages])
    return GroupStep(tables, kept.context_lens, kept.query_lens, kept.width)


def pages_to_read(
    gather: GatheringBackend, kept: PagedKVMetadata, reading: GroupStep | None, keys: mx.array, values: mx.array
) -> LayerPages:
    """The pages of :func:`open_step`, whose new tokens, ``(batch, kv_heads, tokens, head_dim)``, have been written."""
    if reading is kept.step:
        return kept.pages
    step = kept.step
    before = [_tokens_before(gather, kept, row) for row in range(kept.batch)]
    count = _pages_a_row(step)
    pages = LayerPages(kept.pages.spec, kept.page_size)
    pages.keys, pages.values = (
        _as_pages(new, [None if old is None else old[side] for old in before], step.query_lens, count, kept.page_size)
        for side, new in enumerate((keys, values))
    )
    return pages


def _firsts(step: GroupStep) -> list[int]:
    """The first logical page that each row's queries read; worked out once for all layers."""
    return step.cached(
        "firsts",
        lambda: [
            table.retention.first_needed(start) // step.page_size
            for table, start in zip(step.tables, step.starts, strict=True)
        ],
    )


def _pages_a_row(step: GroupStep) -> int:
    """Pages of the row that reads most; worked out once for all layers."""
    ends = step.context_lens
    return step.cached(
        "pages a row",
        lambda: max(1, *(-(-end // step.page_size) - first for first, end in zip(_firsts(step), ends, strict=True))),
    )


def _tokens_before(gather: GatheringBackend, kept: PagedKVMetadata, row: int) -> tuple[mx.array, mx.array] | None:
    """K and V ``(1, kv_heads, tokens, head_dim)`` from before the step that a row's queries read here, if any."""
    step = kept.step
    first = _firsts(step)[row]
    start = step.context_lens[row] - step.query_lens[row]
    if start == first * step.page_size or not step.query_lens[row]:
        return None
    before = step.cached(
        ("before", row),
        lambda: GroupStep([step.tables[row].view(first)], [start - first * step.page_size], [1], 1),
    )
    return gather.stored(PagedKVMetadata(kept.pages, before))


def _as_pages(
    new: mx.array, before: Sequence[mx.array | None], counts: Sequence[int], pages: int, size: int
) -> mx.array:
    """Rows of tokens ``before`` and ``new`` ones as ``pages`` each: ``(batch * pages, kv_heads, size, head_dim)``."""
    batch, heads, _, dim = new.shape
    rows = []
    for row, (old, count) in enumerate(zip(before, counts, strict=True)):
        parts = [*([old] if old is not None else []), new[row : row + 1, :, :count]]
        if padding := pages * size - sum(part.shape[2] for part in parts):
            parts.append(mx.zeros((1, heads, padding, dim), new.dtype))
        rows.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
    joined = mx.concatenate(rows) if batch > 1 else rows[0]
    return mx.contiguous(
        joined.reshape(batch, heads, pages, size, dim).swapaxes(1, 2).reshape(batch * pages, heads, size, dim)
    )


def refill(reopened: Sequence[tuple[PagedSequence, Sequence[int]]]) -> None:
    """Put into open pages of some rows, these logical ones, what the quantized pages hold of their tokens.

    Of tokens that came before more than ``rewind`` others nothing else is left. The pages are the row's own and empty.
    """
    for row, logicals in reopened:
        row.note_rounded(row.tokens)
        table = row.tables[-1].only(logicals)
        for layer in row.session.layers:
            pages = layer.pages
            if pages is not None and pages.open is not None:
                for first, stop in _held(row.tables[layer.group], logicals[0], row.tokens):
                    start = first * table.page_size
                    step = GroupStep([row.tables[layer.group].view(first)], [stop - start], [1], 1)
                    found = pages.spec.decode(*row.session.gather.stored(PagedKVMetadata(pages, step)))
                    mx.eval(found)  # a pending read would have the next write copy the pool
                    write_open(row.session.writer, table, stop, pages.open, *found)


def _held(closed: PageTable, first: int, tokens: int) -> list[tuple[int, int]]:
    """What a group's quantized pages still hold of ``tokens`` tokens, from the logical page ``first`` on.

    As first logical pages and the positions at which the tokens from there end.
    """
    if closed.dropped <= first:
        return [(first, tokens)]
    kept = min(closed.retention.keep, tokens)
    return [*([(0, kept)] if kept > first * closed.page_size else []), (closed.dropped, tokens)]


def write_open(
    writer: AttentionBackend, table: PageTable, stop: int, pages: LayerPages, keys: mx.array, values: mx.array
) -> None:
    """Put K and V ``(1, kv_heads, tokens, …)`` of the tokens before position ``stop`` into the open pages there are."""
    count = min(stop - table.dropped * table.page_size, keys.shape[2])
    if count > 0:
        step = GroupStep([table], [stop], [count], count)
        writer.write(PagedKVMetadata(pages, step), keys[:, :, -count:], values[:, :, -count:])
