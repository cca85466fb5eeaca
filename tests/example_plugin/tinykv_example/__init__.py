"""A provider, a model adapter and an attention backend from outside, each called "example"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinykv_plugin.hookspecs import hookimpl

from .adapter import ExampleAdapter
from .provider import CountingProvider

if TYPE_CHECKING:
    from tinykv_plugin.protocols import AttentionBackend, CacheProvider, ModelAdapter


@hookimpl
def tinykv_providers() -> Sequence[CacheProvider]:
    return [CountingProvider()]


@hookimpl
def tinykv_model_adapters() -> Sequence[ModelAdapter]:
    return [ExampleAdapter()]


@hookimpl
def tinykv_attention_backends() -> Sequence[AttentionBackend]:
    from .backend import ExampleBackend

    return [ExampleBackend()]
