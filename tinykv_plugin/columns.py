"""Which pages and slots a step's queries may see, as the index arrays that mlx gathers K and V with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .masks import prior_tokens
from .metadata import int32
from .step import GroupStep

# Rows are attended to together if the longest is at most this much longer than the shortest, or by a few tokens, and
# if the gathered tokens stay few: larger temporaries cost more than another call (measured on a CPU).
BUCKET_STRETCH = 1.25
BUCKET_SLACK = 64
BUCKET_TOKENS = 8192

# A row of at most this many runs of consecutive pages is joined run by run, which copies each token once.
MAX_RUNS = 8


def visible(step: GroupStep, row: int) -> list[tuple[int, int]]:
    """The positions a row's queries may see, as ascending (start, stop) spans: kept tokens and newest ones."""
    context = step.context_lens[row]
    start = context - step.query_lens[row]
    prior = prior_tokens(start, step.window)
    kept = min(step.keep, prior)
    newest = start - prior + kept
    return [(newest - kept, context)] if newest == kept else [(0, kept), (newest, context)]


Span = tuple[list[tuple[int, int]] | mx.array, int, int]


def spans_of(step: GroupStep, views: bool = True) -> list[Span]:
    """For each span of row 0: its pages (runs of consecutive ids, or an index array), tokens to skip, tokens.

    With an index array the pages are copied; runs may be joined by a view of the pool if ``views`` allow.
    """
    found: list[Span] = []
    size = step.page_size
    for start, stop in visible(step, 0):
        if start == stop:
            continue
        ids = step.tables[0].pages[start // size : -(-stop // size)].tolist()
        runs = _runs(ids) if views else []
        pages = runs if 0 < len(runs) <= MAX_RUNS else int32(ids)
        found.append((pages, start % size, stop - start))
    return found


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive page ids as (start, stop); gives up once there are more than MAX_RUNS."""
    cuts = np.flatnonzero(np.diff(np.asarray(ids)) != 1) + 1
    if len(cuts) >= MAX_RUNS:
        return [(0, 0)] * (MAX_RUNS + 1)
    bounds = [0, *cuts.tolist(), len(ids)]
    return [(ids[a], ids[b - 1] + 1) for a, b in itertools.pairwise(bounds)]


def join(pages: mx.array, spans: list[Span]) -> mx.array:
    """The spans' tokens as ``(1, heads, tokens, dim)``."""
    parts = []
    _, heads, _, dim = pages.shape
    if not dim:  # mlx can't index an array without elements
        return mx.zeros((1, heads, sum(count for *_, count in spans), 0), pages.dtype)
    for which, skip, count in spans:
        if not isinstance(which, list):
            joined = pages[which].swapaxes(0, 1)
        elif len(which) == 1:
            ((start, stop),) = which
            joined = pages[start:stop].swapaxes(0, 1)
        else:
            joined = mx.concatenate([pages[start:stop].swapaxes(0, 1) for start, stop in which], axis=1)
        slots = joined.shape[1] * joined.shape[2]
        parts.append(joined.reshape(1, heads, slots, dim)[:, :, skip : skip + count])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


@dataclass(frozen=True)
class Buckets:
    """Rows of like length, attended to together: (row indices, their part of the step), and the way back to order."""

    parts: list[tuple[mx.array, GroupStep]]
    order: mx.array


def buckets_of(step: GroupStep) -> Buckets:
    """Sort the rows by length and cut where padding to the longest would cost more than another call."""
    lengths = [sum(stop - start for start, stop in visible(step, row)) for row in range(len(step.tables))]
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    cuts = [0]
    for position, row in enumerate(order):
        first = lengths[order[cuts[-1]]]
        rows = position - cuts[-1]
        if rows and (lengths[row] > BUCKET_STRETCH * first + BUCKET_SLACK or (rows + 1) * lengths[row] > BUCKET_TOKENS):
            cuts.append(position)
    parts = []
    for start, stop in itertools.pairwise([*cuts, len(order)]):
        rows_of_part = order[start:stop]
        part = GroupStep(
            [step.tables[row] for row in rows_of_part],
            [step.context_lens[row] for row in rows_of_part],
            [step.query_lens[row] for row in rows_of_part],
            step.width,
        )
        part.cached("buckets", lambda: Buckets([], int32([])))
        parts.append((int32(rows_of_part), part))
    return Buckets(parts, int32(np.argsort(order)))


def column_count(step: GroupStep) -> int:
    """Columns of the longest row."""
    return max(1, max(sum(stop - start for start, stop in visible(step, row)) for row in range(len(step.tables))))


@dataclass(frozen=True)
class Columns:
    """How to gather every row's columns: ``index`` into the page arrays, and ``valid`` (None: all hold a token)."""

    index: tuple[mx.array, mx.array]
    whole_pages: bool
    columns: int
    valid: mx.array | None

    def of(self, pages: mx.array) -> mx.array:
        """Gathered columns ``(batch, heads, columns, dim)``; those without a token are zeros.

        Zeroed and not only masked: a slot that holds NaN from another request would survive a mask as 0 x NaN.
        """
        if not pages.shape[3]:  # mlx can't index an array without elements
            return mx.zeros((self.index[0].shape[0], pages.shape[1], self.columns, 0), pages.dtype)
        if self.whole_pages:
            page_ids, batch = self.index[0], self.index[0].shape[0]
            heads = mx.arange(pages.shape[1])[None, :, None]
            count = page_ids.shape[2] * pages.shape[2]
            joined = pages[page_ids, heads].reshape(batch, pages.shape[1], count, pages.shape[3])
            gathered = joined[:, :, : self.columns]
        else:
            page_ids, slots = self.index
            gathered = pages[page_ids, :, slots].transpose(0, 2, 1, 3)
        return gathered if self.valid is None else mx.where(self.valid, gathered, mx.array(0, dtype=pages.dtype))


def page_columns(step: GroupStep) -> Columns:
    """Without a window a row's columns are its pages from the first on: gathered whole, cut at the longest row."""
    lengths = np.array(step.context_lens)
    columns = column_count(step)
    valid = np.arange(columns)[None] < lengths[:, None]
    page_ids = np.maximum(step.block_rows()[:, : -(-columns // step.page_size)], 0)[:, None]
    if not page_ids.size:
        page_ids = np.zeros((len(lengths), 1, 1), dtype=np.int32)
    ids = int32(page_ids)
    return Columns((ids, ids), True, columns, None if valid.all() else mx.array(valid[:, None, :, None]))


def token_columns(step: GroupStep) -> Columns:
    """With a window a row's columns start anywhere in a page: gathered token by token."""
    size = step.page_size
    rows = [
        np.concatenate([np.arange(start, stop) for start, stop in visible(step, row)])
        for row in range(len(step.tables))
    ]
    columns = column_count(step)
    page_ids = np.zeros((len(rows), columns), dtype=np.int32)
    slots = np.zeros_like(page_ids)
    valid = np.zeros((len(rows), 1, columns, 1), dtype=bool)
    for index, (row, table) in enumerate(zip(rows, step.tables, strict=True)):
        if len(row):
            page_ids[index, : len(row)] = np.asarray(table.pages, dtype=np.int32)[row // size]
            slots[index, : len(row)] = row % size
            valid[index, 0, : len(row)] = True
    return Columns((int32(page_ids), int32(slots)), False, columns, None if valid.all() else mx.array(valid))
