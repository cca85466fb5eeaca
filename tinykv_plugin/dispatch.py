"""Functions of mlx-lm's modules that look at what they are given while a model is attached.

A model module's ``scaled_dot_product_attention`` sends PagedKV handles to their backend.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .layer import attend_handles
from .metadata import PagedKV

ATTENTION = "scaled_dot_product_attention"

Function = Callable[..., Any]

_lock = threading.Lock()
# Module and name to (its own function, ours, who wants it). Users are held weakly: a model may be dropped attached.
_installed: dict[tuple[ModuleType, str], tuple[Function, Function, weakref.WeakSet[Any]]] = {}


def install(module: ModuleType, name: str, wrap: Callable[[Function], Function], user: Any) -> None:
    """Replace the global ``name`` in ``module`` by ``wrap`` of it, until ``user`` and all others :func:`remove` it."""
    with _lock:
        if (module, name) not in _installed:
            original = getattr(module, name)
            wrapped = wrap(original)
            if wrapped is not original:
                functools.update_wrapper(wrapped, original)
            setattr(module, name, wrapped)
            _installed[module, name] = (original, wrapped, weakref.WeakSet())
        _installed[module, name][2].add(user)


def remove(module: ModuleType, name: str, user: Any) -> None:
    """Undo the :func:`install` of ``user``; the last one restores the module, unless somebody replaced it since."""
    with _lock:
        original, wrapped, users = _installed[module, name]
        users.discard(user)
        if users:
            return
        del _installed[module, name]
        if getattr(module, name) is wrapped:
            setattr(module, name, original)


def attention(original: Function) -> Function:
    """Attention for handles and, by ``original``, for everything else."""

    def dispatch(queries: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        # The type of the keys decides, so a model without paged caches in the same module is not affected.
        return (attend_handles if type(keys) is PagedKV else original)(queries, keys, *args, **kwargs)

    return dispatch
