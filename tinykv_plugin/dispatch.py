"""Attention dispatch: a model module's ``scaled_dot_product_attention`` sends PagedKV handles to their backend."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .layer import attend_handles
from .metadata import PagedKV

NAME = "scaled_dot_product_attention"

_lock = threading.Lock()
# Module to (its own function, our dispatcher, who wants it). Users are held weakly: a model may be dropped attached.
_installed: dict[ModuleType, tuple[Callable[..., Any], Callable[..., Any], weakref.WeakSet[Any]]] = {}


def install(module: ModuleType, user: Any) -> None:
    """Replace the global name in ``module`` by a dispatcher, until ``user`` and all others call :func:`remove`."""
    with _lock:
        if module not in _installed:
            original = getattr(module, NAME)
            dispatcher = _dispatcher(original)
            setattr(module, NAME, dispatcher)
            _installed[module] = (original, dispatcher, weakref.WeakSet())
        _installed[module][2].add(user)


def remove(module: ModuleType, user: Any) -> None:
    """Undo the :func:`install` of ``user``; the last one restores the module, unless somebody replaced it since."""
    with _lock:
        original, dispatcher, users = _installed[module]
        users.discard(user)
        if users:
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
