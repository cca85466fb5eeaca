"""PrefixCache: prompts that were run before, their pages shared with whoever begins in the same way."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from . import layout
from .cache import PagedKVCache
from .errors import CacheStateError, OutOfPagesError, PoolGrowthError
from .fingerprint import ModelFingerprint
from .hookspecs import PageEvicted
from .pool import find_room
from .prefix_cut import Cut, best_cut
from .prefix_tree import TOKEN_BYTES, PrefixNode, PrefixTree, token_bytes

if TYPE_CHECKING:
    from .sequence import PagedSequence
    from .session import PagedSession

log = logging.getLogger("tinykv")

T = TypeVar("T")

# Caches of layers that have no pages, by their place among the leaves.
States = Mapping[int, Any]


@dataclass
class PrefixCounts:
    """What happened so far.

    Tokens of prompts that were found (``hit_tokens``) and not (``missed_tokens``), prompts of which something was found
    (``hits``) and not (``misses``), pages ``evicted``, tokens that were stored but could not be used (``refused``), by
    reason.
    """

    hit_tokens: int = 0
    missed_tokens: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class PrefixCache:
    """Stored prompts of one attachment, page by page; used with ``kv.prefix_cache``.

    Pages are shared with the requests that made them and those that continue them; where one ends inside a page,
    whoever writes there next gets a copy. Pages that nobody else holds are evicted, the least recently used first, as
    soon as requests need them. Layers without pages (recurrent ones) are stored as they were at the end of what is
    inserted. Other weights (LoRA adapters) of the model have prompts of their own.
    """

    def __init__(self, session: PagedSession, model: Any, share: float, state_bytes: int) -> None:
        self.counts = PrefixCounts()
        self.share = share
        self.tree = PrefixTree(session.page_size)
        self._session = session
        self._fingerprint = ModelFingerprint(model)
        self._state_limit = state_bytes
        self._states: OrderedDict[PrefixNode, None] = OrderedDict()
        self._state_bytes = 0
        self._salts: dict[tuple[bytes, int | None], bytes] = {}

    # What authors use -----------------------------------------------------------------------------------------------

    def fetch(self, tokens: Sequence[int], max_kv_size: int | None = None) -> tuple[list[Any], list[int]]:
        """A new request's caches with the longest stored prefix of ``tokens``, and the tokens still to run.

        At least the last token is left to run. With nothing stored the caches are empty.
        """
        cache, rest, _ = self.attach(tokens, max_kv_size)
        return cache, rest

    def insert(self, tokens: Sequence[int], cache: Sequence[Any]) -> int:
        """Store ``cache`` (one request's), which holds ``tokens``; it can be used further. Returns the tokens stored.

        If the cache holds fewer tokens, these are stored. Raises CacheStateError for another model's cache.
        """
        row = _row(cache)
        with self._session.lock:
            if row is None and not self._session.layers:
                row = self._session.new_sequence(None)  # nothing of this model is in pages
                row.tokens = len(tokens)
            if row is None or row.session is not self._session:
                raise CacheStateError("the prefix cache stores paged caches of its own model's attachment only")
            row.heal()
            return self.keep(tokens, row, dict(enumerate(layout.leaves(cache))))

    def clear(self) -> None:
        """Drop everything; pages that requests still hold stay theirs."""
        with self._session.lock:
            for node in list(self.tree.oldest_first()):
                self._drop(node)

    def __len__(self) -> int:
        """Prompts stored: ends that no other stored prompt continues."""
        return self.tree.leaves

    def __bool__(self) -> bool:
        return True

    @property
    def tokens(self) -> int:
        """Tokens stored, common beginnings once."""
        with self._session.lock:
            return sum(node.count for node in self.tree.oldest_first())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored pages, and of what layers without pages held."""
        with self._session.lock:
            pools = self._session.pools
            return self._state_bytes + sum(pool.allocator.kept * pool.page_bytes for pool in pools)

    # For the generator and the server -------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether anything is stored (the setting ``prefix_cache``)."""
        return self.share > 0

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

    def matched(self, tokens: Sequence[int], max_kv_size: int | None = None) -> int:
        """How many of ``tokens`` :meth:`attach` would find; nothing is changed."""
        with self._session.lock:
            cut, _ = self._find(tokens, max_kv_size)
            return cut.tokens

    def attach(
        self,
        tokens: Sequence[int],
        max_kv_size: int | None = None,
        *,
        limit: int | None = None,
        counted: bool = True,
    ) -> tuple[list[Any], list[int], int]:
        """As :meth:`fetch`, with at most ``limit`` tokens taken from the store; also returns how many were.

        Unless it is ``counted``, the caller calls :meth:`count` when the request is run.
        """
        session = self._session
        with session.lock:
            session.enter()
            row = session.new_sequence(max_kv_size)
            cut, found = self._find(tokens if limit is None else tokens[: limit + 1], max_kv_size)
            if cut.nodes:
                self._share(row, cut)
                self.tree.touch(cut.nodes[-1])
            if counted:
                self.count(cut.tokens, len(tokens) - cut.tokens)
            if found > cut.tokens and cut.reason:
                refused = self.counts.refused
                refused[cut.reason] = refused.get(cut.reason, 0) + found - cut.tokens
            states = {index: copy.deepcopy(state) for index, state in (cut.states or {}).items()}
            return session.caches(row, states), list(tokens[cut.tokens :]), cut.tokens

    def count(self, found: int, missed: int) -> None:
        """Of a prompt ``found`` tokens were stored, ``missed`` are run."""
        counts = self.counts
        counts.hit_tokens += found
        counts.missed_tokens += missed
        counts.hits += found > 0
        counts.misses += not found

    def keep(self, tokens: Sequence[int], row: PagedSequence, states: States, tail: bool = True) -> int:
        """Store the pages of ``row``, which hold ``tokens``; ``states`` has the caches of layers without pages.

        Without ``tail`` only full pages: a page that is shared is copied when it is written next. The session's lock
        is held, no pass is under way. Returns the tokens stored.
        """
        if not self.enabled:
            return 0
        count = min(len(tokens), row.tokens)
        size, step = self.tree.page_size, self.tree.page_size * TOKEN_BYTES
        if not tail:
            count -= count % size
        if not count:
            return 0
        # Of recurrent layers only the present is known, not what they held at an earlier token.
        stateful = bool(self._session.stateful)
        exact = stateful and count == row.tokens
        node = self.tree.root(self._salt(row.max_kv_size))
        data = token_bytes(tokens[:count])
        for logical in range(-(-count // size)):
            key = data[logical * step : (logical + 1) * step]
            child = node.children.get(key)
            if child is None:
                if len(key) < step and not exact and any(other.startswith(key) for other in node.children):
                    count -= count % size  # a longer stored prompt has these tokens too
                    break
                shorter = self.tree.partial_prefix(node, key)
                if shorter is not None and shorter.state is None:
                    self._drop(shorter)
                child = self.tree.add(node, key, [-1] * len(row.tables))
            for group, table in enumerate(row.tables):
                page = table.pages[logical]
                if child.pages[group] < 0 <= page:
                    self._session.pools[group].allocator.keep(page)
                    child.pages[group] = page
            node = child
        row.slots = 0  # its tail page may be shared from now on
        if node.parent is not None:
            self.tree.touch(node)
            if exact:
                self._store_states(node, states)
        self.keep_within()
        return count

    def keep_within(self) -> None:
        """Evict what is beyond the cache's share of the budget; not in a transaction."""
        if self._session.journal.is_open:
            return
        limit = int(self.share * self._session.budget.total)
        while self.cached_bytes > limit and self.evict(1):
            pass

    @property
    def cached_bytes(self) -> int:
        """Bytes of pages that only this cache holds."""
        return sum(pool.allocator.cached_only * pool.page_bytes for pool in self._session.pools)

    def make_room(self, needed: Sequence[int]) -> bool:
        """Evict until ``needed`` pages of each group fit into the budget; False, with nothing evicted, if they can't.

        The session's lock is held and no transaction is open.
        """
        pools = self._session.pools
        least = [max(0, count - pool.allocator.cached_only) for count, pool in zip(needed, pools, strict=True)]
        try:
            find_room(pools, least, last_try=False)
            self.with_room(lambda: find_room(pools, needed, last_try=False))
        except OutOfPagesError:
            return False
        return True

    def with_room(self, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns; pages are evicted, a few at a time, for as long as it runs out of them.

        Raises what it raises when there is nothing left to evict. No transaction is open.
        """
        while True:
            try:
                return attempt()
            except (OutOfPagesError, PoolGrowthError) as error:
                short = max(1, error.needed - error.free) if isinstance(error, OutOfPagesError) else 1
                evictable = max((pool.allocator.cached_only for pool in self._session.pools), default=0)
                if short > evictable or not self.evict(short):
                    raise

    def evict(self, count: int) -> int:
        """Free ``count`` pages that nobody else holds, or what there is; returns how many. Not in a transaction."""
        freed = 0
        while freed < count and any(pool.allocator.cached_only for pool in self._session.pools):
            found, used = None, []
            for node in self.tree.oldest_first():
                if node.children:
                    continue
                if self._is_unused(node):
                    found = node
                    break
                used.append(node)
            for node in used:
                self.tree.touch(node)  # a request is using it
            if found is None:
                return freed + self._evict_behind_windows(count - freed)
            freed += self._drop(found, evicted=True)
        return freed

    def evict_prompt(self) -> bool:
        """Evict the least recently used prompt, up to where others branch off; False if nothing was stored."""
        with self._session.lock:
            node = next((node for node in self.tree.oldest_first() if not node.children), None)
            while node is not None and node.parent is not None and not node.children:
                parent = node.parent
                self._drop(node, evicted=True)
                node = parent
            return node is not None

    def holders(self) -> Iterator[tuple[int, int]]:
        """Cache group and page id of every page held, for the audit."""
        for node in self.tree.oldest_first():
            for group, page in enumerate(node.pages):
                if page >= 0:
                    yield group, page

    # Finding --------------------------------------------------------------------------------------------------------

    def _salt(self, max_kv_size: int | None) -> bytes:
        """What tells K/V apart that the same tokens have: weights, shapes, format, and a limit on what is attended."""
        key = self._fingerprint.digest(), max_kv_size
        salt = self._salts.get(key)
        if salt is None:
            text = f"{self._session.page_format} {max_kv_size}".encode()
            salt = self._salts[key] = hashlib.blake2b(key[0] + text, digest_size=16).digest()
        return salt

    def _find(self, tokens: Sequence[int], max_kv_size: int | None) -> tuple[Cut, int]:
        """Where a stored prompt can be continued, and how many tokens are stored in all; one token is left to run."""
        session, data = self._session, token_bytes(tokens[:-1])
        match = self.tree.match(self._salt(max_kv_size), data)
        retentions = session.retentions(max_kv_size)
        return best_cut(match, data, retentions, bool(session.stateful), self.tree.page_size), match.tokens

    def _share(self, row: PagedSequence, cut: Cut) -> None:
        for group, table in enumerate(row.tables):
            floor = cut.floors[group]
            total = len(cut.nodes)
            first = max(floor // table.page_size, min(table.kept_pages, total))
            kept = [node.pages[group] for node in cut.nodes[: min(table.kept_pages, total)]]
            pages = kept + [node.pages[group] for node in cut.nodes[first:]]
            self._session.pools[group].allocator.share(pages)
            table.open_at(floor, cut.tokens, pages)
        row.tokens = cut.tokens
        row.version += 1

    # Letting go -----------------------------------------------------------------------------------------------------

    def _is_unused(self, node: PrefixNode) -> bool:
        pools = self._session.pools
        return all(page < 0 or pools[group].allocator.ref_count(page) == 1 for group, page in enumerate(node.pages))

    def _evict_behind_windows(self, count: int) -> int:
        """Free pages of windowed groups alone: their nodes are in use, or interior, but not these pages."""
        freed = 0
        for node in self.tree.oldest_first():
            for group, page in enumerate(node.pages):
                pool = self._session.pools[group]
                if page >= 0 and pool.allocator.ref_count(page) == 1 and freed < count:
                    node.pages[group] = -1
                    freed += self._give_up(group, page, evicted=True)
        return freed

    def _drop(self, node: PrefixNode, evicted: bool = False) -> int:
        """Take out a node without children; returns how many of its pages are free now."""
        self._drop_states(node)
        self.tree.remove(node)
        pages = [(group, page) for group, page in enumerate(node.pages) if page >= 0]
        return sum(self._give_up(group, page, evicted) for group, page in pages)

    def _give_up(self, group: int, page: int, evicted: bool) -> bool:
        pool = self._session.pools[group]
        freed = pool.allocator.unkeep(page)
        if evicted:
            self.counts.evicted += 1
            self._session.emit("tinykv_page_evicted", PageEvicted(pool.name, page))
        return freed

    # Layers without pages -------------------------------------------------------------------------------------------

    def _store_states(self, node: PrefixNode, states: States) -> None:
        kept = {index: copy.deepcopy(states[index]) for index in self._session.stateful}
        size = sum(leaf.nbytes for leaf in kept.values())
        self._drop_states(node)
        if size > self._state_limit:
            return
        while self._state_bytes + size > self._state_limit:
            self._drop_states(next(iter(self._states)))
        node.state, node.state_bytes = kept, size
        self._states[node] = None
        self._state_bytes += size

    def _drop_states(self, node: PrefixNode) -> None:
        if node.state is not None:
            del self._states[node]
            self._state_bytes -= node.state_bytes
            node.state, node.state_bytes = None, 0


def _row(cache: Sequence[Any]) -> PagedSequence | None:
    return next((leaf._row for leaf in layout.leaves(cache) if isinstance(leaf, PagedKVCache)), None)
