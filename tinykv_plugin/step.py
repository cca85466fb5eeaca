"""Step: one forward pass over some sequences, its places in the pages worked out once for all layers of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np

from .block_table import BlockTable, HostArray
from .metadata import int32
from .table import PageTable

if TYPE_CHECKING:
    import weakref

    from .sequence import PagedSequence

T = TypeVar("T")


class GroupStep:
    """A step in one cache group: where its tokens go and what they may read. Arrays are made at first use.

    Row ``b`` has ``query_lens[b]`` new tokens and ``context_lens[b]`` with them; ``width`` is the number of query
    tokens in the model's tensors (rows with fewer are padded on the right). ``open`` is the same step in the pages
    where tokens are read from until their page is full (None: there are none).
    """

    __slots__ = (
        "_arrays",
        "_table",
        "alone",
        "context_lens",
        "keep",
        "open",
        "page_size",
        "query_lens",
        "stepwise",
        "tables",
        "width",
        "window",
    )

    def __init__(
        self,
        tables: Sequence[PageTable],
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        width: int,
        table: BlockTable | None = None,
    ) -> None:
        self.tables = tables
        self.context_lens = context_lens
        self.query_lens = query_lens
        self.width = width
        self.page_size = tables[0].page_size
        self.window = tables[0].retention.window
        self.keep = tables[0].retention.keep
        # One row, without padding.
        self.alone = len(tables) == 1 and query_lens[0] == width
        # Whether the tokens read as if they came one by one (drafts), where a size limit keeps the first tokens.
        self.stepwise = False
        self.open: GroupStep | None = None
        self._table = table
        self._arrays: dict[object, Any] = {}

    @property
    def starts(self) -> list[int]:
        """Tokens of each row before this step."""
        return [context - query for context, query in zip(self.context_lens, self.query_lens, strict=True)]

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, called once per step and ``key``; for backends that derive index arrays from the step."""
        found = self._arrays.get(key)
        if found is None:
            found = self._arrays[key] = make()
        return found

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """The same for what depends on the tables' pages only: kept for later steps until these change."""
        return self.cached(key, make) if self._table is None else self._table.cached(key, make)

    def forget(self) -> None:
        """Pages have moved: the arrays are made again from the tables when they are needed."""
        self._table = None
        self._arrays.clear()

    def page_ids(self) -> mx.array:
        """int32 ``(n,)``: the pages of row ``b`` begin at ``row_starts()[b]``."""
        return self._rows().device_page_ids()

    def row_starts(self) -> mx.array:
        """int32 ``(batch,)``: where in ``page_ids()`` each row begins."""
        return self._rows().device_row_starts()

    def host_row_starts(self) -> HostArray:
        """:meth:`row_starts` as a numpy array; valid until the next step."""
        return self._rows().row_starts

    def block_table(self) -> mx.array:
        """int32 ``(batch, max_pages)``, padded with -1."""
        return self._rows().device_rectangle()

    def block_rows(self) -> HostArray:
        """The block table as a numpy array; valid until the next step."""
        return self._rows().rectangle()

    def context_lens_array(self) -> mx.array:
        """``context_lens`` as int32 ``(rows,)``."""
        return self.cached("context_lens", lambda: int32(self.context_lens))

    def query_lens_array(self) -> mx.array:
        """``query_lens`` as int32 ``(rows,)``."""
        return self.cached("query_lens", lambda: int32(self.query_lens))

    def full_until(self) -> mx.array:
        """Of an open step, int32 ``(rows,)``: queries before this position read all tokens from its pages."""
        return self.cached("full_until", lambda: int32([table.retention.start for table in self.tables]))

    def slot_mapping(self) -> mx.array:
        """int32 ``(batch, width)``: the slot of each new token, -1 for padding."""
        return self.cached("slot_mapping", lambda: mx.array(self.slots()))

    def slots(self) -> HostArray:
        """The slot mapping as a numpy array."""
        size = self.page_size
        pages, starts = self._rows().page_ids, self._rows().row_starts
        if self.width == 1 and all(self.query_lens):
            positions = np.asarray(self.context_lens, dtype=np.int32) - 1
            slots: HostArray = pages[starts + positions // size] * size + positions % size
            return slots[:, None]
        slots = np.full((len(self.tables), self.width), -1, dtype=np.int32)
        for row, start, context, query in zip(slots, starts, self.context_lens, self.query_lens, strict=True):
            positions = np.arange(context - query, context, dtype=np.int32)
            held = pages[start + positions // size]
            # Open pages aren't kept of all tokens.
            row[:query] = np.where(held < 0, -1, held * size + positions % size)
        return slots

    def _rows(self) -> BlockTable:
        if self._table is None:
            self._table = BlockTable()
            self._table.update(self.tables, ())
        return self._table


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
