"""PagedKVCache: mlx-lm's cache protocol for one layer of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .batch_cache import BatchPagedKVCache
from .errors import CacheStateError
from .kv_format import Affine
from .masks import sequence_mask
from .metadata import PagedMask
from .reading import pages_of, stored_tokens
from .sequence import PagedSequence
from .view import LayerView

if TYPE_CHECKING:
    from .layer import PagedLayer
    from .session import PagedSession


class PagedKVCache(LayerView):
    """One layer's view of a PagedSequence; takes the place of mlx-lm's KVCache and RotatingKVCache.

    ``copy.deepcopy`` is a fork that shares every page until one side writes.
    """

    def __init__(self, session: PagedSession, layer: PagedLayer, row: PagedSequence) -> None:
        super().__init__(session, layer)
        self._row = row

    def _current_rows(self) -> Sequence[PagedSequence]:
        return (self._row,)

    @property
    def offset(self) -> int:
        """Tokens written, those a window has dropped included."""
        return self._row.offset(self._layer.bit)

    @property
    def window(self) -> int | None:
        """Tokens a query looks back on, itself included; None: all."""
        return self._row.tables[self._layer.group].retention.window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append ``(1, kv_heads, tokens, head_dim)``; returns handles for attention (or gathered arrays).

        The first layer of a forward pass reserves the pages for all layers. Raises OutOfPagesError or
        PoolGrowthError with every layer as before the call, CacheStateError if the layers don't go together.
        """
        session, layer, row = self._session, self._layer, self._row
        batch, _, count, _ = keys.shape
        if batch != 1:
            raise CacheStateError(f"a cache of one request was given {batch} rows; merge the requests' caches first")
        with session.lock:
            step = row.step
            if step is None:
                step = session.begin([row], [count], count)
            elif step.done & layer.bit:
                row.heal()
                raise CacheStateError(
                    "the last forward pass broke off; its tokens were taken back: call the model again"
                )
            elif step.width != count:
                raise CacheStateError(f"layer {layer.index} writes {count} tokens where others wrote {step.width}")
            metadata = session.write(layer, step, keys, values)
        return self._hand_out(metadata)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """The mask for the next ``N`` tokens; called by models at the start of a forward pass."""
        row, bit = self._row, self._layer.bit
        if row.trims or (row.step is not None and row.step.done & bit):
            # This layer has written in a pass that others never finished: a new pass begins.
            with self._session.lock:
                row.heal()
        layer = self._layer
        keep = row.tables[layer.group].retention.keep if row.stepwise else 0
        return sequence_mask(
            N, row.offset(bit), self.window, layer.handles, return_array, window_size, keep, layer.chunk
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Copies of the tokens held, ``(1, kv_heads, tokens, head_dim)``; with a window only those it still holds."""
        keys, values = stored_tokens(self._session, self._layer, self._row)
        return pages_of(self._layer).spec.decode(keys, values)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> PagedKVCache:
        """What mlx-lm calls with its own ``kv_bits``: pages can't change their format, so it must be the one they have.

        Raises CacheStateError if it isn't.
        """
        wanted = (Affine(bits, group_size), Affine(bits, group_size))
        spec = pages_of(self._layer).spec
        if (spec.keys, spec.values) != wanted:
            raise CacheStateError(
                f"kv_bits={bits}, kv_group_size={group_size}: the pages of this model hold {spec.storage()}; set bits "
                f"and group_size where tinykv is attached instead (--kv-bits {bits} --kv-group-size {group_size})"
            )
        return self

    def size(self) -> int:
        """Tokens that can be attended to."""
        window = self.window
        return self.offset if window is None else min(self.offset, window)

    def empty(self) -> bool:
        """Whether there is no token yet."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's pages of the request, shared ones included."""
        return self._layer.held_bytes([self._row.tables[self._layer.group]])

    @classmethod
    def from_state(cls, state: object) -> PagedKVCache:
        """Not possible: the pages belong to a model's attachment. Raises CacheStateError."""
        raise CacheStateError("a paged cache needs its model; load it with tinykv_plugin.load_prompt_cache(…, kv=…)")

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken back; with a window only the last ``rewind`` ones are sure."""
        table = self._row.tables[self._layer.group]
        return not table.first_position or table.retention.rewind > 0

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens of this layer; returns how many there were to take.

        Raises CacheStateError for a negative ``n`` and where a window has dropped what would be needed.
        """
        if n < 0:
            raise CacheStateError(f"trim takes the number of tokens to take back, not {n}")
        with self._session.lock:
            return self._row.trim(self._layer.bit, n)

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> BatchPagedKVCache:
        """One batch of several requests' caches of a layer; they share pages with it and can be used further."""
        first = caches[0]
        with first._session.lock:
            rows = [cache._row.fork(cache._layer.bit, "merge") for cache in caches]
        return BatchPagedKVCache(first._session, first._layer, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        with self._session.lock:
            # A copied list asks layer by layer with one memo: its layers must stay together.
            fork = memo.get(id(self._row))
            if fork is None:
                fork = memo[id(self._row)] = self._row.fork(self._layer.bit)
            fork.layers |= self._layer.bit
            return PagedKVCache(self._session, self._layer, fork)

    def __repr__(self) -> str:
        return f"<PagedKVCache layer {self._layer.index}, {self.offset} tokens>"
