"""PagedPromptCache: prompts kept for later requests; their pages are shared with whoever continues them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..cache import PagedKVCache
from ..errors import CacheStateError
from ..layout import leaves

UNLIMITED = 1 << 63


class PagedPromptCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's store of prompts, with the same interface, for caches in pages.

    Bytes are those of unique pages, however many prompts share them. A hit always leaves at least one token to run.
    A stored prompt that has to be rewound to where a new one branches off is used only if its windows still hold
    what is needed. Safe to ask from any thread; used by one.
    """

    def __init__(self, max_size: int = 10, max_bytes: int = UNLIMITED) -> None:
        super().__init__(max_size, max_bytes)
        self.evictions = 0
        self._lock = threading.RLock()
        self._entries: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored prompts."""
        with self._lock:
            return unique_bytes(entry.prompt_cache for entry in self._entries.values())

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """A cache with a prefix of ``tokens``, and the tokens still to run; (None, ``tokens``) if there is none."""
        with self._lock:
            for stored, length in self._candidates(model, tokens[:-1]):
                cache = self._copy(model, stored, length)
                if cache is not None:
                    return cache, tokens[length:]
        return None, tokens

    def insert_cache(
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep ``prompt_cache``, which must not be used further, for prompts that begin like ``tokens``."""
        with self._lock:
            held = _settle(prompt_cache, len(tokens))
            if not held:
                return
            tokens = list(tokens[:held])
            entry = LRUPromptCache.CacheEntry(prompt_cache, 0, cache_type)
            previous = self._trie.add(model, tokens, entry)
            if previous is not None:
                self._lru.remove(model, tokens)
                del self._entries[id(previous)]
            self._lru.push(model, tokens, cache_type)
            self._entries[id(entry)] = entry
            self._drop_prefixes(model, tokens, prompt_cache)
            self.trim_to(n_sequences=self.max_size, n_bytes=self.max_bytes)

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Drop the least valuable prompts until at most so many, or so many bytes, are left."""
        with self._lock:
            while n_sequences is not None and len(self) > max(0, n_sequences):
                self._drop()
            while n_bytes is not None and n_bytes < UNLIMITED and len(self) and self.nbytes > max(0, n_bytes):
                self._drop()

    def reclaim(self) -> bool:
        """Drop the least valuable prompt, for its pages; False if there is none."""
        with self._lock:
            if not len(self):
                return False
            self._drop()
            self.evictions += 1
            return True

    def clear(self) -> None:
        """Drop everything: the model is going, and its pages with it."""
        self.trim_to(n_sequences=0)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Prompts and bytes of each type; pages that types share count in each."""
        with self._lock:
            by_type: dict[str, list[Any]] = {kind: [] for kind in self._lru._ordering}
            for entry in self._entries.values():
                by_type[entry.cache_type].append(entry.prompt_cache)
            return {
                kind: {"n_sequences": len(caches), "n_bytes": unique_bytes(caches)} for kind, caches in by_type.items()
            }

    def _candidates(self, model: Any, known: list[int]) -> Iterator[tuple[list[int], int]]:
        """Stored prompts to continue from and the tokens they have in common with ``known``, the best first."""
        found = self._trie.search(model, known)
        if found.exact:
            yield found.exact, len(known)
        shorter = len(found.shorter) if found.shorter else 0
        if found.longer and found.common_prefix > shorter:
            yield found.longer, found.common_prefix
        if shorter:
            yield found.shorter, shorter

    def _copy(self, model: Any, stored: list[int], length: int) -> list[Any] | None:
        """A page-sharing copy of a stored prompt, rewound to ``length`` tokens; None if it can't be."""
        source = self._trie.get(model, stored).prompt_cache
        if length < len(stored) and not _can_rewind(source, length):
            return None
        cache: list[Any] = copy.deepcopy(source)
        try:
            trim_prompt_cache(cache, len(stored) - length)
        except CacheStateError:
            return None
        return cache

    def _drop_prefixes(self, model: Any, tokens: list[int], prompt_cache: list[Any]) -> None:
        """Drop stored prompts that ``prompt_cache``, rewound, can stand in for."""
        for length, entry in self._trie.pop_prefixes(model, tokens):
            if _can_rewind(prompt_cache, length):
                self._lru.remove(model, tokens[:length])
                del self._entries[id(entry)]
            else:
                self._trie.add(model, tokens[:length], entry)

    def _drop(self) -> None:
        model, tokens = self._lru.pop()
        del self._entries[id(self._trie.pop(model, tokens))]


def unique_bytes(caches: Iterable[Sequence[Any]]) -> int:
    """Bytes of prompt caches, every page once."""
    other = 0
    rows: dict[int, Any] = {}
    for cache in caches:
        for leaf in leaves(cache):
            if isinstance(leaf, PagedKVCache):
                rows[id(leaf._row)] = leaf._row
            else:
                other += leaf.nbytes
    pages: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for row in rows.values():
        with row.session.lock:
            for group, (table, pool) in enumerate(zip(row.tables, row.session.pools, strict=True)):
                key = id(row.session), group
                pages.setdefault(key, set()).update(table.live_pages())
                sizes[key] = pool.page_bytes
    return other + sum(len(found) * sizes[key] for key, found in pages.items())


def _can_rewind(cache: Sequence[Any], tokens: int) -> bool:
    """Whether all layers can go back to their first ``tokens`` tokens."""
    for leaf in leaves(cache):
        if isinstance(leaf, PagedKVCache):
            if any(table.retention.first_needed(tokens) < table.first_position for table in leaf._row.tables):
                return False
        elif not leaf.is_trimmable():
            return False
    return True


def _settle(cache: list[Any], count: int) -> int:
    """Bring a cache and the number of tokens it is said to hold together; returns the tokens both have, 0 if none.

    After generating alone the last token may not have been run, or one too many, and a draft model may lag behind.
    """
    offsets = [leaf.offset for leaf in leaves(cache) if isinstance(leaf, PagedKVCache)]
    if not offsets:
        return count
    held = min(count, *offsets)
    if max(offsets) > held and not (can_trim_prompt_cache(cache) and _can_rewind(cache, held)):
        return 0
    for leaf in leaves(cache):
        if isinstance(leaf, PagedKVCache):
            leaf.trim(leaf.offset - held)
    return held
