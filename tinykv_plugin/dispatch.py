"""Functions of mlx-lm's code, replaced while somebody needs it; above all the attention function of model modules."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import PluginError
from .layer import attend_handles
from .metadata import PagedKV
from .protocols import Replacement

ATTENTION = "scaled_dot_product_attention"

Function = Callable[..., Any]

_MISSING = object()


@dataclass
class _Installed:
    """``own`` is what the owner itself had (a class may inherit the function), ``users`` who wants ours.

    Users are held weakly: a model may be dropped attached.
    """

    own: Any
    ours: Callable[..., Any]
    make: Callable[..., Any]
    users: weakref.WeakSet[Any]


_lock = threading.Lock()
_installed: dict[tuple[ModuleType | type, str], _Installed] = {}


def attention_of(module: ModuleType) -> Replacement:
    """The replacement of ``scaled_dot_product_attention`` in a model's module: handles go to their backend."""
    return Replacement(module, ATTENTION, attention)


def install(replacement: Replacement, user: Any) -> None:
    """Put the new function in place until ``user`` and all others call :func:`remove`.

    Raises PluginError if another adapter has replaced it, for a model that is still attached.
    """
    owner, name = replacement.owner, replacement.name
    with _lock:
        installed = _installed.get((owner, name))
        if installed is not None and installed.make is not replacement.make:
            if installed.users:
                raise PluginError(
                    f"{owner.__name__}.{name} was replaced by another adapter, for a model that is still attached: "
                    f"detach that one first"
                )
            _restore(owner, name)
            installed = None
        if installed is None:
            current = getattr(owner, name)
            own, ours = vars(owner).get(name, _MISSING), replacement.make(current)
            if ours is not current:
                functools.update_wrapper(ours, current)
            setattr(owner, name, ours)
            installed = _installed[owner, name] = _Installed(own, ours, replacement.make, weakref.WeakSet())
        installed.users.add(user)


def remove(replacement: Replacement, user: Any) -> None:
    """Undo the :func:`install` of ``user``; the last one restores the owner, unless somebody replaced it since."""
    owner, name = replacement.owner, replacement.name
    with _lock:
        users = _installed[owner, name].users
        users.discard(user)
        if not users:
            _restore(owner, name)


def _restore(owner: ModuleType | type, name: str) -> None:
    installed = _installed.pop((owner, name))
    if vars(owner).get(name) is not installed.ours:
        return
    if installed.own is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, installed.own)


def attention(original: Function) -> Function:
    """Attention for handles and, by ``original``, for everything else."""

    def dispatch(queries: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        # The type of the keys decides, so a model without paged caches in the same module is not affected.
        return (attend_handles if type(keys) is PagedKV else original)(queries, keys, *args, **kwargs)

    return dispatch
