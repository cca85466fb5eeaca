"""Speculative decoding over paged caches: mlx-lm's loop, with rewinds that every kind of layer can make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import layout
from .cache import PagedKVCache
from .errors import DraftError, TinyKVError
from .rewinding import RewindingCache, RewindingModel
from .stored_prompt import PromptPart, StoredPrompt
from .storing import HANDLES_PAGES

PREFILL_STEP = 512
"""Prompt tokens in a pass of mlx-lm's loop unless it is told otherwise."""

Loop = Callable[..., Iterator[tuple[int, mx.array, bool]]]


def drafting(own_loop: Loop, is_paged: Callable[[Any], bool]) -> Loop:
    """mlx-lm's ``speculative_generate_step``, ``own_loop``, for models of which one at least ``is_paged``.

    Greedy tokens are those of the model alone, also with recurrent layers, whose state is put back, and with windows
    of any length. The loop raises ConfigError if the setting ``rewind`` is too small for ``num_draft_tokens``, and
    DraftError if a model's caches can't be rewound, both before anything is computed.
    """
    if getattr(own_loop, HANDLES_PAGES, False):
        return own_loop

    def speculative_generate_step(
        prompt: mx.array,
        model: Any,
        draft_model: Any,
        *args: Any,
        num_draft_tokens: int = 2,
        prompt_cache: list[Any] | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, mx.array, bool]]:
        options["num_draft_tokens"] = num_draft_tokens
        if not is_paged(model) and not is_paged(draft_model):
            yield from own_loop(prompt, model, draft_model, *args, prompt_cache=prompt_cache, **options)
            return
        models = model, draft_model
        caches = _divided(prompt_cache, model, draft_model)
        bits, group_size = options.pop("kv_bits", None), options.pop("kv_group_size", 64)
        if bits is not None:
            for leaf in layout.leaves([*caches[0], *caches[1]]):
                if isinstance(leaf, PagedKVCache):
                    leaf.to_quantized(group_size, bits)  # raises if its pages have another format
        stored = prompt_cache if isinstance(prompt_cache, StoredPrompt) and prompt_cache.begin(prompt) else None
        prompts: list[PromptPart | None] = [None, None] if stored is None else [*stored.parts]
        rewinding = [
            RewindingCache(part, num_draft_tokens, len(prompt), whole)
            for part, whole in zip(caches, prompts, strict=True)
        ]
        stand_ins = [RewindingModel(whole, options.get("prefill_step_size", PREFILL_STEP)) for whole in models]
        steps: Any = own_loop(prompt, *stand_ins, *args, prompt_cache=rewinding, **options)
        failed = True
        try:
            for step in steps:
                if stored is not None:
                    stored.tokens.append(int(step[0]))
                yield step
            failed = False
        except GeneratorExit:
            failed = False
            raise
        finally:
            steps.close()
            for part, whole in zip(rewinding, models, strict=True):
                part.settle(whole)
            if not failed:
                # The draft model has not run the last draft if it was right: later drafts would miss it.
                with contextlib.suppress(TinyKVError):  # there is no room: it is run when it is needed
                    rewinding[1].catch_up(draft_model, rewinding[0])
                # What a last pass wrote that nobody looked at would be lost with this thread.
                for part in rewinding:
                    part.finish()
            if stored is not None:
                stored.ended()

    setattr(speculative_generate_step, HANDLES_PAGES, True)
    return speculative_generate_step


def require_drafts(model: Any, draft_model: Any, num_draft_tokens: int) -> None:
    """Raise what the loop of :func:`drafting` would at the first prompt; takes no pages."""
    for part in _divided(None, model, draft_model):
        RewindingCache(part, num_draft_tokens, prompt_tokens=0)


def _divided(prompt_cache: list[Any] | None, model: Any, draft_model: Any) -> tuple[list[Any], list[Any]]:
    """The caches of the model and of the draft model; new ones if there are none."""
    own = mlx_cache.make_prompt_cache(model)
    if prompt_cache is None:
        return own, mlx_cache.make_prompt_cache(draft_model)
    count = len(own)
    if len(prompt_cache) <= count:
        raise DraftError(
            f"the prompt cache has {len(prompt_cache)} entries, the model's own {count}: the draft model's are missing"
        )
    return prompt_cache[:count], prompt_cache[count:]
