"""BlockTable: the pages of a running batch's rows for kernels, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .metadata import int32
from .table import PageTable

T = TypeVar("T")

HostArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    """What is written of a row: the table's state then, how many of its pages, and the room there is for them."""

    table: PageTable | None = None
    revision: int = -1
    dropped: int = 0
    length: int = 0
    room: int = 0


class BlockTable:
    """Page ids of all rows, one row after the other with room to grow: :attr:`page_ids` and :attr:`row_starts`.

    :meth:`update` is told which rows may have changed and writes only what did; a row that joins, leaves or moves
    costs its own pages at most (:meth:`rearrange`), whatever the others hold. On request there is the rectangle too.

    Kernels that are still to run may read the memory that is written here. That does no harm: new pages follow a
    row's old ones, where those kernels don't read, and any other change puts the row in a place nobody has used.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._starts: HostArray = np.zeros(0, dtype=np.int32)
        # Rows that have no place yet.
        self._new: list[int] = []
        self._host: HostArray = np.zeros(0, dtype=np.int32)
        self._end = 0
        # The host's memory as an array, once somebody has asked for it.
        self._device: mx.array | None = None
        self._device_starts: mx.array | None = None
        self._rectangle: HostArray | None = None
        self._device_rectangle: mx.array | None = None
        self._derived: dict[object, Any] = {}

    @property
    def page_ids(self) -> HostArray:
        """int32 ``(n,)``; valid until the next update, as everything here."""
        return self._host

    @property
    def row_starts(self) -> HostArray:
        """int32 ``(rows,)``: where in :attr:`page_ids` each row begins."""
        return self._starts

    def device_page_ids(self) -> mx.array:
        """:attr:`page_ids` as an evaluated array."""
        if self._device is None:
            self._device = mx.array(self._host)
            if writes_in_place():
                self._host = np.frombuffer(memoryview(self._device), dtype=np.int32)  # type: ignore[arg-type]
        return self._device

    def device_row_starts(self) -> mx.array:
        """:attr:`row_starts` as an evaluated array."""
        if self._device_starts is None:
            self._device_starts = int32(self._starts)
        return self._device_starts

    def rectangle(self) -> HostArray:
        """int32 ``(rows, max_pages)``, padded with -1, which also stands for pages that a window has dropped."""
        if self._rectangle is None:
            width = max((row.length for row in self._rows), default=0)
            self._rectangle = np.full((len(self._rows), width), -1, dtype=np.int32)
            for to, row, start in zip(self._rectangle, self._rows, self._starts.tolist(), strict=True):
                to[: row.length] = self._host[start : start + row.length]
                if row.dropped:
                    assert row.table is not None
                    first = min(row.table.kept_pages, row.dropped)
                    to[first : row.dropped] = -1
        return self._rectangle

    def device_rectangle(self) -> mx.array:
        """:meth:`rectangle` as an evaluated array."""
        if self._device_rectangle is None:
            self._device_rectangle = int32(self.rectangle())
        return self._device_rectangle

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, called once for ``key`` until the table changes."""
        found = self._derived.get(key)
        if found is None:
            found = self._derived[key] = make()
        return cast("T", found)

    def rearrange(self, sources: Sequence[int]) -> None:
        """Row ``i`` becomes what row ``sources[i]`` was; -1: a new one."""
        self._new = [index for index, source in enumerate(sources) if source < 0]
        self._rows = [self._rows[source] if source >= 0 else _Row() for source in sources]
        self._starts = np.append(self._starts, np.int32(0))[np.asarray(sources, dtype=np.int64)]
        self._device_starts = self._rectangle = self._device_rectangle = None
        self._derived.clear()

    def update(self, tables: Sequence[PageTable], changed: Iterable[int]) -> None:
        """Bring the rows with the indices ``changed`` up to date, and those that are new."""
        if not self._rows:
            self.rearrange([-1] * len(tables))
        moving, writing = [], []
        for index in {*self._new, *changed}:
            row, table = self._rows[index], tables[index]
            if row.table is not table or row.revision != table.revision:
                self._rows[index] = row = _Row(table, table.revision)
            elif row.length == len(table.pages) and row.dropped == table.dropped:
                continue
            if len(table.pages) > row.room:
                row.length = 0  # all of it has to be written
                moving.append(index)
            writing.append(index)
        if writing:
            self._changed()
            self._new = []
            self._place(moving, tables)
            for index in writing:
                self._write(index)

    def _changed(self) -> None:
        self._rectangle = self._device_rectangle = None
        self._derived.clear()
        if not writes_in_place():
            self._device = None

    def _place(self, indices: Sequence[int], tables: Sequence[PageTable]) -> None:
        """Give rows that are to be written as a whole a place with room for more pages than they have."""
        for index in indices:
            pages = len(tables[index].pages)
            self._rows[index].room = pages + pages // 8 + 1
        needed = sum(self._rows[index].room for index in indices)
        if self._end + needed > len(self._host):
            self._move(needed)
        for index in indices:
            self._starts[index] = self._end
            self._end += self._rows[index].room
        if indices:
            self._device_starts = None

    def _move(self, needed: int) -> None:
        """Take new memory, without the places that rows have left, and with ``needed`` more and half as much again."""
        old, live = self._host, sum(row.room for row in self._rows)
        self._host = np.zeros((live + needed) * 3 // 2, dtype=np.int32)
        self._device = self._device_starts = None
        self._end = 0
        starts = self._starts.tolist()
        for index, row in enumerate(self._rows):
            if row.length:
                self._host[self._end : self._end + row.length] = old[starts[index] : starts[index] + row.length]
                starts[index] = self._end
                self._end += row.room
        self._starts = np.array(starts, dtype=np.int32)

    def _write(self, index: int) -> None:
        row, start = self._rows[index], int(self._starts[index])
        assert row.table is not None
        pages = row.table.pages
        if len(pages) > row.length:
            self._host[start + row.length : start + len(pages)] = np.frombuffer(pages, dtype=np.int32)[row.length :]
        row.length, row.dropped = len(pages), row.table.dropped


def writes_in_place() -> bool:
    """Whether an array is changed under kernels that read other parts of it: a GPU gets a new one instead.

    That a GPU would see such writes in time was not tried.
    """
    return bool(mx.default_device() == mx.Device(mx.cpu))
