"""Which pages and slots a step's queries may see, as the index arrays that mlx gathers K and V with."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

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

# Arrays with fewer elements are cut by one call with strides, at a third of what slicing and reshaping cost: much of
# a small model's decode step is such calls. mlx makes it from a view with one dimension, whose length has 32 bits.
FLAT = 2**31


def visible(step: GroupStep, row: int) -> list[tuple[int, int]]:
    """The positions a row's queries may see, as ascending (start, stop) spans: kept tokens and newest ones."""
    context = step.context_lens[row]
    start = context - step.query_lens[row]
    prior = prior_tokens(start, step.window)
    kept = min(step.keep, prior)
    newest = start - prior + kept
    return [(newest - kept, context)] if newest == kept else [(0, kept), (newest, context)]


def positions(step: GroupStep, row: int) -> npt.NDArray[np.int64]:
    """:func:`visible`, position by position: what stands in a row's gathered columns."""
    return np.concatenate([np.arange(start, stop) for start, stop in visible(step, row)])


# Pages as runs (start, stop) of consecutive ids, or as an index array.
Located: TypeAlias = "list[tuple[int, int]] | mx.array"

# What mx.as_strided takes: shape, strides, offset.
Strided = tuple[tuple[int, ...], tuple[int, ...], int]


class Spans:
    """What row 0 of a step may see, to be joined from its pages; made once for all layers of a group.

    With ``views``, runs of consecutive pages may be joined by a view of the pool, else every page is copied.
    """

    def __init__(self, step: GroupStep, views: bool) -> None:
        size = step.page_size
        # Pages, tokens to skip, tokens.
        self._spans: list[tuple[Located, int, int]] = []
        for start, stop in visible(step, 0):
            if start < stop:
                first, last = start // size, -(-stop // size)
                pages = step.kept((first, last, views), functools.partial(_located, step, first, last, views))
                self._spans.append((pages, start % size, stop - start))
        self._cuts: dict[tuple[int, ...], list[tuple[list[Strided] | mx.array, Strided]]] = {}

    def join(self, pages: mx.array, step: GroupStep) -> mx.array:
        """The tokens as ``(1, heads, tokens, dim)``, of ``pages`` ``(num_pages, heads, page_size, dim)``.

        ``step`` is the one this was made for: it holds this, and must not be held by it.
        """
        shape = pages.shape
        cuts = self._cuts.get(shape)
        if cuts is None:
            if not shape[3]:  # mlx can't index an array without elements
                return mx.zeros((1, shape[1], sum(count for *_, count in self._spans), 0), pages.dtype)
            if pages.size >= FLAT:
                return self._join_large(pages)
            cuts = self._cuts[shape] = self._make_cuts(shape, step)
        parts = []
        for which, cut in cuts:
            if not isinstance(which, list):
                joined = mx.take(mx.flatten(pages, 0, 1), which, 0)
            elif len(which) == 1:
                joined = mx.as_strided(pages, *which[0])
            else:
                joined = mx.concatenate([mx.as_strided(pages, *run) for run in which], axis=1)
            parts.append(mx.as_strided(joined, *cut))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)

    def _make_cuts(self, shape: tuple[int, ...], step: GroupStep) -> list[tuple[list[Strided] | mx.array, Strided]]:
        """How pages of ``shape`` are cut: each span as ``(heads, pages, page_size, dim)``, then its tokens."""
        _, heads, size, dim = shape
        head = size * dim
        page = heads * head
        cuts: list[tuple[list[Strided] | mx.array, Strided]] = []
        for which, skip, count in self._spans:
            runs: list[Strided] | mx.array
            if isinstance(which, mx.array):
                # A row for each head's part of a page: each is copied once, to where it is wanted.
                held = which.size
                runs = step.kept((id(which), heads), functools.partial(_rows_of_heads, which, heads))
            else:
                held = sum(stop - start for start, stop in which)
                runs = [((heads, stop - start, size, dim), (head, page, dim, 1), start * page) for start, stop in which]
            cuts.append((runs, ((1, heads, count, dim), (0, held * head, dim, 1), skip * dim)))
        return cuts

    def _join_large(self, pages: mx.array) -> mx.array:
        """The same for arrays of any size."""
        _, heads, _, dim = pages.shape
        parts = []
        for which, skip, count in self._spans:
            found = (
                pages[which]
                if isinstance(which, mx.array)
                else mx.concatenate([pages[start:stop] for start, stop in which])
            )
            parts.append(found.swapaxes(0, 1).reshape(1, heads, -1, dim)[:, :, skip : skip + count])
        return mx.concatenate(parts, axis=2)


def _rows_of_heads(pages: mx.array, heads: int) -> mx.array:
    """int32 ``(heads, pages)``: where these pages are in an array of every page's heads."""
    return int32(np.array(pages) * heads + np.arange(heads)[:, None])


def _located(step: GroupStep, first: int, last: int, views: bool) -> Located:
    """Row 0's logical pages from ``first`` up to ``last``: as runs if ``views`` are allowed and the runs are few."""
    ids = step.tables[0].pages[first:last].tolist()
    cuts = np.flatnonzero(np.diff(np.asarray(ids)) != 1) + 1
    if not views or len(cuts) >= MAX_RUNS:
        return int32(ids)
    bounds = [0, *cuts.tolist(), len(ids)]
    return [(ids[a], ids[b - 1] + 1) for a, b in itertools.pairwise(bounds)]


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
        if step.open is not None:
            part.open = GroupStep(
                [step.open.tables[row] for row in rows_of_part], part.context_lens, part.query_lens, step.width
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
    rows = [positions(step, row) for row in range(len(step.tables))]
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
