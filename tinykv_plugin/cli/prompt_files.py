"""Prompt cache files of mlx-lm's commands and of a user's program, written from pages and read into pages."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from .models import DENSE, AttachedModels
from .patches import replaced


@contextlib.contextmanager
def paged_prompt_files(models: AttachedModels) -> Iterator[None]:
    """Let mlx-lm save pages as a file that stock mlx-lm reads, and let its ``generate`` load such a file into pages.

    ``mlx_lm.generate`` reads the file before it loads the model: the caches it got are replaced, in the list it
    holds, once the model is there. Names are changed where mlx-lm's modules bound them.
    """
    if models.config.cache == DENSE:
        yield
        return
    from .. import layout, persistence
    from ..cache import PagedKVCache

    # The package has a function of this name in place of the module.
    generate: Any = importlib.import_module("mlx_lm.generate")
    cache: Any = importlib.import_module("mlx_lm.models.cache")
    cache_prompt: Any = importlib.import_module("mlx_lm.cache_prompt")
    save_dense = cache.save_prompt_cache
    load_model_and_tokenizer = generate.load
    waiting: list[list[Any]] = []

    def save_prompt_cache(file_name: str, cache: list[Any], metadata: dict[str, str] | None = None) -> None:
        paged = any(isinstance(leaf, PagedKVCache) for leaf in layout.leaves(cache))
        # What ours has made of a paged cache comes back here as a dense one.
        (persistence.save_prompt_cache if paged else save_dense)(file_name, cache, metadata)

    def load_prompt_cache(file_name: str, return_metadata: bool = False) -> Any:
        loaded = persistence.load_prompt_cache(file_name, return_metadata=return_metadata)
        waiting.append(loaded[0] if return_metadata else loaded)
        return loaded

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = load_model_and_tokenizer(*args, **kwargs)
        kv = models.find(loaded[0])
        # The first model loaded is the target: a draft model has no caches in the file.
        while waiting and kv is not None:
            persistence.adopt(waiting.pop(), kv)
        return loaded

    with (
        replaced(cache, "save_prompt_cache", save_prompt_cache),
        replaced(cache_prompt, "save_prompt_cache", save_prompt_cache),
        replaced(generate, "load_prompt_cache", load_prompt_cache),
        replaced(generate, "load", load),
        # mlx-lm would compare the file's format with flags that it isn't given; pages compare it with their own.
        replaced(generate, "QuantizedKVCache", PagedKVCache),
    ):
        yield
