"""Open pages: those in which tokens are in the model's dtype until their page is full.

A request keeps the page that is being filled, and those that the setting ``rewind`` may lead back into. A part of a
prompt fills other pages, too, which are read in this step only: they are made for each layer when it attends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .metadata import PagedKVMetadata, int32
from .pages import LayerPages
from .step import GroupStep

if TYPE_CHECKING:
    from .sequence import PagedSequence


def open_step(kept: GroupStep) -> GroupStep:
    """Where a step's queries read their own pages: in those that are ``kept``, or in pages made for the step.

    The latter are numbered row by row, as many for each, from the page in which the row's first new token is.
    """
    size = kept.page_size
    if all(table.dropped <= start // size for table, start in zip(kept.tables, kept.starts, strict=True)):
        return kept
    count = _pages_a_row(kept)
    tables = []
    for row, (table, start, context) in enumerate(zip(kept.tables, kept.starts, kept.context_lens, strict=True)):
        first, stop = start // size, -(-context // size)
        tables.append(table.view(len(table.pages)))
        tables[-1].pages = array("i", [*([-1] * first), *range(row * count, row * count + stop - first)])
    return GroupStep(tables, kept.context_lens, kept.query_lens, kept.width)


def pages_to_read(kept: PagedKVMetadata, reading: GroupStep | None, keys: mx.array, values: mx.array) -> LayerPages:
    """The pages of :func:`open_step`, whose new tokens, ``(batch, kv_heads, tokens, head_dim)``, have been written."""
    if reading is kept.step:
        return kept.pages
    size, step = kept.page_size, kept.step
    offsets = [start % size for start in step.starts]
    before: Sequence[mx.array | None] = _tokens_before(kept, offsets) if any(offsets) else (None, None)
    count = _pages_a_row(step)
    pages = LayerPages(kept.pages.spec, size)
    pages.keys, pages.values = (
        _as_pages(new, old, offsets, step.query_lens, count, size)
        for new, old in zip((keys, values), before, strict=True)
    )
    return pages


def _pages_a_row(step: GroupStep) -> int:
    size = step.page_size
    return max(
        1, max(-(-end // size) - start // size for start, end in zip(step.starts, step.context_lens, strict=True))
    )


def _tokens_before(kept: PagedKVMetadata, offsets: Sequence[int]) -> Sequence[mx.array]:
    """K and V ``(batch, kv_heads, tokens, head_dim)`` of the tokens before the step, in the pages where it begins."""
    pages, step = kept.pages, kept.step
    if pages.copy_out is not None:
        spans = [[(start - offset, start)] for start, offset in zip(step.starts, offsets, strict=True)]
        return pages.copy_out(kept, spans)
    sides = pages.readable()
    ids = step.cached("pages before", lambda: int32([_page_before(step, row) for row in range(len(offsets))]))
    copies = [side[ids] if side.shape[3] else mx.zeros((len(offsets), *side.shape[1:]), side.dtype) for side in sides]
    pages.note_read(*copies)
    return copies


def _page_before(step: GroupStep, row: int) -> int:
    """The page in which a row's first new token is, if there are others before it; else any page."""
    start, size = step.starts[row], step.page_size
    return step.tables[row].pages[start // size] if start % size else 0


def _as_pages(
    new: mx.array, old: mx.array | None, offsets: Sequence[int], counts: Sequence[int], pages: int, size: int
) -> mx.array:
    """Rows of ``old`` and ``new`` tokens as ``pages`` pages each: ``(batch * pages, kv_heads, size, head_dim)``."""
    batch, heads, _, dim = new.shape
    rows = []
    for row, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
        parts = [new[row : row + 1, :, :count]]
        if offset:
            assert old is not None
            parts.insert(0, old[row : row + 1, :, :offset])
        if padding := pages * size - offset - count:
            parts.append(mx.zeros((1, heads, padding, dim), new.dtype))
        rows.append(mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0])
    joined = mx.concatenate(rows) if batch > 1 else rows[0]
    return mx.contiguous(
        joined.reshape(batch, heads, pages, size, dim).swapaxes(1, 2).reshape(batch * pages, heads, size, dim)
    )


def refill(rows: Sequence[PagedSequence]) -> None:
    """Put into each row's open page, which is its own and empty, what its quantized pages hold of it.

    Of tokens that came before more than ``rewind`` others nothing else is left.
    """
    for row in rows:
        session, size = row.session, row.tables[-1].page_size
        count, logical = row.tokens % size, row.tokens // size
        for layer in session.layers:
            pages = layer.pages
            if pages is not None and pages.open is not None:
                step = GroupStep([row.tables[layer.group].view(logical)], [count], [1], 1)
                found = pages.spec.decode(*session.gather.stored(PagedKVMetadata(pages, step)))
                mx.eval(found)  # a pending read would have the next write copy the pool
                write_open(row, row.tokens, pages.open, *found)


def write_open(row: PagedSequence, tokens: int, pages: LayerPages, keys: mx.array, values: mx.array) -> None:
    """Put the newest of a row's ``tokens`` tokens, which K and V ``(1, kv_heads, …)`` end with, into its open page."""
    held = tokens % pages.page_size
    count = min(held, keys.shape[2])
    if count:
        step = GroupStep([row.tables[-1].view(tokens // pages.page_size)], [held], [count], count)
        row.session.writer.write(PagedKVMetadata(pages, step), keys[:, :, -count:], values[:, :, -count:])
