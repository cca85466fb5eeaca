"""DraftedPrompt: what is stored of a prompt in the prefix caches of a model and of its draft model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache

log = logging.getLogger("tinykv")


class PromptPart:
    """One model's caches of a request, which hold the first ``count`` of ``tokens``; ``prefix`` stores them."""

    def __init__(self, prefix: PrefixCache, caches: list[Any], tokens: list[int], count: int) -> None:
        self.prefix = prefix
        self.caches = caches
        self.tokens = tokens
        self.count = count

    def until_stop(self, done: int) -> int | None:
        """Most tokens that a prompt of which ``done`` were run may go on by, so that it can be stored; None: all."""
        prefix = self.prefix
        # With a size limit, what a token reads of the first ones depends on where its pass began.
        if not prefix.enabled or not prefix.needs_cuts or prefix.limit_of(self.caches) is not None:
            return None
        return prefix.interval - done % prefix.interval

    def store(self, done: int) -> None:
        """Store the prompt, of which ``done`` tokens were run. The answer doesn't depend on it: failures are logged."""
        if not self.prefix.enabled:
            return
        try:
            self.prefix.insert_unfinished(self.tokens[:done], self.caches)
        except Exception as error:
            log.error("a prompt could not be stored: %s: %s", type(error).__name__, str(error))


class DraftedPrompt(list[Any]):
    """The caches of a request with drafts, as mlx-lm's loop takes them: the model's, then its draft model's.

    ``tokens`` are the whole prompt. The draft model may have found less of it than the model: the loop
    (:mod:`.drafts`) has it run what it lacks, stores the prompt while it is processed, and notes in ``parts`` how many
    tokens each model's caches hold.
    """

    def __init__(self, parts: Sequence[PromptPart], tokens: list[int]) -> None:
        super().__init__(leaf for part in parts for leaf in part.caches)
        self.parts = list(parts)
        self.tokens = tokens

    @classmethod
    def fetch(
        cls, prefixes: Sequence[PrefixCache], tokens: Sequence[int], max_kv_size: int | None = None
    ) -> tuple[DraftedPrompt, int]:
        """What is stored of ``tokens``, and how many need not be run: as many as the model has.

        ``prefixes`` are those of the model and of its draft model, which drafts no less rightly for having run more.
        """
        parts: list[PromptPart] = []
        for prefix in prefixes:
            limit = parts[0].count if parts else None
            caches, _, count = prefix.attach(tokens, max_kv_size, limit=limit)
            parts.append(PromptPart(prefix, caches, list(tokens), count))
        return cls(parts, list(tokens)), parts[0].count

    def continued(self, tokens: list[int]) -> DraftedPrompt:
        """The same caches in the next turn, whose whole prompt is ``tokens``: what the model holds, and more."""
        return DraftedPrompt([PromptPart(part.prefix, part.caches, tokens, part.count) for part in self.parts], tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Store the caches, which hold the first of ``tokens``."""
        for part in self.parts:
            part.prefix.insert(tokens[: part.count], part.caches)
