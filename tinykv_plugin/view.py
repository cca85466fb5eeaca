"""LayerView: what a layer's caches of one request and of a batch have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .errors import CacheStateError
from .metadata import PagedKVMetadata

if TYPE_CHECKING:
    from .layer import PagedLayer
    from .sequence import PagedSequence
    from .session import PagedSession


class LayerView(ABC):
    """One layer of some PagedSequences."""

    def __init__(self, session: PagedSession, layer: PagedLayer) -> None:
        self._session = session
        self._layer = layer
        self._newest: PagedKVMetadata | None = None

    @abstractmethod
    def _current_rows(self) -> Sequence[PagedSequence]: ...

    def newest(self) -> tuple[Any, Any]:
        """What ``update_and_fetch`` has returned last: for layers that attend to an earlier layer's K/V.

        Raises CacheStateError if the requests have changed since.
        """
        if not self._is_newest():
            raise CacheStateError(f"layer {self._layer.index} has written nothing in this forward pass")
        assert self._newest is not None
        return self._hand_out(self._newest)

    @property
    def keys(self) -> mx.array:
        """An empty array: K and V themselves are in the pages.

        Models assign ``cache.keys = mx.depends(cache.keys, x)`` to have ``x`` evaluated with the cache: it is, at the
        next write of this layer or with its ``state``.
        """
        # It must not depend on the pages: what holds them when they are written next makes mlx copy the pool.
        return mx.zeros((0,))

    @keys.setter
    def keys(self, value: mx.array) -> None:
        if value.size:
            raise CacheStateError("keys and values of a paged cache are in its pages and can't be assigned")
        if self._layer.pages is not None:
            self._layer.pages.due.append(value)

    values = keys

    @property
    def state(self) -> list[Any]:
        """Evaluating it forces every write of this layer; it is no copy of the K/V and can't be saved."""
        self._newest = None  # a pass is over, and with it the masks and indices of a long prompt can go
        return self._layer.state()

    @state.setter
    def state(self, value: object) -> None:
        raise CacheStateError("a paged cache can't be set from a state; load it with tinykv_plugin.load_prompt_cache")

    def _hand_out(self, metadata: PagedKVMetadata) -> tuple[Any, Any]:
        self._newest = metadata
        layer = self._layer
        return layer.handed_out(metadata) if layer.handles else self._session.gather.dense(metadata)

    def _is_newest(self) -> bool:
        """Whether nothing has happened to the requests since this layer wrote."""
        metadata, layer, rows = self._newest, self._layer, self._current_rows()
        if metadata is None or len(rows) != metadata.batch:
            return False
        step = metadata.step
        return all(
            row.offset(layer.bit) == length and row.tables[layer.group] is table
            for row, table, length in zip(rows, step.tables, step.context_lens, strict=True)
        )
