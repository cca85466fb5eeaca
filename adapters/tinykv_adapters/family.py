"""What adapters of mlx-lm's model families have in common: they say what they expect, and notice what is different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tinykv_plugin.protocols import SeenLayer

from .general import GeneralAdapter, model_file

RECURRENT = "ArraysCache"
UNUSED = "never written"
VARIES = "anything but their shape"
ONE_HEAD = " with one K/V head"


@dataclass(frozen=True)
class Expected:
    """The caches that a model of mlx-lm has and what it does with them.

    ``direct``: kinds of layers whose K/V are left to attention. ``gathered``: what the model itself uses of the others'
    ("values.swapaxes"), for each kind (:data:`VARIES`: that depends on its settings and on how its weights are
    quantized); with ``latent`` these have one K/V head, shared by all query heads.
    ``own``: mlx-lm's classes of caches that are kept as they are. ``unused``: some caches are never written.
    ``per_layer``: caches for each of the model's layers (None: not every layer has its own).
    """

    direct: Sequence[str] = ("full",)
    gathered: Mapping[str, str] = field(default_factory=dict)
    latent: bool = False
    own: Sequence[str] = ()
    unused: bool = False
    per_layer: int | None = 1

    def names(self) -> list[str]:
        """What each of the caches may be."""
        heads = ONE_HEAD if self.latent else ""
        return [
            *(f"{kind} read directly" for kind in self.direct),
            *(f"{kind}{heads} gathered{_because(what)}" for kind, what in self.gathered.items()),
            *map(_kept, self.own),
            *([UNUSED] if self.unused else []),
        ]

    def name(self, layer: SeenLayer) -> str:
        """What ``layer`` is, in the words of :meth:`names`."""
        if layer.kind == "dense":
            return _kept(layer.cache) + (f" ({layer.touched})" if layer.touched else "")
        if layer.kv_heads is None:
            return UNUSED
        if not layer.touched:
            return f"{layer.kind} read directly"
        heads = ONE_HEAD if self.latent and layer.kv_heads == 1 else ""
        # The shape of keys is no business of the model's unless it is expected: in a batch it is the longest row's.
        if self.gathered.get(layer.kind) == VARIES and ".shape" not in layer.touched:
            return f"{layer.kind}{heads} gathered"
        return f"{layer.kind}{heads} gathered ({layer.touched})"


def _because(what: str) -> str:
    return "" if what == VARIES else f" (the model uses {what})"


def _kept(cache: str) -> str:
    return "recurrent" if cache == RECURRENT else f"{cache} as mlx-lm made it"


class FamilyAdapter(GeneralAdapter):
    """Serves the model files in ``models``, and verifies what is expected of each."""

    models: ClassVar[Mapping[str, Expected]] = {}

    def matches(self, model: Any) -> bool:
        """Whether ``model`` is from one of this family's files."""
        return model_file(model) in self.models

    def verify(self, model: Any, seen: Sequence[SeenLayer]) -> str:
        """The first difference between what is expected of ``model`` and what the dry trace has seen."""
        name = model_file(model)
        expected = self.models[name]
        allowed = expected.names()
        found = Counter(expected.name(layer) for layer in seen)
        count = None if expected.per_layer is None else expected.per_layer * len(model.layers)
        if set(found) <= set(allowed) and count in (None, len(seen)):
            return ""
        number = "" if count is None else f"{count} "
        caches = "; ".join(f"{number} {what}" for what, number in found.items())
        return f"{name}: expected {number}layers {' or '.join(allowed)}, found {caches}"


def each(names: str, **expected: Any) -> dict[str, Expected]:
    """The same of several model files, whose ``names`` are separated by spaces."""
    return {name: Expected(**expected) for name in names.split()}
