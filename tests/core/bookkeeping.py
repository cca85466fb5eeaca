"""A session without a model: pages are numpy arrays that hold token ids, so that bookkeeping can be tested fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from tinykv_plugin.config import KVCacheConfig
from tinykv_plugin.layer import PagedLayer
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.plan import CachePlan
from tinykv_plugin.pool import Budget
from tinykv_plugin.protocols import LayerChoice
from tinykv_plugin.session import PagedSession
from tinykv_plugin.step import GroupStep

SPEC = LayerSpec(1, 1, 1, mx.int32, mx.int32)


class Fault(MemoryError):
    """An injected failure."""


class WriteFault(Fault):
    """A failure after the reservation was committed."""


class Faults:
    """Raises at the ``at``-th call of :meth:`point` from now on; never while ``at`` is None."""

    def __init__(self) -> None:
        self.at: int | None = None

    def point(self, kind: type[Fault] = Fault) -> None:
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                raise kind("injected")


class ArrayBackend:
    """Keeps pages in numpy; every slot starts as -7, so that a stale read shows."""

    name = "array"
    direct = True
    priority = 0

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def supports(self, request: Any) -> list[str]:
        return []

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        old = 0 if pages.keys is None else pages.keys.shape[0]
        if num_pages != old:
            self.faults.point()
        new = np.full(pages.shape(num_pages)[0], -7, dtype=np.int32)
        if old:
            new[: min(old, num_pages)] = pages.keys[: min(old, num_pages)]
        pages.keys = pages.values = None if num_pages == 0 else new

    def write(self, metadata: Any, keys: Any, values: Any) -> None:
        self.faults.point(WriteFault)
        check_block_table(metadata.step)
        size = metadata.page_size
        for row, slots in enumerate(metadata.step.slots()):
            for token, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    metadata.pages.keys[slot // size, 0, slot % size, 0] = keys[row][0][token][0]

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self.faults.point()
            pages.keys[target] = pages.keys[source]

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("there is no attention in these tests")

    def dense(self, metadata: Any) -> Any:
        raise AssertionError("there is no attention in these tests")


def check_block_table(step: GroupStep) -> None:
    """The block table that is kept from step to step is the one that the rows' tables give afresh."""
    page_ids, starts = np.array(step.page_ids()), np.array(step.row_starts())
    rectangle = step.block_rows()
    assert np.array_equal(rectangle, np.array(step.block_table()))
    assert rectangle.shape == (len(step.tables), max(len(table.pages) for table in step.tables))
    for row, start, table in zip(rectangle, starts, step.tables, strict=True):
        pages = np.array(table.pages)
        assert np.array_equal(row, np.pad(pages, (0, len(row) - len(pages)), constant_values=-1))
        assert np.array_equal(page_ids[start : start + len(pages)][pages >= 0], pages[pages >= 0])


class Tokens(SimpleNamespace):
    """Stands for a K or V tensor ``(rows, 1, width, 1)`` of token ids."""

    def __getitem__(self, row: int) -> Any:
        return [[[token] for token in self.rows[row]]]


def tensor(rows: Sequence[Sequence[int]]) -> Any:
    return Tokens(rows=rows, shape=(len(rows), 1, len(rows[0]), 1), dtype=SPEC.dtype)


def make_session(
    faults: Faults,
    windows: Sequence[int | None] = (None, None, 6),
    page_size: int = 4,
    max_pages: int = 24,
    rewind: int = 3,
    memory: int = 1 << 30,
    prefix_cache: float = 1.0,
    budget: Budget | None = None,
) -> PagedSession:
    """A session with one layer per entry of ``windows``; with a ``budget`` it shares that one."""
    backend = ArrayBackend(faults)
    groups: dict[str, int | None] = {}
    layers = []
    for index, window in enumerate(windows):
        name = f"window {window}"
        groups.setdefault(name, window)
        layers.append(PagedLayer(index, LayerChoice("full", window), list(groups).index(name), True, "", SPEC))
    emit: Callable[[str, object], None] = lambda name, event: None  # noqa: E731
    context: Any = SimpleNamespace(
        config=KVCacheConfig(
            page_size=page_size, max_pages=max_pages, rewind=rewind, memory=memory, prefix_cache=prefix_cache
        ),
        emit=emit,
        gather=backend,
        own_cache=lambda: [None] * len(windows),
        model=SimpleNamespace(parameters=dict),
    )
    session = PagedSession(context, CachePlan(layers, groups, [], backend, []), budget or Budget(memory))
    for pool in session.pools:
        allocate = pool.allocate

        def faulty(count: int, promised: int = 0, allocate: Callable[[int, int], list[int]] = allocate) -> list[int]:
            faults.point()
            return allocate(count, promised)

        pool.allocate = faulty  # type: ignore[method-assign]
    return session


def held(cache: Any, position: int) -> int:
    """The token id in the slot of ``position`` in a cache's layer; -1 where the page was dropped."""
    table = cache._row.tables[cache._layer.group]
    page = table.pages[position // table.page_size]
    return -1 if page < 0 else int(cache._layer.pages.keys[page, 0, position % table.page_size, 0])
