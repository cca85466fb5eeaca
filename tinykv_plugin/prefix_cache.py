"""PrefixCache: prompts that were run before, their pages shared with whoever begins in the same way."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import layout
from .cache import PagedKVCache
from .errors import CacheStateError
from .fingerprint import ModelFingerprint
from .prefix_attached import Attached
from .prefix_counts import PrefixCounts
from .prefix_cut import Cut, best_cut
from .prefix_disk import PrefixDisk
from .prefix_eviction import PrefixEviction
from .prefix_index import PrefixIndex, States
from .prefix_tree import token_bytes
from .stored_prompt import StoredPrompt

if TYPE_CHECKING:
    from .sequence import PagedSequence
    from .session import PagedSession


NOT_LOADED = "it is on disk, and could not be loaded or had no room"


class PrefixCache:
    """Stored prompts of one attachment, page by page; used with ``kv.prefix_cache``.

    Pages are shared with the requests that made them and those that continue them; where one ends inside a page,
    whoever writes there next gets a copy. Pages that nobody else holds are evicted, the least recently used first, as
    soon as requests need them; with a folder (setting ``prefix_dir``) they go there and are found again. Layers without
    pages (recurrent ones) are stored as they were at the end of what is inserted. Other weights (LoRA adapters) of the
    model have prompts of their own.
    """

    def __init__(
        self, session: PagedSession, model: Any, share: float, state_bytes: int, disk: PrefixDisk | None
    ) -> None:
        self.counts = PrefixCounts()
        self.index = PrefixIndex(session, state_bytes)
        self.eviction = PrefixEviction(session, self.index, share)
        self._session = session
        self._disk = disk
        self._fingerprint = ModelFingerprint(model)
        self._salts: dict[tuple[bytes, int | None], bytes] = {}
        if disk is not None:
            self.index.on_evict = disk.save

    # What authors use -----------------------------------------------------------------------------------------------

    def fetch(
        self, tokens: Sequence[int], max_kv_size: int | None = None, draft: PrefixCache | None = None
    ) -> tuple[list[Any], list[int]]:
        """A new request's caches with the longest stored prefix of ``tokens``, and the tokens still to run.

        At least the last token is left to run. With nothing stored the caches are empty. With the prefix cache of a
        ``draft`` model, that one's caches come behind the model's, as mlx-lm's loop for drafts takes them. If the
        caches are given to mlx-lm's loops, these store the prompt while they process it.
        """
        stored, count = StoredPrompt.fetch([self] if draft is None else [self, draft], tokens, max_kv_size)
        return stored, list(tokens[count:])

    def insert(self, tokens: Sequence[int], cache: Sequence[Any]) -> int:
        """Store ``cache`` (one request's), which holds ``tokens``; it can be used further. Returns the tokens stored.

        If the cache holds fewer tokens, these are stored. (The caches of a model without any attention can't tell how
        many they hold: it must be exactly ``tokens``.) What was fetched with a draft model's is stored in both. Raises
        CacheStateError for another model's cache.
        """
        if isinstance(cache, StoredPrompt) and len(cache.parts) > 1:
            return cache.keep(tokens)
        return self._insert(tokens, cache, tail=True)

    def insert_unfinished(self, tokens: Sequence[int], cache: Sequence[Any]) -> int:
        """As :meth:`insert`, for a request that goes on.

        Only full pages are stored: a page that is shared has to be copied when it is written next. But layers without
        pages can only be stored as they are now.
        """
        return self._insert(tokens, cache, tail=bool(self._session.stateful))

    def _insert(self, tokens: Sequence[int], cache: Sequence[Any], tail: bool) -> int:
        row = _row(cache)
        with self._session.lock:
            if row is None and not self._session.layers:
                row = self._session.new_sequence(None)  # nothing of this model is in pages
                row.tokens = len(tokens)
            if row is None or row.session is not self._session:
                raise CacheStateError("the prefix cache stores paged caches of its own model's attachment only")
            if self._session.closed:
                raise CacheStateError("the model was detached from tinykv; attach it again to store prompts")
            self._session.enter()
            row.heal()
            return self.keep(tokens, row, dict(enumerate(layout.leaves(cache))), tail)

    def clear(self) -> None:
        """Drop everything in memory; pages that requests still hold stay theirs.

        To be called after weights were changed in place or a LoRA scale was set, which nothing else shows.
        """
        with self._session.lock:
            self._fingerprint.forget()
            self.index.clear()

    def flush(self) -> None:
        """Have everything that is stored on disk too, if there is a folder for it."""
        if self._disk is not None and not self._session.closed:
            with self._session.lock:
                self._disk.flush(list(self.index.tree.newest_first()))
            self._disk.store.flush()

    def close(self) -> None:
        """Flush and drop everything."""
        self.flush()
        self.clear()
        if self._disk is not None:
            self._disk.close()

    def __len__(self) -> int:
        """Prompts stored in memory: ends that no other stored prompt continues."""
        return self.index.tree.leaves

    def __bool__(self) -> bool:
        return True

    @property
    def tokens(self) -> int:
        """Tokens stored in memory, common beginnings once."""
        with self._session.lock:
            return sum(node.count for node in self.index.tree.oldest_first())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored pages, and of what layers without pages held."""
        with self._session.lock:
            return self.index.nbytes

    def confine(self, same_layers: bool) -> None:
        """For a model divided between processes: all of them must find the same prompts.

        What is on one's disk may not be on another's. And where their layers differ (``same_layers`` is False), so do
        the bytes that decide what is evicted: then nothing is stored.
        """
        self._disk = self.index.on_evict = None
        if not same_layers:
            self.eviction.share = 0.0

    # For the generator and the server -------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether anything is stored (the setting ``prefix_cache``)."""
        return self.eviction.share > 0

    @property
    def entries(self) -> int:
        """Caches in the model's own list."""
        return len(self._session.plan)

    @property
    def needs_cuts(self) -> bool:
        """Whether a stored prompt can be continued only near places where it was inserted.

        So it is with recurrent layers, whose state is stored there, and with windows, which drop what is behind them.
        """
        session = self._session
        return bool(session.stateful) or any(group.window is not None for group in session.groups)

    @property
    def interval(self) -> int:
        """Tokens between the places where prompts are stored while they are processed, where they need such."""
        return self._session.prefix_interval

    @staticmethod
    def limit_of(cache: Sequence[Any]) -> int | None:
        """The size limit that a request's caches were made with."""
        row = _row(cache)
        return row.max_kv_size if row is not None else None

    def fingerprint(self) -> str:
        """A digest of the model's weights, adapters included."""
        return self._fingerprint.digest().hex()

    def matched(self, tokens: Sequence[int], max_kv_size: int | None = None) -> int:
        """How many of ``tokens`` :meth:`attach` would find; nothing is changed."""
        with self._session.lock:
            cut, _ = self._find(tokens, max_kv_size or self._session.max_kv_size)
            return cut.tokens

    def attach(
        self,
        tokens: Sequence[int],
        max_kv_size: int | None = None,
        *,
        limit: int | None = None,
        counted: bool = True,
        may_load: Callable[[], bool] = lambda: True,
    ) -> Attached:
        """As :meth:`fetch`, for this model alone, with at most ``limit`` tokens taken from the store.

        Unless it is ``counted``, the caller calls :meth:`count` when the request is run. Pages on disk are read only if
        it ``may_load``.
        """
        session = self._session
        max_kv_size = max_kv_size or session.max_kv_size
        asked = tokens if limit is None else tokens[: limit + 1]
        session.agree()
        with session.lock:
            session.enter()
            cut, found = self._find(asked, max_kv_size)
            row = session.new_sequence(max_kv_size)
            if self._disk is not None and self._disk.stored(cut):
                loaded = self._disk.load(cut, row, self.eviction.with_room) if may_load() else None
                if loaded is None:  # the files are gone, or there is no room: what is in memory has to do
                    cut, _ = self._find(asked, max_kv_size, in_memory=True)
                    cut = replace(cut, reason=NOT_LOADED)
                else:
                    cut = loaded
                    self.counts.disk_tokens += self._disk.stored_tokens
                    self.keep(asked[: cut.tokens], row, cut.states or {})
                    for count, states in self._disk.states(cut):
                        self.index.keep_states(self._salt(max_kv_size), asked[:count], states)
            if cut.tokens and not row.tokens:
                self._give(row, cut)
            others = {index: copy.deepcopy(state) for index, state in (cut.states or {}).items()}
            rest, refused = list(tokens[cut.tokens :]), found - cut.tokens if cut.reason else 0
            attached = Attached(session.caches(row, others), rest, cut.tokens, refused, cut.reason)
            if counted:
                self.count(cut.tokens, len(rest), refused, cut.reason)
            return attached

    def count(self, found: int, missed: int, refused: int = 0, reason: str = "") -> None:
        """Of a prompt ``found`` tokens are attached, ``missed`` are run; of these ``refused`` were stored as well."""
        self.counts.add(found, missed)
        if refused:
            self.counts.refuse(reason, refused)

    def keep(self, tokens: Sequence[int], row: PagedSequence, states: States, tail: bool = True) -> int:
        """Store the pages of ``row``, which hold ``tokens``; ``states`` has the caches of layers without pages.

        Without ``tail`` only full pages: a page that is shared is copied when it is written next. The session's lock
        is held, no pass is under way. Returns the tokens stored.
        """
        if not self.enabled:
            return 0
        count = self.index.keep(self._salt(row.max_kv_size), tokens, row, states, tail)
        self.eviction.keep_within()
        return count

    # Finding --------------------------------------------------------------------------------------------------------

    def _salt(self, max_kv_size: int | None) -> bytes:
        """What tells K/V apart that the same tokens have: weights, shapes, format, and a limit on what is attended."""
        key = self._fingerprint.digest(), max_kv_size
        salt = self._salts.get(key)
        if salt is None:
            text = f"{self._session.page_format} {max_kv_size}".encode()
            salt = self._salts[key] = hashlib.blake2b(key[0] + text, digest_size=16).digest()
        return salt

    def _find(self, tokens: Sequence[int], max_kv_size: int | None, in_memory: bool = False) -> tuple[Cut, int]:
        """Where a stored prompt can be continued, and how many tokens are stored in all; one token is left to run."""
        session, data = self._session, token_bytes(tokens[:-1])
        match = self.index.tree.match(self._salt(max_kv_size), data)
        if self._disk is not None and not in_memory:
            match = self._disk.extend(match, data)
        retentions = session.retentions(max_kv_size)
        return best_cut(match, data, retentions, bool(session.stateful), session.page_size), match.tokens

    def _give(self, row: PagedSequence, cut: Cut) -> None:
        """Share the pages of ``cut``, all of them in memory, with an empty sequence."""
        for group, table in enumerate(row.tables):
            pages = [cut.nodes[logical].pages[group] for logical in cut.held(group, table)]
            self._session.pools[group].allocator.share(pages)
            table.open_at(cut.floors[group], cut.tokens, pages)
        row.tokens = cut.tokens
        row.version += 1
        self.index.tree.touch(cut.nodes[-1])


def _row(cache: Sequence[Any]) -> PagedSequence | None:
    return next((leaf._row for leaf in layout.leaves(cache) if isinstance(leaf, PagedKVCache)), None)
