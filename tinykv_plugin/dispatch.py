"""Attention dispatch: a model module's ``scaled_dot_product_attention`` sends PagedKV handles to their backend."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .layer import attend_handles
from .metadata import PagedKV

NAME = "scaled_dot_product_attention"

_lock = threading.Lock()
# Module to (its own function, our dispatcher, how many attachments want it).
_installed: dict[ModuleType, tuple[Callable[..., Any], Callable[..., Any], int]] = {}


def install(module: ModuleType) -> None:
    """Replace the global name in ``module`` by a dispatcher; counts, so every install needs one :func:`remove`."""
    with _lock:
        if module in _installed:
            original, dispatcher, count = _installed[module]
        else:
            original, count = getattr(module, NAME), 0
            dispatcher = _dispatcher(original)
            setattr(module, NAME, dispatcher)
        _installed[module] = (original, dispatcher, count + 1)


def remove(module: ModuleType) -> None:
    """Undo one :func:`install`; the last one restores the module, unless somebody replaced our function since."""
    with _lock:
        original, dispatcher, count = _installed[module]
        if count > 1:
            _installed[module] = (original, dispatcher, count - 1)
            return
        del _installed[module]
        if getattr(module, NAME) is dispatcher:
            setattr(module, NAME, original)


def _dispatcher(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(queries: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        # The type of the keys decides, so a model without paged caches in the same module is not affected.
        return (attend_handles if type(keys) is PagedKV else original)(queries, keys, *args, **kwargs)

    return dispatch
