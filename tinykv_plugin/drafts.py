"""Speculative decoding over paged caches: mlx-lm's loop, with rewinds that every kind of layer can make."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .attachment import attachment_of
from .errors import DraftError
from .rewinding import RewindingCache, RewindingModel
from .session import PagedSession

# The package has a function of this name in place of the module.
_generate: Any = importlib.import_module("mlx_lm.generate")
_cache: Any = importlib.import_module("mlx_lm.models.cache")
_own_loop = _generate.speculative_generate_step


def speculative_generate_step(
    prompt: mx.array,
    model: Any,
    draft_model: Any,
    *args: Any,
    num_draft_tokens: int = 2,
    prompt_cache: list[Any] | None = None,
    **options: Any,
) -> Iterator[tuple[int, mx.array, bool]]:
    """As mlx-lm's function of the same name, which it uses; greedy tokens are those of ``model`` alone.

    Also for models with recurrent layers, whose state is put back, and for windows of any length. Raises ConfigError
    if the setting ``rewind`` is too small for ``num_draft_tokens``, DraftError if a model's caches can't be rewound,
    both before anything is computed. If neither model is attached mlx-lm's function does it all.
    """
    if not _is_paged(model) and not _is_paged(draft_model):
        yield from _own_loop(
            prompt,
            model,
            draft_model,
            *args,
            num_draft_tokens=num_draft_tokens,
            prompt_cache=prompt_cache,
            **options,
        )
        return
    own = _cache.make_prompt_cache(model)
    if prompt_cache is None:
        caches = own, _cache.make_prompt_cache(draft_model)
    else:
        caches = prompt_cache[: len(own)], prompt_cache[len(own) :]
        if not caches[1]:
            raise DraftError(f"the prompt cache has {len(caches[0])} entries, all the model's: the draft's are missing")
    models = model, draft_model
    rewinding = [RewindingCache(part, num_draft_tokens, len(prompt)) for part in caches]
    options.pop("kv_bits", None)  # pages have their own format
    steps = _own_loop(
        prompt,
        RewindingModel(model),
        RewindingModel(draft_model),
        *args,
        num_draft_tokens=num_draft_tokens,
        prompt_cache=rewinding,
        **options,
    )
    try:
        yield from steps
    finally:
        steps.close()
        for part, whole in zip(rewinding, models, strict=True):
            part.settle(whole)


def _is_paged(model: Any) -> bool:
    kv = attachment_of(model)
    return kv is not None and isinstance(kv.session, PagedSession)
