"""Step: one forward pass over some sequences, its places in the pages worked out once for all layers of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np

from .metadata import int32
from .table import PageTable

if TYPE_CHECKING:
    import weakref

    from .sequence import PagedSequence

T = TypeVar("T")


class GroupStep:
    """A step in one cache group: where its tokens go and what they may read. Arrays are made at first use.

    Row ``b`` has ``query_lens[b]`` new tokens and ``context_lens[b]`` with them; ``width`` is the number of query
    tokens in the model's tensors (rows with fewer are padded on the right).
    """

    __slots__ = ("_arrays", "context_lens", "page_size", "query_lens", "tables", "width")

    def __init__(
        self, tables: Sequence[PageTable], context_lens: Sequence[int], query_lens: Sequence[int], width: int
    ) -> None:
        self.tables = tables
        self.context_lens = context_lens
        self.query_lens = query_lens
        self.width = width
        self.page_size = tables[0].page_size
        self._arrays: dict[object, Any] = {}

    @property
    def window(self) -> int | None:
        return self.tables[0].retention.window

    @property
    def keep(self) -> int:
        return self.tables[0].retention.keep

    @property
    def starts(self) -> list[int]:
        """Tokens of each row before this step."""
        return [context - query for context, query in zip(self.context_lens, self.query_lens, strict=True)]

    @property
    def alone(self) -> bool:
        """Whether the step has one row, without padding."""
        return len(self.tables) == 1 and self.query_lens[0] == self.width

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, called once per step and ``key``; for backends that derive index arrays from the step."""
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = make()
        return found

    def block_table(self) -> mx.array:
        """int32 ``(batch, max_pages)``, padded with -1."""
        if len(self.tables) == 1:
            # A table changes only when a page is opened or dropped: most decode steps find its array ready.
            arrays = self.tables[0].arrays
            if "device" not in arrays:
                arrays["device"] = int32([self.tables[0].pages])
            table: mx.array = arrays["device"]
            return table
        return self.cached("block_table", lambda: mx.array(self.block_rows()))

    def block_rows(self) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """The block table as a numpy array."""
        rows = np.full((len(self.tables), max(len(table.pages) for table in self.tables)), -1, dtype=np.int32)
        for row, table in zip(rows, self.tables, strict=True):
            if "host" not in table.arrays:
                table.arrays["host"] = np.array(table.pages, dtype=np.int32)
            row[: len(table.pages)] = table.arrays["host"]
        return rows

    def context_lens_array(self) -> mx.array:
        return self.cached("context_lens", lambda: int32(self.context_lens))

    def query_lens_array(self) -> mx.array:
        return self.cached("query_lens", lambda: int32(self.query_lens))

    def slot_mapping(self) -> mx.array:
        """int32 ``(batch, width)``: the slot of each new token, -1 for padding."""
        return self.cached("slot_mapping", lambda: mx.array(self.slots()))

    def slots(self) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """The slot mapping as a numpy array."""
        size = self.page_size
        slots = np.full((len(self.tables), self.width), -1, dtype=np.int32)
        for row, table, context, query in zip(slots, self.tables, self.context_lens, self.query_lens, strict=True):
            if query == 1:
                row[0] = table.pages[(context - 1) // size] * size + (context - 1) % size
            elif query:
                positions = np.arange(context - query, context, dtype=np.int32)
                first = (context - query) // size
                pages = np.array(table.pages[first:], dtype=np.int32)
                row[:query] = pages[positions // size - first] * size + positions % size
        return slots


class Step:
    """One forward pass: begun by the first layer that writes, over when every layer has written.

    ``layers`` and ``done`` are bit sets of layer indices; ``groups`` has one entry per cache group. Rows are held
    weakly: a pass that broke off must not keep its requests' pages.
    """

    __slots__ = ("done", "groups", "layers", "rows", "width")

    def __init__(
        self,
        rows: Sequence[weakref.ref[PagedSequence]],
        width: int,
        layers: int,
        groups: Sequence[GroupStep],
    ) -> None:
        self.rows = rows
        self.width = width
        self.layers = layers
        self.done = 0
        self.groups = groups

    def finish_layer(self, bit: int) -> None:
        """Layer ``bit`` has written; after the last one the rows have their new length."""
        self.done |= bit
        if self.layers & ~self.done == 0:
            for row in self.live_rows():
                row.tokens += row.growing
                row.step = None
                row.growing = 0

    def live_rows(self) -> list[PagedSequence]:
        """The rows whose requests still exist and are in this step."""
        return [row for ref in self.rows if (row := ref()) is not None and row.step is self]
