"""Attaches the plugin to every model that mlx-lm loads while a command runs."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..labels import model_label

if TYPE_CHECKING:
    from types import TracebackType

    from ..attachment import Attachment
    from ..config import KVCacheConfig
    from ..protocols import LayerPlan
    from ..stats import PoolStats

DENSE = "dense"
"""The provider that changes nothing: no model is attached, so that mlx-lm is exactly as it is without the plugin."""


@dataclass(frozen=True)
class ModelReport:
    """What became of one model's cache: for the table after a command."""

    label: str
    stats: PoolStats
    plan: Sequence[LayerPlan]


@dataclass(frozen=True)
class _Held:
    label: str
    kv: Attachment


class AttachedModels:
    """Context manager: ``mlx_lm.utils.load_model``, which every loader of mlx-lm calls, returns attached models.

    Attachments are kept until the end, for the report; but a model that mlx-lm itself has dropped by the time it
    loads the next one (the server, when a request names another model) is let go, and only its numbers are kept.
    On exit the original function is back and every model still held is detached. With the provider "dense" models
    stay as they are.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self._held: list[_Held] = []
        self._gone: list[ModelReport] = []

    def __enter__(self) -> AttachedModels:
        utils: Any = importlib.import_module("mlx_lm.utils")
        self._original = utils.load_model

        @wraps(self._original)
        def load_model(*args: Any, **kwargs: Any) -> Any:
            self._let_go_of_dropped()
            loaded = self._original(*args, **kwargs)
            if self.config.cache != DENSE:
                self._attach(loaded[0], Path(args[0] if args else kwargs["model_path"]))
            return loaded

        utils.load_model = load_model
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        utils: Any = importlib.import_module("mlx_lm.utils")
        utils.load_model = self._original
        while self._held:
            self._held.pop().kv.detach()

    def find(self, model: object) -> Attachment | None:
        """The attachment of ``model``, if it was loaded here."""
        return next((held.kv for held in self._held if held.kv.model is model), None)

    def reports(self) -> list[ModelReport]:
        """One for each model whose cache was used, in the order they were loaded."""
        return [*self._gone, *(_report(held) for held in self._held if _used(held.kv))]

    def _attach(self, model: Any, path: Path) -> None:
        from ..attachment import attach

        # The setting `memory` is for the command: a draft model takes its pages from its target's budget.
        first = self._held[0].kv if self._held else None
        self._held.append(_Held(model_label(path), attach(model, self.config, budget_of=first)))

    def _let_go_of_dropped(self) -> None:
        """Drop attachments that nothing but this object keeps alive, and keep their reports."""
        wanted = self._held if self.config.stats else []
        reports = {id(held.kv): _report(held) for held in wanted if _used(held.kv)}
        weak = [(held.label, id(held.kv), weakref.ref(held.kv)) for held in self._held]
        self._held.clear()
        gc.collect()
        for label, key, reference in weak:
            kv = reference()
            if kv is not None:
                self._held.append(_Held(label, kv))
            elif key in reports:
                self._gone.append(reports[key])


def _report(held: _Held) -> ModelReport:
    return ModelReport(held.label, held.kv.stats(), held.kv.plan)


def _used(kv: Attachment) -> bool:
    return kv.stats().peak_pages_used > 0
