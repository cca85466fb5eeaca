"""Generation without drafts from the prefix cache: mlx-lm's loop, whose prompt is stored while it is processed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.utils import does_model_support_input_embeddings

from .layout import leaves
from .stored_prompt import StoredPrompt

if TYPE_CHECKING:
    from .stored_prompt import PromptPart

HANDLES_PAGES = "handles_pages"
"""Attribute of loops that need no wrapping, by :func:`storing` or for drafts."""

# What isn't below stands for a part of an image.
TOKEN_LIMIT = 1 << 31

Processor = Callable[[mx.array, mx.array], mx.array]
Loop = Callable[..., Iterator[tuple[Any, mx.array]]]


def storing(own_loop: Loop) -> Loop:
    """mlx-lm's ``generate_step``, ``own_loop``, which stores the prompt if it is given a StoredPrompt's caches.

    At the end of the prompt and, where a stored prompt can't be continued everywhere, at places in between: the passes
    are divided there. With other caches it is ``own_loop``.
    """
    if getattr(own_loop, HANDLES_PAGES, False):
        return own_loop

    def generate_step(
        prompt: mx.array, model: Any, *args: Any, prompt_cache: Any = None, **options: Any
    ) -> Iterator[tuple[Any, mx.array]]:
        options["prompt_cache"] = prompt_cache
        embedded = options.get("input_embeddings") is not None
        stored = prompt_cache if isinstance(prompt_cache, StoredPrompt) and len(prompt_cache.parts) == 1 else None
        if stored is None or (embedded and not does_model_support_input_embeddings(model)):
            return own_loop(prompt, model, *args, **options)
        return _stored(own_loop, stored, embedded, prompt, model, *args, **options)

    setattr(generate_step, HANDLES_PAGES, True)
    return generate_step


def _stored(
    own_loop: Loop, stored: StoredPrompt, embedded: bool, prompt: mx.array, model: Any, *args: Any, **options: Any
) -> Iterator[tuple[Any, mx.array]]:
    if not stored.begin(prompt, embedded):
        yield from own_loop(prompt, model, *args, **options)
        return
    if options.get("logits_processors"):
        options["logits_processors"] = _with_found(stored.found, prompt.dtype, options["logits_processors"])
    steps: Any = own_loop(prompt, _StoringModel(model, stored.parts[0]), *args, **options)
    try:
        for step in steps:
            stored.tokens.append(int(step[0]))
            yield step
    finally:
        steps.close()
        stored.ended()


def _with_found(found: Sequence[int], dtype: mx.Dtype, processors: Sequence[Processor]) -> Sequence[Processor]:
    """``processors`` that see the whole prompt, as if it were run: without, what a penalty counts depends on it."""
    known = mx.array([token for token in found if 0 <= token < TOKEN_LIMIT], dtype=dtype)

    def with_known(processor: Processor) -> Processor:
        return lambda tokens, logits: processor(mx.concatenate([known, tokens]), logits)

    return [with_known(processor) for processor in processors] if known.size else processors


class _StoringModel:
    """Stands for a model in mlx-lm's loop: stores the prompt between the passes that process it."""

    def __init__(self, model: Any, part: PromptPart) -> None:
        self._model = model
        self._part = part

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> Any:
        """The logits of ``inputs`` ``(1, tokens)``; of a chunk of the prompt perhaps only of its last tokens."""
        part = self._part
        if part.unfinished:
            part.caches = list(cache)  # with mlx-lm's kv_bits, entries are replaced
        while (count := part.advance(part.count, inputs.shape[1])) is not None:
            self._forward(inputs[:, :count], cache, None if input_embeddings is None else input_embeddings[:, :count])
            mx.eval([leaf.state for leaf in leaves(part.caches)])
            inputs = inputs[:, count:]
            input_embeddings = None if input_embeddings is None else input_embeddings[:, count:]
        return self._forward(inputs, cache, input_embeddings)

    def _forward(self, inputs: mx.array, cache: Any, embeddings: mx.array | None) -> Any:
        options = {} if embeddings is None else {"input_embeddings": embeddings}
        logits = self._model(inputs, cache=cache, **options)
        self._part.count += inputs.shape[1]
        return logits
