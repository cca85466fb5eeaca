"""The dry trace: a model run on a few tokens, never evaluated, to see what it does with keys, values and masks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .errors import HandleTouchedError
from .layer import mask_kind
from .layout import replace_leaves
from .masks import prior_tokens, sequence_mask
from .metadata import PagedKV, PagedMask
from .pages import LayerSpec
from .protocols import AttentionRequest, LayerChoice

log = logging.getLogger("tinykv")


@dataclass
class LayerTrace:
    """What one leaf cache was seen to need. ``spec`` is None if the model never wrote it.

    ``touched`` says what the model does with the K/V other than attention ("": nothing); ``request`` is the last
    attention call, a decode step.
    """

    index: int
    choice: LayerChoice
    spec: LayerSpec | None = None
    touched: str = ""
    request: AttentionRequest | None = None
    page_size: int = 1

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
    """Stands for a PagedKVCache during the trace; keeps nothing but its offset."""

    def __init__(self, layer: LayerTrace, offset: int, blame: Blame) -> None:
        self.layer = layer
        self.offset = offset
        self.window = layer.choice.window
        self.keys = self.values = mx.zeros((0,))
        self._blame = blame
        self._arrays: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        layer = self.layer
        layer.spec = LayerSpec.of(keys, values)
        layer.touched = layer.touched or self._blame.known.get((layer.choice, layer.spec), "")
        columns = prior_tokens(self.offset, layer.choice.window) + keys.shape[2]
        self.offset += keys.shape[2]
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
        handles = not self.layer.touched
        if handles:
            self._blame.masked = self.layer
        choice = self.layer.choice
        chunk = choice.window if choice.kind == "chunked" else None
        return sequence_mask(N, self.offset, choice.window, handles, return_array, window_size, chunk=chunk)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return False

    @property
    def state(self) -> list[Any]:
        return []


@dataclass
class Blame:
    """Whose handle or mask was handed out last: an exception that names no layer is put down to it.

    ``known`` is what the model does with the K/V of layers of a kind and shape.
    """

    known: dict[tuple[LayerChoice, LayerSpec], str]
    last: LayerTrace | None = None
    masked: LayerTrace | None = None


@dataclass
class TraceResult:
    """``layers`` by leaf index; ``failure`` is why the model can't run on paged caches at all ("": it can)."""

    layers: dict[int, LayerTrace] = field(default_factory=dict)
    failure: str = ""


def trace(
    model: Any, own_cache: Callable[[], list[Any]], choices: Sequence[LayerChoice], page_size: int
) -> TraceResult:
    """Run ``model`` on two tokens, then on one, with handles in place of K/V; nothing is evaluated.

    Where the model touches a handle or mask, every layer of the same kind and shape is marked and gets arrays
    instead, and the trace starts again, until it passes.
    """
    result = TraceResult(
        {
            index: LayerTrace(index, choice, page_size=page_size)
            for index, choice in enumerate(choices)
            if choice.kind != "dense"
        }
    )
    layers = result.layers
    if not layers:
        return result
    # Far enough in that every window has something to mask.
    known: dict[tuple[LayerChoice, LayerSpec], str] = {}
    start = max(8, *(choice.window + 1 for choice in choices if choice.window is not None), 8)
    while True:
        blame = Blame(known)
        caches = replace_leaves(own_cache(), {i: TraceCache(layer, start, blame) for i, layer in layers.items()})
        try:
            model(mx.zeros((1, 2), mx.int32), cache=caches)
            model(mx.zeros((1, 1), mx.int32), cache=caches)
            return result
        except HandleTouchedError as error:
            culprit: LayerTrace | None = layers.get(error.layer) or blame.masked or blame.last
            touched = f"the model uses {error.what}"
        except Exception as error:
            culprit = blame.last or blame.masked
            touched = f"the model fails with handles ({type(error).__name__}: {_first_line(error)})"
        if culprit is None or culprit.touched:
            result.failure = touched
            log.info("the dry trace of %s failed: %s", type(model).__name__, touched)
            return result
        if culprit.spec is not None:
            known[culprit.choice, culprit.spec] = touched
        for layer in layers.values():
            if (layer.choice, layer.spec) == (culprit.choice, culprit.spec):
                layer.touched = touched


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:120]
