"""RunningBatch: rows that make their steps together, whose block tables are kept from step to step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .block_table import BlockTable

if TYPE_CHECKING:
    from .sequence import PagedSequence

# Batches whose block tables are kept: prompts and running rows take turns, and so do a few single requests.
MOST = 4


@dataclass(eq=False)
class RunningBatch:
    """Rows that make their steps together, and their block table in each cache group."""

    rows: list[weakref.ref[PagedSequence]]
    block_tables: list[BlockTable]

    def becomes(self, rows: list[weakref.ref[PagedSequence]]) -> bool:
        """Take over ``rows``, if some joined or left; False if most of them, or of those before, are others."""
        places = {id(ref): index for index, ref in enumerate(self.rows)}  # an object has one weak reference
        sources = [places.get(id(ref), -1) for ref in rows]
        if 2 * (len(rows) - sources.count(-1)) < max(len(rows), len(self.rows)):
            return False
        for block_table in self.block_tables:
            block_table.rearrange(sources)
        self.rows = rows
        return True


class RunningBatches:
    """The batches that ran last, ``recent`` first; ``groups`` is the number of cache groups."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self.recent: deque[RunningBatch] = deque(maxlen=MOST)

    def of(self, rows: Sequence[PagedSequence], refs: list[weakref.ref[PagedSequence]]) -> RunningBatch:
        """That of these rows, in this order: as it was, or the one they came from, or a new one."""
        batch = next((batch for batch in self.recent if batch.rows == refs), None)
        if batch is None:
            batch = next((row.batch for row in rows if row.batch in self.recent), None)
            if batch is None or not batch.becomes(refs):
                batch = RunningBatch(refs, [BlockTable() for _ in range(self._groups)])
        if not self.recent or batch is not self.recent[0]:
            if batch in self.recent:
                self.recent.remove(batch)
            self.recent.appendleft(batch)
        return batch
