"""Ways: stock mlx-lm, gather and the best backend, as what is compared; and what it is compared on."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import os
import platform
import random
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import __version__
from ..attachment import Attachment, attach
from ..blas import blas_report
from ..device import physical_memory

STOCK = "stock"

Way = dict[str, Any] | None
"""The settings to attach with; None: mlx-lm as it is."""


def ways(model: Any, **settings: Any) -> dict[str, Way]:
    """Stock, gather, and the backend that "auto" chooses if it is another; ``settings`` go to both paged ones."""
    with attach(model, **settings) as kv:
        best = next((line.backend for line in kv.plan if line.kind != "dense"), "gather")
    found: dict[str, Way] = {STOCK: None, "gather": {**settings, "attention": "gather"}}
    if best != "gather":
        found[best] = {**settings, "attention": best}
    return found


def attached(model: Any, way: Way) -> contextlib.AbstractContextManager[Attachment | None]:
    """``model`` in one of the ways, while the block runs."""
    return contextlib.nullcontext() if way is None else attach(model, **way)


def clean() -> None:
    """Drop what an earlier run left in memory."""
    gc.collect()
    mx.clear_cache()


def vocabulary(model: Any) -> int:
    """How many tokens ``model`` knows; nothing is computed."""
    return int(model(mx.array([[0]])).shape[-1])


def random_prompt(length: int, seed: int, known: int) -> list[int]:
    """Tokens out of ``known`` ones; the first hundred, which may be special, only where there are few."""
    rng = random.Random(seed)
    return [rng.randrange(min(100, known // 2), known) for _ in range(length)]


def machine() -> dict[str, Any]:
    """What the figures were measured on, and with."""
    device = mx.default_device()
    return {
        "created": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "device": f"{device.type.name}, {mx.device_info().get('device_name', 'unknown')}",
        "cores": os.cpu_count(),
        "memory": physical_memory(),
        "python": platform.python_version(),
        "tinykv-plugin": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "blas": blas_report().name,
    }
