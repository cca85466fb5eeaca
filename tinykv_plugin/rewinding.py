"""RewindingCache: a model's whole prompt cache that drafts can be taken back from, recurrent state included."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .cache import PagedKVCache
from .errors import ConfigError, DraftError
from .layout import leaves
from .unused import UnusedCache

if TYPE_CHECKING:
    from .stored_prompt import PromptPart

REWINDABLE = (mlx_cache.KVCache, mlx_cache.QuantizedKVCache, mlx_cache.ConcatenateKVCache, UnusedCache)
"""Caches without pages that keep every token, or none: others say that they can be trimmed, and then read what they
have dropped."""


@dataclass(frozen=True)
class _Pass:
    """A forward pass: the position it began at, its tokens ``(1, count)``, and the recurrent states before it."""

    start: int
    tokens: mx.array
    states: list[list[Any]]


class RewindingCache:
    """Stands for the list of a model's caches in mlx-lm's loop for drafts, as the one entry of a list.

    K/V are taken back by trimming. Recurrent state can't be: it is noted before each pass (arrays are never changed in
    place, so noting costs nothing), and a rewind goes back to a noted state and runs the tokens since then again,
    together with those of the next pass. ``depth`` is how many tokens a rewind may take back.
    """

    def __init__(self, caches: Sequence[Any], depth: int, prompt_tokens: int, prompt: PromptPart | None = None) -> None:
        self.caches = list(caches)
        found = leaves(caches)
        self._recurrent = [leaf for leaf in found if isinstance(leaf, mlx_cache.ArraysCache)]
        self._kv = [leaf for leaf in found if not isinstance(leaf, mlx_cache.ArraysCache)]
        self._rows = {id(leaf._row): leaf._row for leaf in found if isinstance(leaf, PagedKVCache)}
        self._depth = depth
        self._passes: deque[_Pass] = deque(maxlen=depth + 1)
        self._position = 0
        self._undone = 0
        self._rewound = True  # there is no pass to take back
        self._last = mx.zeros((1, 0), dtype=mx.uint32)  # tokens of the last pass, which began at
        self._last_start = 0
        self._prompt_tokens = prompt_tokens
        self._prompt = prompt
        # Tokens before those that the loop knows of; all that is left of them is run first.
        self._before = 0 if prompt is None else len(prompt.tokens) - prompt_tokens
        # A pass may run the drafts of the last one again before its own.
        self._require_margin(2 * depth + 1 if self._recurrent else depth)

    def run(self, model: Any, tokens: mx.array) -> mx.array:
        """The logits ``(1, count, vocabulary)`` of ``tokens`` ``(1, count)`` behind what the caches hold.

        Of a chunk of the prompt perhaps only those of its last tokens: mlx-lm doesn't look at them.
        """
        prompt, before = self._prompt, self._before
        while prompt and (count := prompt.advance(before + self._position, tokens.shape[1])) is not None:
            self._pass(model, tokens[:, :count])
            mx.eval(self.state)
            tokens = tokens[:, count:]
        return self._pass(model, tokens)

    def run_before(self, model: Any, chunk: int) -> None:
        """Run what the caches lack of the tokens before those that the loop knows of, ``chunk`` at a time."""
        prompt = self._prompt
        if prompt is None:
            return
        while prompt.count < self._before:
            lacking = prompt.tokens[prompt.count : self._before]
            count = min(chunk, len(lacking), prompt.until_stop(prompt.count) or chunk)
            model(mx.array(lacking[:count])[None], cache=self.caches)
            mx.eval(self.state)
            prompt.count += count
            prompt.store(prompt.count)

    def settle(self, model: Any) -> None:
        """Leave the caches as after a plain run over the tokens that were kept."""
        again = self._go_back()
        if again is not None:
            model(again, cache=self.caches)
            mx.eval(self.state)
            self._position += again.shape[1]
        for row in self._rows.values():
            row.stepwise = False
        if self._prompt is not None and self._prompt.count >= self._before:
            self._prompt.count = self._before + self._position

    def finish(self) -> None:
        """Evaluate what the last pass wrote and read, logits that nobody looked at included."""
        layers = [leaf._layer.pages for leaf in self._kv if isinstance(leaf, PagedKVCache)]
        mx.eval(self.state, [pages.last_read for pages in layers if pages is not None])

    def catch_up(self, model: Any, other: RewindingCache) -> None:
        """Run the tokens that ``other``'s last pass has run and these caches lack. Both have settled."""
        start, stop = (position - other._last_start for position in (self._position, other._position))
        if 0 <= start < stop <= other._last.shape[1]:
            model(other._last[:, start:stop], cache=self.caches)
            mx.eval(self.state)
            self._position = other._position
            if self._prompt is not None:
                self._prompt.count += stop - start

    def _pass(self, model: Any, tokens: mx.array) -> mx.array:
        again = self._go_back()
        if again is None:
            return self._forward(model, tokens)
        count = again.shape[1]
        if count > self._depth:
            # While drafts are wrong, they only become more; and windows keep so many tokens and no more.
            self._forward(model, again)
            return self._forward(model, tokens)
        return self._forward(model, mx.concatenate([again, tokens], axis=1))[:, count:]

    def _forward(self, model: Any, inputs: mx.array) -> mx.array:
        for row in self._rows.values():
            # All but the last token of the prompt are read as without drafts, in chunks.
            row.stepwise = self._position + inputs.shape[1] >= self._prompt_tokens
        states = [list(leaf.cache) for leaf in self._recurrent]
        try:
            logits: mx.array = model(inputs, cache=self.caches)
        except BaseException:
            # The K/V of a pass that broke off are taken back by themselves.
            self._put_back(states)
            raise
        if self._recurrent:
            self._passes.append(_Pass(self._position, inputs, states))
        self._last, self._last_start = inputs, self._position
        self._position += inputs.shape[1]
        self._rewound = False
        return logits

    # What mlx-lm asks of a cache ------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether tokens can be taken back; states of recurrent layers always can, by those that were kept."""
        return all(leaf.is_trimmable() for leaf in self._kv)

    def trim(self, n: int) -> int:
        """Take back the last ``n`` tokens, once after each pass: mlx-lm's loop asks again when it breaks off."""
        if self._rewound:
            return 0
        self._rewound = True
        if self._recurrent:
            self._undone += n
        else:
            self._position -= n
            for leaf in self._kv:
                leaf.trim(n)
        return n

    @property
    def state(self) -> list[Any]:
        """The states of all caches, for mlx-lm to evaluate."""
        return [leaf.state for leaf in leaves(self.caches)]

    def _go_back(self) -> mx.array | None:
        """Undo what was trimmed; returns the tokens ``(1, count)`` that have to be run again, None if none do."""
        if not self._undone:
            return None
        target = self._position - self._undone
        self._undone = 0
        noted = self._passes.pop()
        while noted.start > target:
            noted = self._passes.pop()
        self._put_back(noted.states)
        for leaf in self._kv:
            leaf.trim(self._position - noted.start)
        self._position = noted.start
        return noted.tokens[:, : target - noted.start] if target > noted.start else None

    def _put_back(self, states: list[list[Any]]) -> None:
        for leaf, state in zip(self._recurrent, states, strict=True):
            leaf.cache = state

    def _require_margin(self, tokens: int) -> None:
        for leaf in self._kv:
            if isinstance(leaf, PagedKVCache):
                retention = leaf._row.tables[leaf._layer.group].retention
                why = ""
                if retention.window is not None:
                    why = f"layers with a window of {retention.window} tokens"
                elif leaf._layer.opens:
                    why = "layers with open pages"
                if why and leaf._session.rewind < tokens:
                    raise ConfigError(
                        "rewind",
                        f"{leaf._session.rewind} is too small for these drafts: {why} must keep {tokens} more, to take "
                        f"them back (--kv-rewind {tokens})",
                    )
            elif type(leaf) not in REWINDABLE:
                raise DraftError(
                    f"drafts can't be used with this model: its {type(leaf).__name__} can't take tokens back; "
                    f"leave the draft model out"
                )


class RewindingModel:
    """Stands for a model in mlx-lm's loop for drafts: runs it on a :class:`RewindingCache`.

    What the caches lack of the prompt before the loop's is run first, ``chunk`` tokens at a time.
    """

    def __init__(self, model: Any, chunk: int) -> None:
        self._model = model
        self._chunk = chunk
        # mlx-lm divides a list of caches by the number of layers.
        self.layers = [None]

    def __call__(self, tokens: mx.array, cache: list[RewindingCache]) -> mx.array:
        """The logits of ``tokens``, as the model's own."""
        cache[0].run_before(self._model, self._chunk)
        return cache[0].run(self._model, tokens)
