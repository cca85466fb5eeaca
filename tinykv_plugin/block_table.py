"""BlockTable: the block table of a running batch, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .table import PageTable

T = TypeVar("T")

HostArray = npt.NDArray[np.int32]


class BlockTable:
    """int32 ``(rows, max_pages)`` on the host, padded with -1, and its copy on the device.

    A decode step changes a few entries, so :meth:`update` is told which rows may have changed and rewrites only what
    did: its cost doesn't grow with the context. The device copy is made again when anything changed.
    """

    def __init__(self) -> None:
        self._tables: list[PageTable] = []
        # What of each row is written: pages, those dropped by a window, and the table's revision.
        self._written: list[tuple[int, int, int]] = []
        self._lengths = np.zeros(0, dtype=np.int64)
        self._host: HostArray = np.full((0, 0), -1, dtype=np.int32)
        self._device: mx.array | None = None
        self._derived: dict[object, Any] = {}

    @property
    def host(self) -> HostArray:
        """A view that is valid until the next update."""
        return self._host[:, : int(self._lengths.max(initial=0))]

    def device(self) -> mx.array:
        """The table as an evaluated array."""
        if self._device is None:
            # Contiguous: mlx would take over the strides of a slice, which kernels don't expect.
            self._device = mx.array(np.ascontiguousarray(self.host))
        return self._device

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, called once for ``key`` until the table changes."""
        found = self._derived.get(key)
        if found is None:
            found = self._derived[key] = make()
        return cast("T", found)

    def update(self, tables: Sequence[PageTable], changed: Iterable[int]) -> None:
        """Bring the rows with the indices ``changed`` up to date; the first time all of them."""
        if not self._tables:
            self._tables = list(tables)
            self._written = [(0, 0, -1)] * len(tables)
            self._lengths = np.zeros(len(tables), dtype=np.int64)
            self._host = np.full((len(tables), max(len(table.pages) for table in tables)), -1, dtype=np.int32)
            changed = range(len(tables))
        for row in changed:
            self._write(row, tables[row])

    def _write(self, row: int, table: PageTable) -> None:
        pages = table.pages
        length, dropped, revision = self._written[row]
        if table is not self._tables[row] or revision != table.revision:
            length = dropped = 0
            self._host[row, len(pages) :] = -1
            self._tables[row] = table
        elif len(pages) == length and table.dropped == dropped:
            return
        if len(pages) > self._host.shape[1]:
            wider = np.full((len(self._tables), len(pages) * 3 // 2), -1, dtype=np.int32)
            wider[:, : self._host.shape[1]] = self._host
            self._host = wider
        self._host[row, length : len(pages)] = np.frombuffer(pages, dtype=np.int32)[length:]
        if table.dropped > dropped:
            first = max(dropped, table.kept_pages)
            self._host[row, first : max(first, table.dropped)] = -1
        self._written[row] = (len(pages), table.dropped, table.revision)
        self._lengths[row] = len(pages)
        self._device = None
        self._derived.clear()
