"""The plugin's hooks; the entry point names this module."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from .backend import MetalBackend

hookimpl = pluggy.HookimplMarker("tinykv")

_backend = MetalBackend()


@hookimpl
def tinykv_attention_backends() -> Sequence[MetalBackend]:
    """The backend "metal"."""
    return [_backend]
