"""CachePlan: which layers are paged, in which cache groups, and how they are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import layout
from .group_info import OPEN
from .kv_format import KVFormat
from .layer import PagedLayer
from .protocols import (
    AttachContext,
    AttentionBackend,
    ConfigurableBackend,
    LayerChoice,
    LayerPlan,
    SeenLayer,
    VerifyingAdapter,
)
from .trace import TraceResult, trace
from .trace_cache import LayerTrace

log = logging.getLogger("tinykv")

# In a batch the number of columns is that of the longest row: no row's position.
COLUMNS = ("the model uses keys.shape", "the model uses values.shape")


class CachePlan:
    """Made once per attachment, at the first ``make_cache()``.

    ``layers`` are the paged leaves; ``groups`` maps a cache group's name to its window (with
    :data:`OPEN` as the last one if a layer ``opens``); ``lines`` is what
    ``kv.plan`` shows, one per entry of the model's cache list; ``writer`` is the backend that owns the pages;
    ``stateful`` are the leaves that are kept as the model made them and hold something, ``unused`` those that it never
    writes. ``separate`` is why the requests of a batch are run one after the other ("": they aren't).
    """

    def __init__(
        self,
        layers: Sequence[PagedLayer],
        groups: dict[str, int | None],
        lines: Sequence[LayerPlan],
        writer: AttentionBackend,
        stateful: Sequence[int],
        unused: Sequence[int] = (),
        separate: str = "",
    ) -> None:
        self.separate = separate
        self.layers = layers
        self.unused = unused
        self.groups = groups
        self.lines = lines
        self.writer = writer
        self.stateful = stateful
        self.opens = OPEN in groups


def make_plan(context: AttachContext) -> CachePlan:
    """Ask the adapter, trace the model, choose backends. Raises ConfigError if its K/V can't be stored as asked."""
    kv_format = KVFormat.of(context.config)
    for backend in context.backends:
        if isinstance(backend, ConfigurableBackend):
            backend.configure(context.config)
    own = context.own_cache()
    leaves = layout.leaves(own)
    choices = list(context.adapter.choose(context.model, leaves))
    traced = trace(context.model, context.own_cache, choices, context.config.page_size)
    different, separate = _verified(context, leaves, traced)
    backends, refused = _able(context.backends, traced)
    groups: dict[str, int | None] = {}
    layers: list[PagedLayer] = []
    lines: dict[int, LayerPlan] = {}
    unused: list[int] = []
    for index, choice in enumerate(choices):
        seen = traced.layers.get(index)
        choice = seen.choice if seen is not None else replace(choice, reason=_joined(choice.reason, different))
        if seen is not None and traced.failure:
            choice = LayerChoice("dense", reason=f"the model can't run on paged caches: {traced.failure}")
        elif seen is not None and seen.spec is None:
            choice = LayerChoice("dense", reason="the model never writes this cache")
            unused.append(index)
        if choice.kind == "dense" or seen is None:
            lines[index] = LayerPlan(index, "dense", "dense", "mlx-lm", choice.reason)
            continue
        name = "full" if choice.window is None else f"{choice.kind} {choice.window}"
        groups.setdefault(name, choice.window)
        reason = _joined(choice.reason, seen.touched, different, *refused)
        assert seen.spec is not None
        spec = seen.spec.stored_as(kv_format)
        layer = PagedLayer(index, choice, list(groups).index(name), not (seen.touched or different), reason, spec)
        layer.backends = backends
        layer.opens = layer.handles and kv_format.opens and spec.packed
        if kv_format.start and spec.packed and not layer.opens:
            layer.reason = _joined(layer.reason, "quantized from the first token on")
        layers.append(layer)
        request = seen.request and replace(seen.request, keys=spec.keys, values=spec.values, open_page=layer.opens)
        lines[index] = layer.describe(request)
    if any(layer.opens for layer in layers):
        groups[OPEN] = None
    stateful = [index for index, line in lines.items() if line.kind == "dense" and index not in unused]
    writer = _writer(backends, list(lines.values()))
    plan = CachePlan(layers, groups, _by_entry(own, lines), writer, stateful, unused, separate)
    config = context.config
    log.info("%s: pages of %d tokens, written by %s", type(context.model).__name__, config.page_size, plan.writer.name)
    if separate:
        plan.lines = [replace(line, reason=_joined(line.reason, _one_by_one(separate, line))) for line in plan.lines]
    for line in plan.lines:
        log.info("layer %d: %s, %s by %s%s", line.layer, line.kind, line.attention, line.backend, _because(line.reason))
    return plan


def check_format(context: AttachContext) -> None:
    """Raise ConfigError if the K/V of some layer can't be stored as the settings ask."""
    kv_format = KVFormat.of(context.config)
    if kv_format.quantized:
        choices = list(context.adapter.choose(context.model, layout.leaves(context.own_cache())))
        for layer in trace(context.model, context.own_cache, choices, context.config.page_size).layers.values():
            if layer.spec is not None:
                layer.spec.stored_as(kv_format)


def _verified(context: AttachContext, leaves: Sequence[Any], traced: TraceResult) -> tuple[str, str]:
    """How the model differs from what its adapter expects, and why the rows of a batch must be run one by one.

    What nobody has vouched for is not batched if a batch's shape could get into it.
    """
    adapter, different, vouched = context.adapter, "", False
    if isinstance(adapter, VerifyingAdapter):
        seen = [_seen(leaf, traced.layers.get(index), traced.failure) for index, leaf in enumerate(leaves)]
        different = adapter.verify(context.model, seen)
        vouched = not different
    if different:
        log.warning("%s; it is read by gather (mlx-lm has changed?)", different)
    touched = {layer.touched for layer in traced.layers.values()}
    kept = [leaf for index, leaf in enumerate(leaves) if index not in traced.layers or traced.failure]
    alone = sorted({type(leaf).__name__ for leaf in kept if not hasattr(leaf, "merge")})
    separate = traced.separate
    if not separate and alone:
        separate = f"mlx-lm can't merge {', '.join(alone)}"
    if not separate and not vouched:
        shapes = [what for what in sorted(touched) if what.startswith(COLUMNS)]
        separate = different or traced.failure or next(iter(shapes), "")
    return different, separate


def _seen(leaf: Any, layer: LayerTrace | None, failure: str) -> SeenLayer:
    name = type(leaf).__name__
    if layer is None or failure:
        return SeenLayer(name, "dense", failure if layer is not None else "", None)
    return SeenLayer(name, layer.choice.kind, layer.touched, None if layer.spec is None else layer.spec.kv_heads)


def _one_by_one(separate: str, line: LayerPlan) -> str:
    because = "" if separate in line.reason else f": {separate}"
    return f"the requests of a batch are run one after the other{because}"


def _joined(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _able(backends: Sequence[AttentionBackend], traced: TraceResult) -> tuple[list[AttentionBackend], list[str]]:
    """The backends that can write all layers of a model, as the one that owns its pages must, and why others can't."""
    if all(layer.spec is None or layer.spec.value_dim for layer in traced.layers.values()):
        return list(backends), []
    able = [backend for backend in backends if "keys_only" in getattr(backend, "features", ())]
    others = [f"{backend.name}: layers with keys only are not supported" for backend in backends if backend not in able]
    return able, others


def _writer(backends: Sequence[AttentionBackend], lines: Sequence[LayerPlan]) -> AttentionBackend:
    """The backend that owns the pages: the first that reads some layer directly, else the last, which can all."""
    reading = {line.backend for line in lines if line.attention == "direct"}
    return next((backend for backend in backends if backend.name in reading), backends[-1])


def _by_entry(own: Sequence[Any], lines: dict[int, LayerPlan]) -> list[LayerPlan]:
    """One line per entry of the model's list; a CacheList shows its paged part and names the others."""
    result = []
    for number, parts in enumerate(layout.entries(own)):
        paged = [lines[part] for part in parts if lines[part].kind != "dense"]
        line = paged[0] if paged else lines[parts[0]]
        others = [lines[part] for part in parts if lines[part] is not line]
        reason = "; ".join(part for part in (line.reason, *(f"also {other.kind}" for other in others)) if part)
        result.append(replace(line, layer=number, reason=reason))
    return result
