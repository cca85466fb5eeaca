"""Reading a request's keys and values back from its pages."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import mlx.core as mx

from .columns import positions
from .errors import CacheStateError
from .metadata import PagedKVMetadata, int32
from .step import GroupStep
from .unfinished import LOST

if TYPE_CHECKING:
    from .layer import PagedLayer
    from .pages import LayerPages
    from .sequence import PagedSequence
    from .session import PagedSession
    from .table import PageTable


def stored_tokens(session: PagedSession, layer: PagedLayer, row: PagedSequence) -> tuple[mx.array, mx.array]:
    """Copies of a layer's tokens as they are stored, ``(1, kv_heads, tokens, elements)``; with a window the newest.

    With a window perhaps without the oldest of those that the last token saw: the next one won't see them. Raises
    CacheStateError if the layer has no pages yet.
    """
    pages = pages_of(layer)
    tokens = row.offset(layer.bit)
    if not tokens:
        (_, *key_shape), (_, *value_shape) = pages.shape(1)
        key_shape[1] = value_shape[1] = 0
        key_dtype, value_dtype = pages.dtypes
        return mx.zeros((1, *key_shape), key_dtype), mx.zeros((1, *value_shape), value_dtype)
    if row.lost:
        raise CacheStateError(LOST)
    table = row.tables[layer.group]
    gap, keep = _gap(table, tokens), table.retention.keep
    step = GroupStep([_without_gaps(table) if gap else table], [tokens], [1], 1)
    keys, values = _copied(session, PagedKVMetadata(pages, step))
    if gap:
        keys, values = (
            mx.concatenate([side[:, :, :keep], side[:, :, keep + gap :]], axis=2) for side in (keys, values)
        )
        mx.eval(keys, values)
    return keys, values


def held_positions(layer: PagedLayer, row: PagedSequence) -> list[int]:
    """The positions of the tokens that :func:`stored_tokens` copies."""
    tokens, table = row.offset(layer.bit), row.tables[layer.group]
    gap, keep = _gap(table, tokens), table.retention.keep
    found = positions(GroupStep([table], [tokens], [1], 1), 0).tolist() if tokens else []
    return [*found[:keep], *found[keep + gap :]]


def open_tokens(
    session: PagedSession, layer: PagedLayer, row: PagedSequence, rewind: bool = False
) -> tuple[mx.array, mx.array] | None:
    """Copies of the newest tokens in a layer's open pages, as the model made them, that the next token reads.

    With ``rewind`` also those that are kept for a rewind. None if the layer has no such pages, or these hold nothing.
    """
    pages = layer.pages.open if layer.pages is not None else None
    tokens, table = row.offset(layer.bit), row.tables[-1]
    first = table.retention.first_needed(tokens) // table.page_size
    if rewind:
        first = min(first, max(table.dropped, table.retention.first_kept(tokens) // table.page_size))
    count = tokens - first * table.page_size
    if pages is None or not count or table.missing(tokens):
        return None
    return _copied(session, PagedKVMetadata(pages, GroupStep([table.view(first)], [count], [1], 1)))


def _copied(session: PagedSession, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
    """What a step of one row may see, as it is stored, evaluated."""
    pages = metadata.pages
    before = pages.last_read
    # By an index: a view would be a holder of the pool's array, which the next write would have to copy.
    keys, values = (side[int32([0])] for side in session.gather.stored(metadata))
    mx.eval(keys, values)
    pages.last_read = before  # this read is over
    return keys, values


def _gap(table: PageTable, tokens: int) -> int:
    """How many tokens that the last of ``tokens`` saw, behind the kept ones, are not held any more."""
    retention = table.retention
    if retention.window is None or tokens <= retention.window:
        return 0
    return max(0, table.first_position - (tokens - retention.window + retention.keep))


def _without_gaps(table: PageTable) -> PageTable:
    """``table`` for reading, with some page in the place of dropped ones."""
    view = table.view(0)
    view.retention = table.retention
    view.pages = array("i", [table.pages[-1] if page < 0 else page for page in view.pages])
    return view


def pages_of(layer: PagedLayer) -> LayerPages:
    """The pages of ``layer``. Raises CacheStateError if nothing was ever written to it."""
    if layer.pages is None:
        raise CacheStateError("an empty cache has no keys and values")
    return layer.pages
