"""PoolMap: which pages of a pool are free, used, shared or cached, and by whom, in a picture of bounded size."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .pool import PagePool
    from .sequence import PagedSequence
    from .session import PagedSession

FREE, USED, SHARED, CACHED = range(4)
STATES = ("free", "used", "shared", "cached")

OTHERS = -1
"""The key of sequences that were not asked for by name."""


@dataclass(frozen=True)
class PoolMap:
    """The pages of one cache group, in order, ``per_cell`` to a cell.

    ``storage`` says how K/V are stored, such as "float16"; ``quantized`` whether in fewer bits than the model's.
    ``counts``, uint32 ``(len(STATES), cells)``: pages of each state in each cell. ``masks`` and ``pages_of`` say for
    each key which cells (bool, ``(cells,)``) and how many pages its sequences hold.
    """

    group: str
    layers: int
    page_size: int
    page_bytes: int
    storage: str
    quantized: bool
    pages: int
    per_cell: int
    counts: NDArray[np.uint32]
    masks: dict[int, NDArray[np.bool_]]
    pages_of: dict[int, int]


@dataclass(frozen=True)
class _Books:
    """What was copied from a pool under the session's lock: the holders of each page, and each table once.

    ``tables``: page ids, and the keys of the sequences that hold the table.
    """

    capacity: int
    ref_counts: array[int]
    tables: list[tuple[array[int], list[int]]]


def page_maps(
    session: PagedSession,
    cells: int,
    named: Mapping[int, weakref.ref[PagedSequence]],
) -> list[PoolMap]:
    """One map for each cache group of ``session``, of at most ``cells`` cells.

    ``named`` are the sequences to tell apart, by keys that are not negative. A page is "shared" if several sequences
    hold it, "cached" if only the prefix cache does.

    Any thread may ask. The session's lock is held while the books are copied, some 4 bytes a page.
    """
    with session.lock:
        session.collect_abandoned()
        books = [_copy(session, group, pool, named) for group, pool in enumerate(session.pools)]
        about = [
            (pool.name, len(pool.layers), pool.page_size, pool.page_bytes, *_storage(pool)) for pool in session.pools
        ]
    return [PoolMap(*facts, *_draw(book, cells)) for facts, book in zip(about, books, strict=True)]


def _storage(pool: PagePool) -> tuple[str, bool]:
    """How a pool's layers store K and V, and whether in fewer bits than the model makes them."""
    specs = [pages.spec for pages in pool.layers.values()]
    names = dict.fromkeys(spec.storage() for spec in specs)
    return "; ".join(names), any(spec != spec.unpacked for spec in specs)


def _copy(
    session: PagedSession,
    group: int,
    pool: PagePool,
    named: Mapping[int, weakref.ref[PagedSequence]],
) -> _Books:
    keys = {id(row): key for key, reference in named.items() if (row := reference()) is not None}
    tables: dict[int, tuple[array[int], list[int]]] = {}
    for row in session.live_sequences():
        table = row.tables[group]
        _, holders = tables.setdefault(id(table), (table.pages[:], []))
        holders.append(keys.get(id(row), OTHERS))
    return _Books(pool.allocator.capacity, pool.allocator.ref_counts(), list(tables.values()))


def _draw(
    books: _Books, cells: int
) -> tuple[int, int, NDArray[np.uint32], dict[int, NDArray[np.bool_]], dict[int, int]]:
    """The fields of a :class:`PoolMap` from ``pages`` on."""
    per_cell = max(1, -(-books.capacity // cells))
    length = -(-books.capacity // per_cell)
    holders = np.zeros(length * per_cell, np.int32)
    holders[: len(books.ref_counts)] = books.ref_counts
    sequences = np.zeros_like(holders)  # that hold a page
    masks: dict[int, NDArray[np.bool_]] = {}
    pages_of: dict[int, int] = {}
    for table, keys in books.tables:
        pages = np.array(table, np.int32)
        pages = pages[pages >= 0]
        sequences[pages] += len(keys)
        for key in keys:
            mask = masks.setdefault(key, np.zeros(length, np.bool_))
            mask[pages // per_cell] = True
            pages_of[key] = pages_of.get(key, 0) + len(pages)
    states = np.full_like(holders, FREE)
    states[holders > 0] = CACHED
    states[sequences == 1] = USED
    states[sequences > 1] = SHARED
    states[books.capacity :] = len(STATES)
    split = states.reshape(length, per_cell)
    counts = np.stack([(split == state).sum(axis=1, dtype=np.uint32) for state in range(len(STATES))])
    return books.capacity, per_cell, counts, masks, pages_of
