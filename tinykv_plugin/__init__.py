"""A paged KV cache for mlx-lm: ``kv = tinykv_plugin.attach(model)``.

Names are imported at first use, so that ``tinykv_plugin.blas`` can be loaded before mlx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import hookspecs
    from .attachment import Attachment, attach
    from .batching.batch_generate import batch_generate
    from .batching.generator import PagedBatchGenerator
    from .config import KVCacheConfig
    from .errors import (
        CacheStateError,
        ConfigError,
        DraftError,
        InvariantError,
        OutOfPagesError,
        PluginError,
        PoolGrowthError,
        PromptCacheFileError,
        QueueFullError,
        RequestTooLargeError,
        TinyKVError,
    )
    from .hookspecs import hookimpl
    from .persistence import load_prompt_cache, save_prompt_cache
    from .stats import PoolStats

__version__ = "0.1.0"

_HOME = {
    "Attachment": "attachment",
    "attach": "attachment",
    "batch_generate": "batching.batch_generate",
    "PagedBatchGenerator": "batching.generator",
    "KVCacheConfig": "config",
    "CacheStateError": "errors",
    "ConfigError": "errors",
    "DraftError": "errors",
    "InvariantError": "errors",
    "OutOfPagesError": "errors",
    "PluginError": "errors",
    "PoolGrowthError": "errors",
    "PromptCacheFileError": "errors",
    "QueueFullError": "errors",
    "RequestTooLargeError": "errors",
    "TinyKVError": "errors",
    "hookimpl": "hookspecs",
    "load_prompt_cache": "persistence",
    "save_prompt_cache": "persistence",
    "PoolStats": "stats",
}

__all__ = [
    "Attachment",
    "CacheStateError",
    "ConfigError",
    "DraftError",
    "InvariantError",
    "KVCacheConfig",
    "OutOfPagesError",
    "PagedBatchGenerator",
    "PluginError",
    "PoolGrowthError",
    "PoolStats",
    "PromptCacheFileError",
    "QueueFullError",
    "RequestTooLargeError",
    "TinyKVError",
    "attach",
    "batch_generate",
    "hookimpl",
    "hookspecs",
    "load_prompt_cache",
    "save_prompt_cache",
]


def __getattr__(name: str) -> Any:
    # No submodule may be called like a name here: importing it would replace the name in this package.
    if name == "hookspecs":
        return importlib.import_module(f"{__name__}.hookspecs")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        from .mlx_lm_installation import not_installed, without_mlx_lm

        if not without_mlx_lm(error):
            raise
        raise ModuleNotFoundError(not_installed(), name="mlx_lm") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
