"""The dry trace: a model run on a few tokens, never evaluated, to see what it does with keys, values and masks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from .errors import HandleTouchedError
from .layout import replace_leaves
from .pages import LayerSpec
from .protocols import LayerChoice
from .trace_cache import ADDED, AddedMask, Blame, LayerTrace, TraceCache

# Rows of the batch that is tried: as many as no model has heads or anything else, so that no shape fits by accident.
BATCH = 13

# What a model adds to its scores in place of numbers hides nothing.
ADDED_MASK = "the model adds a mask of booleans to its scores, which hides nothing, with mlx-lm's own caches as well"

log = logging.getLogger("tinykv")


@dataclass
class TraceResult:
    """``layers`` by leaf index; ``failure`` is why the model can't run on paged caches at all ("": it can).

    ``separate`` is why the requests of a batch have to be run one after the other ("": they don't).
    """

    layers: dict[int, LayerTrace] = field(default_factory=dict)
    failure: str = ""
    separate: str = ""


def trace(
    model: Any, own_cache: Callable[[], list[Any]], choices: Sequence[LayerChoice], page_size: int
) -> TraceResult:
    """Run ``model`` on two tokens, then on one, with handles in place of K/V; nothing is evaluated.

    Where the model touches a handle or mask, every layer of the same kind and shape is marked and gets arrays
    instead, and the trace starts again, until it passes; first with one request, then with a batch. A window
    that is narrower than what the model's masks look back on is widened.
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
    known: dict[tuple[LayerChoice, LayerSpec], str] = {}
    rows = 1
    while True:
        blame = Blame(known)
        try:
            _run(model, own_cache, layers, blame, rows)
            if rows > 1:
                _probe(model, own_cache, layers, known)
                return result
            if not _widen(layers):
                rows = BATCH
            continue
        except HandleTouchedError as error:
            culprit: LayerTrace | None = layers.get(error.layer) or blame.masked or blame.last
            touched = f"the model uses {error.what}"
        except Exception as error:
            culprit = blame.last or blame.masked
            touched = f"the model fails with handles ({type(error).__name__}: {_first_line(error)})"
        if rows > 1 and (culprit is None or culprit.touched or not touched.startswith("the model uses")):
            result.separate = touched.replace("with handles", "with several requests", 1)
            _probe(model, own_cache, layers, known)
            return result
        if culprit is None or culprit.touched:
            result.failure = touched
            log.info("the dry trace of %s failed: %s", type(model).__name__, touched)
            return result
        if culprit.spec is not None:
            known[culprit.choice, culprit.spec] = touched
        for layer in layers.values():
            if (layer.choice, layer.spec) == (culprit.choice, culprit.spec):
                layer.touched = touched


def _run(
    model: Any, own_cache: Callable[[], list[Any]], layers: dict[int, LayerTrace], blame: Blame, rows: int
) -> None:
    """Two tokens, then one, of each of ``rows`` requests, far enough in that every window has something to mask."""
    windows = (layer.choice.window or 0 for layer in layers.values())
    start = max(8, *(window + 1 for window in windows), 8)
    caches = replace_leaves(own_cache(), {i: TraceCache(layer, start, blame, rows) for i, layer in layers.items()})
    model(mx.zeros((rows, 2), mx.int32), cache=caches)
    model(mx.zeros((rows, 1), mx.int32), cache=caches)


def _widen(layers: dict[int, LayerTrace]) -> bool:
    """Give the layers of each window as much of the context as the model's masks look back on.

    Otherwise what a token sees would depend on how its prompt is cut into chunks, as it does with mlx-lm's own caches.
    """
    reach: dict[LayerChoice, int] = {}
    for layer in layers.values():
        choice = layer.choice
        if choice.kind == "window" and choice.window is not None and (layer.reach or 0) > choice.window:
            reach[choice] = max(layer.reach or 0, reach.get(choice, 0))
    for layer in layers.values():
        if layer.choice in reach:
            layer.choice = replace(layer.choice, window=reach[layer.choice])
    return bool(reach)


def _probe(
    model: Any, own_cache: Callable[[], list[Any]], layers: dict[int, LayerTrace], known: dict[Any, str]
) -> None:
    """Say of layers that get arrays whether the model adds masks to its scores."""
    if not any(layer.touched for layer in layers.values()):
        return
    blame = Blame(known, probing=True)
    try:
        _run(model, own_cache, layers, blame, 1)
    except HandleTouchedError as error:
        added = error.what == ADDED
    except Exception as error:
        added = "addition" in str(error) and AddedMask.__name__ in str(error)
    else:
        return
    for layer in layers.values() if added else ():
        if layer.touched:
            layer.touched += f"; {ADDED_MASK}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:120]
