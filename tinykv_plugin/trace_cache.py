"""TraceCache: stands for a paged cache during the dry trace, and notes what the model does with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx

from .errors import HandleTouchedError
from .layer import mask_kind
from .masks import prior_tokens, row_masks, sequence_mask
from .metadata import PagedKV, PagedMask
from .pages import LayerSpec
from .protocols import AttentionRequest, LayerChoice

ADDED = "a mask of booleans as numbers to add"


@dataclass
class LayerTrace:
    """What one leaf cache was seen to need. ``spec`` is None if the model never wrote it.

    ``touched`` says what the model does with the K/V other than attention ("": nothing); ``request`` is the last
    attention call, a decode step; ``reach`` is how far back the model's masks look, if it says.
    """

    index: int
    choice: LayerChoice
    spec: LayerSpec | None = None
    touched: str = ""
    request: AttentionRequest | None = None
    page_size: int = 1
    reach: int | None = None

    def attend(
        self,
        queries: mx.array,
        metadata: Any,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Stands for a backend's ``attend``: notes what is asked and returns zeros of the right shape."""
        assert self.spec is not None
        batch, heads, count, _ = queries.shape
        self.request = AttentionRequest(
            query_heads=heads,
            kv_heads=self.spec.kv_heads,
            key_dim=self.spec.key_dim,
            value_dim=self.spec.value_dim,
            dtype=self.spec.dtype,
            page_size=self.page_size,
            query_len=count,
            mask=mask_kind(mask),
            window=self.choice.window,
            keep=0,
            sinks=sinks is not None,
            softcap=softcap,
            chunk=mask.chunk if isinstance(mask, PagedMask) else None,
        )
        return mx.zeros((batch, heads, count, self.spec.value_dim), queries.dtype)


class TraceCache:
    """Stands for a PagedKVCache, or with several rows a BatchPagedKVCache, during the trace; keeps only its offset."""

    def __init__(self, layer: LayerTrace, offset: int, blame: Blame, rows: int) -> None:
        self.layer = layer
        self._start = offset
        self._rows = rows
        self.window = layer.choice.window
        self.keys = self.values = mx.zeros((0,))
        self._blame = blame
        self._arrays: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> int | mx.array:
        """Tokens so far: a number for one request, an array of them for a batch."""
        return self._start if self._rows == 1 else mx.array([self._start] * self._rows, mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Note the shapes; returns handles, or arrays where the layer was found to need them."""
        layer = self.layer
        layer.spec = LayerSpec.of(keys, values)
        layer.touched = layer.touched or self._blame.known.get((layer.choice, layer.spec), "")
        columns = prior_tokens(self._start, layer.choice.window) + keys.shape[2]
        self._start += keys.shape[2]
        self._arrays = (
            mx.zeros((*keys.shape[:2], columns, keys.shape[3]), keys.dtype),
            mx.zeros((*values.shape[:2], columns, values.shape[3]), values.dtype),
        )
        return self.newest()

    def newest(self) -> tuple[Any, Any]:
        """As :meth:`LayerView.newest <tinykv_plugin.view.LayerView.newest>`."""
        layer = self.layer
        if layer.touched:
            assert self._arrays is not None, "nothing was written"
            return self._arrays
        self._blame.last = layer
        shared: Any = object()  # no pages: keys and values only have to belong together
        return PagedKV(layer, shared, "keys"), PagedKV(layer, shared, "values")

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """As a paged cache's, and note how far back the model looks."""
        layer = self.layer
        handles = not layer.touched
        if handles:
            self._blame.masked = layer
        if window_size is not None:
            layer.reach = max(window_size, layer.reach or 0)
        choice = layer.choice
        chunk = choice.window if choice.kind == "chunked" else None
        if self._rows > 1 and (return_array or not handles):
            prior = prior_tokens(self._start, choice.window)
            limit = min((size for size in (choice.window, window_size) if size is not None), default=None)
            rows = self._rows
            return row_masks(N, [prior] * rows, [N] * rows, prior + N, limit, True, [self._start] * rows, chunk)
        mask = sequence_mask(N, self._start, choice.window, handles, return_array, window_size, chunk=chunk)
        return AddedMask(1) if self._blame.probing and isinstance(mask, mx.array) else mask

    def size(self) -> int:
        """Tokens so far."""
        return self._start

    def empty(self) -> bool:
        """False: it stands for a cache in use."""
        return False

    @property
    def state(self) -> list[Any]:
        """Nothing to evaluate."""
        return []


@dataclass
class Blame:
    """Whose handle or mask was handed out last: an exception that names no layer is put down to it.

    ``known`` is what the model does with the K/V of layers of a kind and shape. ``probing``: masks are not arrays.
    """

    known: dict[tuple[LayerChoice, LayerSpec], str]
    probing: bool = False
    last: LayerTrace | None = None
    masked: LayerTrace | None = None


class AddedMask(PagedMask):
    """Stands for a mask of booleans, to see whether the model adds it to something."""

    __slots__ = ()

    def _operate(self, *args: object) -> NoReturn:
        raise HandleTouchedError(-1, ADDED)

    __add__ = __radd__ = _operate
