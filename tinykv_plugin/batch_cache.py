"""BatchPagedKVCache: mlx-lm's batch cache protocol for one layer of several requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .errors import CacheStateError
from .layout import leaves
from .masks import prior_tokens, row_masks
from .metadata import PagedMask
from .sequence import BROKEN_OFF, PagedSequence
from .view import LayerView

if TYPE_CHECKING:
    from .cache import PagedKVCache
    from .layer import PagedLayer
    from .session import PagedSession


class BatchPagedKVCache(LayerView):
    """One layer's view of some PagedSequences. Rows have their own lengths; nothing is padded.

    Joining, leaving, splitting and extracting move rows between lists and touch no K/V.
    """

    def __init__(self, session: PagedSession, layer: PagedLayer, rows: list[PagedSequence]) -> None:
        super().__init__(session, layer)
        self._rows = rows
        # Valid tokens still to come per row while a right-padded prompt is processed.
        self._lengths: list[int] | None = None
        _same_retention(layer, rows)

    def _current_rows(self) -> Sequence[PagedSequence]:
        return self._rows

    @property
    def offset(self) -> mx.array:
        """int32 ``(rows,)``: tokens of each row; not updated in place later."""
        return self._session.offsets([row.offset(self._layer.bit) for row in self._rows])

    @property
    def window(self) -> int | None:
        """Tokens a query looks back on, itself included; None: all."""
        return self._rows[0].tables[self._layer.group].retention.window if self._rows else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``(rows, kv_heads, tokens, head_dim)``, each row's valid tokens only.

        The first layer of a forward pass reserves the pages of all rows for all layers, or none: raises
        OutOfPagesError or PoolGrowthError with every row as before the call.
        """
        session, layer, rows = self._session, self._layer, self._rows
        width = keys.shape[2]
        if keys.shape[0] != len(rows):
            raise CacheStateError(
                f"a batch cache of {len(rows)} rows was given {keys.shape[0]}; merge or filter it to as many rows first"
            )
        with session.lock:
            step = rows[0].step
            if step is None or any(row.step is not step for row in rows) or len(step.rows) != len(rows):
                if any(row.step is not None and row.step.done for row in rows):
                    self._heal()
                    raise CacheStateError(BROKEN_OFF)
                step = session.begin(rows, self._next_lens(width), width)
            elif step.done & layer.bit:
                self._heal()
                raise CacheStateError(BROKEN_OFF)
            elif step.width != width:
                raise CacheStateError(f"layer {layer.index} writes {width} tokens where others wrote {step.width}")
            metadata = session.write(layer, step, keys, values)
        if self._lengths is not None:
            self._lengths = [max(0, length - width) for length in self._lengths]
        return self._hand_out(metadata)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """The mask for the next ``N`` tokens of each row; called by models at the start of a forward pass."""
        bit = self._layer.bit
        if any(row.trims or (row.step is not None and row.step.done & bit) for row in self._rows):
            with self._session.lock:
                self._heal()
        window = self.window
        limit = min((size for size in (window, window_size) if size is not None), default=None)
        starts = [row.offset(bit) for row in self._rows]
        reaches_all = limit is None or max(starts) + N <= limit
        chunk = None if reaches_all else self._layer.chunk
        if self._layer.handles and not return_array:
            if N == 1 and (reaches_all or (limit == window and chunk is None)):
                return None
            return "causal" if reaches_all or limit is None else PagedMask(limit, chunk)
        lens = self._next_lens(N)
        priors = [prior_tokens(start, window) for start in starts]
        columns = max(1, max(prior + count for prior, count in zip(priors, lens, strict=True)))
        return row_masks(N, priors, lens, columns, limit, True, starts, chunk)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say how many of the tokens to come are each row's own; the others are padding and not written."""
        if left_padding is not None and any(left_padding):
            raise CacheStateError(
                f"left_padding={list(left_padding)}: paged caches take prompts padded on the right, not on the left; "
                f"pass lengths and right_padding"
            )
        if right_padding is not None and any(right_padding):
            if lengths is None:
                raise CacheStateError(
                    f"right_padding={list(right_padding)} needs the rows' lengths beside it: prepare(lengths=...)"
                )
            self._lengths = [int(length) for length in lengths]

    def finalize(self) -> None:
        """The padded prompt is processed. Padding was never written, so there is nothing to move."""
        self._lengths = None

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the given rows, in that order; the others' pages go back when no other layer holds them."""
        indices: list[int] = np.asarray(batch_indices).tolist()
        self._rows = [self._rows[index] for index in indices]
        if self._lengths is not None:
            self._lengths = [self._lengths[index] for index in indices]

    def extend(self, other: BatchPagedKVCache) -> None:
        """Take over the rows of ``other``, which must not be used further."""
        rows = self._rows + other._rows
        _same_retention(self._layer, rows)
        self._rows = rows

    def extract(self, idx: int) -> PagedKVCache:
        """One row as a cache of its own that shares its pages."""
        with self._session.lock:
            return self._session.single(self._layer, self._rows[idx].fork(self._layer.bit, "extract"))

    def size(self) -> int:
        """Tokens of the longest row."""
        return max((row.offset(self._layer.bit) for row in self._rows), default=0)

    def empty(self) -> bool:
        """Whether no row has a token."""
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's pages, those shared by rows counted once."""
        return self._layer.held_bytes([row.tables[self._layer.group] for row in self._rows])

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken back from every row."""
        tables = [row.tables[self._layer.group] for row in self._rows]
        return all(not table.first_position or table.retention.rewind > 0 for table in tables)

    def trim(self, n: int) -> int:
        """Take back each row's last ``n`` tokens; returns how many the longest row had to take.

        Raises CacheStateError, with every row as it was, for a negative ``n`` and where a row's window has passed.
        """
        if n < 0:
            raise CacheStateError(f"trim takes the number of tokens to take back, not {n}")
        with self._session.lock:
            for row in self._rows:
                if row.step is not None:
                    row.heal()
                row.trim_target(self._layer.bit, n)
            return max((row.trim(self._layer.bit, n) for row in self._rows), default=0)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPagedKVCache:
        bit = self._layer.bit
        with self._session.lock:
            forks = [memo.get(id(row)) or memo.setdefault(id(row), row.fork(bit)) for row in self._rows]
            for fork in forks:
                fork.layers |= bit
        copy = BatchPagedKVCache(self._session, self._layer, forks)
        copy._lengths = None if self._lengths is None else list(self._lengths)
        return copy

    def __repr__(self) -> str:
        return f"<BatchPagedKVCache layer {self._layer.index}, {len(self._rows)} rows>"

    def _next_lens(self, width: int) -> list[int]:
        if self._lengths is None:
            return [width] * len(self._rows)
        return [min(width, length) for length in self._lengths]

    def _heal(self) -> None:
        for row in self._rows:
            row.heal()


def rows_of(caches: Sequence[Any]) -> list[PagedSequence] | None:
    """The requests in a batch's list of caches, in order; None if no layer of the model is paged."""
    for leaf in leaves(caches):
        if isinstance(leaf, BatchPagedKVCache):
            return leaf._rows
    return None


def _same_retention(layer: PagedLayer, rows: Sequence[PagedSequence]) -> None:
    retentions = {row.tables[layer.group].retention for row in rows}
    if len(retentions) > 1:
        limits = sorted(str(retention.window) for retention in retentions)
        raise CacheStateError(
            f"requests with different max_kv_size can't be batched: {', '.join(limits)}; "
            f"give them the same, or run them apart"
        )
