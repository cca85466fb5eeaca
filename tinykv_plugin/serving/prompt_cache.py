"""PagedPromptCache: the prefix caches of the models a server has loaded, behind the interface of mlx-lm's store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from ..prefix_cache import PrefixCache
from ..stored_prompt import StoredPrompt

log = logging.getLogger("tinykv")

UNLIMITED = 1 << 63


class PagedPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's store of prompts, for models with paged caches: it finds and keeps prompts in their prefix caches.

    ``max_size`` prompts are kept (those whose end no other one continues), in ``max_bytes`` bytes of unique pages. For
    models without pages it is mlx-lm's own store. Safe to ask from any thread; used by one.
    """

    def __init__(self, max_size: int = UNLIMITED, max_bytes: int = UNLIMITED) -> None:
        super().__init__(max_size, max_bytes)
        self._lock = threading.RLock()
        # Of the model and, if there is one, of its draft model.
        self._prefixes: Sequence[PrefixCache] = ()
        self._max_kv_size: int | None = None
        self._stops: Collection[int] = ()

    def use(self, prefixes: Sequence[PrefixCache], max_kv_size: int | None = None) -> None:
        """From now on prompts are those of these models: what generates and, if there is one, what drafts.

        Their requests have a limit of ``max_kv_size`` tokens.
        """
        with self._lock:
            self._prefixes = tuple(prefixes)
            self._max_kv_size = max_kv_size

    def __len__(self) -> int:
        prefixes = self._prefixes
        return max(map(len, prefixes)) if prefixes else int(super().__len__())

    @property
    def nbytes(self) -> int:
        """Bytes of all stored prompts."""
        prefixes = self._prefixes
        return sum(prefix.nbytes for prefix in prefixes) if prefixes else int(super().nbytes)

    @property
    def evictions(self) -> int:
        """Pages of stored prompts that gave way."""
        return sum(prefix.index.evicted for prefix in self._prefixes)

    def expect(self, stops: Collection[int]) -> None:
        """After so many tokens others may part from the prompt that is asked for next: it is stored there too."""
        self._stops = stops

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A cache with a prefix of ``tokens``, and the tokens still to run.

        At least one token is left to run. It is a StoredPrompt, even if nothing is found: mlx-lm's loops store the
        prompt in it. For models without pages (None, ``tokens``) if there is none.
        """
        if not self._prefixes:
            found: tuple[list[Any] | None, list[int]] = super().fetch_nearest_cache(model, tokens)
            return found
        with self._lock:
            stops, self._stops = self._stops, ()
            prompt, count = StoredPrompt.fetch(self._prefixes, tokens, self._max_kv_size, stops)
            return prompt, tokens[count:]

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep ``prompt_cache``, which must not be used further, for prompts that begin like ``tokens``.

        If it holds fewer tokens, these are kept: with a draft model, the last token was perhaps not run.
        """
        if not self._prefixes:
            super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
            return
        with self._lock:
            if isinstance(prompt_cache, StoredPrompt):
                prompt_cache.keep(tokens)
            else:
                for prefix, part in zip(self._prefixes, self._parts(prompt_cache), strict=True):
                    prefix.insert(tokens, part)
            self.trim_to(n_sequences=self.max_size, n_bytes=self.max_bytes)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop the least recently used prompts until at most so many, or so many bytes, are left."""
        if not self._prefixes:
            super().trim_to(n_sequences=n_sequences, n_bytes=n_bytes)
            return
        with self._lock:
            for prefix in self._prefixes:
                while n_sequences is not None and len(prefix) > max(0, n_sequences) and prefix.eviction.evict_prompt():
                    pass
            while n_bytes is not None and self.nbytes > max(0, n_bytes) and self._drop_page():
                pass

    def reclaim(self) -> bool:
        """Drop what was used least recently, for its pages; False if there is nothing that nobody uses."""
        with self._lock:
            return any(prefix.eviction.evict(1) for prefix in self._prefixes)

    def clear(self) -> None:
        """Drop everything: the model is going, and its pages with it. What can go to disk goes there first.

        For the thread that ran the model.
        """
        with self._lock:
            for prefix in self._prefixes:
                try:
                    prefix.close()
                except Exception as error:
                    log.warning("stored prompts were not written to disk: %s", str(error))
                    prefix.clear()
            self._prefixes = ()

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Prompts and their bytes; what pages hold has no type, so all count as answers."""
        if not self._prefixes:
            stock: dict[str, dict[str, int]] = super().stats_by_type()
            return stock
        return {"assistant": {"n_sequences": len(self), "n_bytes": self.nbytes}}

    def _parts(self, prompt_cache: list[Any]) -> list[list[Any]]:
        """The caches of each model."""
        parts, start = [], 0
        for prefix in self._prefixes:
            parts.append(prompt_cache[start : start + prefix.entries])
            start += prefix.entries
        return parts

    def _drop_page(self) -> bool:
        return self.reclaim() or any(prefix.eviction.evict_prompt() for prefix in self._prefixes)
