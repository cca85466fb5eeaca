"""StoredPrompt: a request's caches, whose prompt is stored in prefix caches while it is processed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import ArraysCache

from .cache import PagedKVCache
from .layout import leaves

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache

log = logging.getLogger("tinykv")


class PromptPart:
    """One model's caches of a request, which hold the first ``count`` of ``tokens``; ``prefix`` stores them.

    ``stops`` are places where other prompts may part from this one.
    """

    def __init__(
        self, prefix: PrefixCache, caches: list[Any], tokens: list[int], count: int, stops: Collection[int] = ()
    ) -> None:
        self.prefix = prefix
        self.caches = caches
        self.tokens = tokens
        self.count = count
        self.stops = stops
        self._stored = count

    def begin(self, tokens: list[int]) -> None:
        """The whole prompt is ``tokens`` now: what the caches hold, and more."""
        self.tokens = tokens
        self._stored = self.count

    @property
    def unfinished(self) -> bool:
        """Whether the prompt is to be stored further on."""
        return self._stored < len(self.tokens) - 1

    def until_stop(self, done: int) -> int | None:
        """Most tokens that a prompt of which ``done`` were run may go on by, so that it can be stored; None: all."""
        prefix = self.prefix
        # With a size limit, what a token reads of the first ones depends on where its pass began.
        if not prefix.enabled or not prefix.needs_cuts or prefix.limit_of(self.caches) is not None:
            return None
        return min([prefix.interval - done % prefix.interval, *(stop - done for stop in self.stops if stop > done)])

    def advance(self, done: int, count: int) -> int | None:
        """Store the prompt, of which ``done`` tokens were run, as long as it isn't whole but for its last token.

        Returns how many of the next ``count`` tokens to run before it is stored again; None: all of them.
        """
        if not self.unfinished:
            return None
        last = len(self.tokens) - 1
        due = self.until_stop(self._stored)
        if due is None or done - self._stored >= due or done == last:
            self.store(done)
        stop = self.until_stop(done)
        # The last token may be run together with drafts: that pass is never divided.
        return stop if stop is not None and stop < count and done < last else None

    def store(self, done: int) -> None:
        """Store the prompt, of which ``done`` tokens were run. The answer doesn't depend on it: failures are logged."""
        if not self.prefix.enabled or done <= self._stored:
            return
        self._stored = done
        try:
            self.prefix.insert_unfinished(self.tokens[:done], self.caches)
        except Exception as error:
            log.error("a prompt could not be stored: %s: %s", type(error).__name__, str(error))


class StoredPrompt(list[Any]):
    """The caches of a request, as mlx-lm's loops take them: the model's, then its draft model's if there is one.

    While a model is attached, mlx-lm's loops (:mod:`.storing`, :mod:`.drafts`) store the prompt as they process it, and
    note in ``parts`` how many tokens each model's caches hold, and in ``tokens`` the answer behind the prompt. The
    draft model may have found less of the prompt than the model: the loop has it run what it lacks. Copies are plain
    lists.
    """

    def __init__(self, parts: Sequence[PromptPart], tokens: Sequence[int]) -> None:
        super().__init__(leaf for part in parts for leaf in part.caches)
        self.parts = list(parts)
        self.tokens = list(tokens)
        # Tokens of the prompt that its loop isn't given: they were found.
        self.found: list[int] = []
        self._begun = False
        self._noted: tuple[list[int], list[Any]] | None = self._marks()

    @classmethod
    def fetch(
        cls,
        prefixes: Sequence[PrefixCache],
        tokens: Sequence[int],
        max_kv_size: int | None = None,
        stops: Collection[int] = (),
    ) -> tuple[StoredPrompt, int]:
        """What is stored of ``tokens``, and how many need not be run: as many as the model has.

        ``prefixes`` are those of the model and of its draft model, which drafts no less rightly for having run more.
        ``stops`` are numbers of tokens after which others may part from them.
        """
        parts: list[PromptPart] = []
        for prefix in prefixes:
            limit = parts[0].count if parts else None
            found = prefix.attach(tokens, max_kv_size, limit=limit)
            parts.append(PromptPart(prefix, found.caches, list(tokens), found.count, stops))
        return cls(parts, tokens), parts[0].count

    @property
    def known(self) -> bool:
        """Whether nobody else has used the caches, so that it is known which tokens they hold."""
        marks = self._marks()
        if self._noted is None or marks is None or self._noted[0] != marks[0]:
            return False
        return all(one is other for one, other in zip(self._noted[1], marks[1], strict=True))

    def begin(self, prompt: Any, embedded: bool = False) -> bool:
        """A loop is about to run ``prompt`` (mlx array of token ids) behind what the model's caches hold.

        If embeddings are run instead (``embedded``), the tokens stand for them, as they did when they were looked up.
        Returns False, and nothing is to be stored, if it isn't known which tokens the caches hold.
        """
        count = self.parts[0].count
        known = self.known and count <= len(self.tokens)
        if not known or (embedded and len(prompt) != len(self.tokens) - count):
            self._noted = None
            return False
        self.found = [] if self._begun else self.tokens[:count]
        self._begun = True
        if not embedded:
            self.tokens = self.tokens[:count] + prompt.tolist()
        for part in self.parts:
            part.begin(list(self.tokens))
        self._noted = None  # until it is over
        return True

    def ended(self) -> None:
        """The loop that began is over: ``parts`` say what the caches hold."""
        start = 0
        for part in self.parts:
            start, stop = start + len(part.caches), start
            part.caches = list(self[stop:start])
        self._noted = self._marks()

    def keep(self, tokens: Sequence[int]) -> int:
        """Store the caches, which hold the first of ``tokens``; returns how many the model's do.

        If somebody else has used them, only the model's, as far as they tell how many they hold.
        """
        if not self.known:
            return self.parts[0].prefix.insert(tokens, self.parts[0].caches)
        kept = [part.prefix.insert(tokens[: part.count], part.caches) for part in self.parts]
        return kept[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(leaf, memo) for leaf in self]

    def _marks(self) -> tuple[list[int], list[Any]] | None:
        """Numbers and arrays that are others whenever the caches have changed; None if nothing tells."""
        versions, arrays = list[int](), list[Any]()
        for part in self.parts:
            found = leaves(part.caches)
            row = next((leaf._row for leaf in found if isinstance(leaf, PagedKVCache)), None)
            if row is not None:
                versions.append(row.version)
                continue
            states = [side for leaf in found if isinstance(leaf, ArraysCache) for side in leaf.cache]
            if not states:
                return None
            arrays += states
        return versions, arrays
