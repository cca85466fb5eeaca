"""The plugin's hooks; the entry point names this module."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from .backend import CpuBackend

hookimpl = pluggy.HookimplMarker("tinykv")

_backend = CpuBackend()


@hookimpl
def tinykv_attention_backends() -> Sequence[CpuBackend]:
    """The backend "cpu"."""
    return [_backend]
