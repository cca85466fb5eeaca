"""The hooks of entry-point group ``tinykv_plugin``. Every hook is optional; each returns or receives what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .protocols import AttentionBackend, CacheProvider, ModelAdapter

PROJECT = "tinykv"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class PoolGrown:
    """A cache group's pool has room for more pages: sizes in pages, ``bytes_reserved`` of the group's arrays."""

    group: str
    old_pages: int
    new_pages: int
    bytes_reserved: int


@dataclass(frozen=True)
class PageEvicted:
    """A page that only the prefix cache held was reclaimed."""

    group: str
    page_id: int


@dataclass(frozen=True)
class RequestFreed:
    """The last cache of a request is gone; ``tokens`` it held, ``pages`` that went back to the pool."""

    tokens: int
    pages: int


@hookspec
def tinykv_providers() -> Sequence[CacheProvider]:  # type: ignore[empty-body]
    """Cache providers to choose from with the setting ``cache``, by their ``name``."""


@hookspec
def tinykv_model_adapters() -> Sequence[ModelAdapter]:  # type: ignore[empty-body]
    """Model adapters; the first whose ``matches(model)`` is true serves a model, third parties' are asked first."""


@hookspec
def tinykv_attention_backends() -> Sequence[AttentionBackend]:  # type: ignore[empty-body]
    """Attention backends to choose from with the setting ``attention``, by their ``name``."""


@hookspec
def tinykv_pool_grown(event: PoolGrown) -> None:
    """A pool grew. Called inside a reservation: be quick and don't use caches of the model."""


@hookspec
def tinykv_page_evicted(event: PageEvicted) -> None:
    """A cached page was reclaimed. Called inside a reservation: be quick and don't use caches of the model."""


@hookspec
def tinykv_request_freed(event: RequestFreed) -> None:
    """A request's pages went back. Called at the next allocation after the request was dropped, in its thread."""
