"""PrefixIndex: the stored pages, who holds them, and which go first."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from .errors import CacheStateError
from .hookspecs import PageEvicted
from .prefix_tree import TOKEN_BYTES, PrefixNode, PrefixTree, token_bytes

if TYPE_CHECKING:
    from .sequence import PagedSequence
    from .session import PagedSession

log = logging.getLogger("tinykv")

# Caches of layers that have no pages, by their place among the leaves.
States = Mapping[int, Any]


class PrefixIndex:
    """The prefix tree of a session, with one hold on each page it lists.

    The session's lock is held in all calls, and no transaction is open. ``evicted`` counts pages that gave way,
    ``evicted_tokens`` tokens; ``on_evict`` is called with a node before it is evicted.
    """

    def __init__(self, session: PagedSession, state_bytes: int) -> None:
        self.tree = PrefixTree(session.page_size)
        self.evicted = self.evicted_tokens = 0
        self.on_evict: Callable[[PrefixNode], None] | None = None
        self._session = session
        # Nodes that have what layers without pages held, the oldest first.
        self._states: OrderedDict[PrefixNode, None] = OrderedDict()
        self._state_bytes = 0
        self._state_limit = state_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pages, and of what layers without pages held."""
        return self._state_bytes + sum(pool.allocator.kept * pool.page_bytes for pool in self._session.pools)

    @property
    def evictable_bytes(self) -> int:
        """Bytes of pages that nobody else holds."""
        return sum(pool.allocator.cached_only * pool.page_bytes for pool in self._session.pools)

    def keep(self, salt: bytes, tokens: Sequence[int], row: PagedSequence, states: States, tail: bool) -> int:
        """Hold the pages of ``row``, which have ``tokens``; ``states`` has the caches of layers without pages.

        Without ``tail`` only full pages: a page that is shared is copied when it is written next. No pass is under
        way. Returns how many tokens are stored. Raises CacheStateError, with nothing changed, if the pages are stored
        for other tokens.
        """
        count = min(len(tokens), row.exact_tokens)
        size, step = self.tree.page_size, self.tree.page_size * TOKEN_BYTES
        if not tail:
            count -= count % size
        if not count:
            return 0
        # Of recurrent layers only the present is known, not what they held at an earlier token.
        stateful = bool(self._session.stateful)
        exact = stateful and count == row.tokens and not row.broken
        node = self.tree.root(salt)
        data = token_bytes(tokens[:count])
        added: list[PrefixNode] = []
        # An open page has what all other groups have.
        filled = max(table.floor for table in row.tables) if row.tables else 0
        floors = [filled if table.retention.page else table.floor for table in row.tables]
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
                if self._is_kept(row, logical):
                    for each in reversed(added):
                        self._drop(each)
                    raise CacheStateError(
                        "the cache is stored already, for other tokens; store a prompt with the tokens that were run"
                    )
                child = self.tree.add(node, key, [-1] * len(row.tables))
                added.append(child)
            for group, table in enumerate(row.tables):
                if table.retention.page and len(key) == step and (logical + 1) * size > table.retention.start:
                    continue  # nobody continues inside a full page
                if table.retention.page and row.rounded_from is not None:
                    continue
                if logical >= table.kept_pages and logical * size < floors[group]:
                    continue  # not whole
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
        return count

    def _is_kept(self, row: PagedSequence, logical: int) -> bool:
        """Whether a page of ``row`` is stored in some group."""
        pages = [(group, table.pages[logical]) for group, table in enumerate(row.tables)]
        return any(page >= 0 and self._session.pools[group].allocator.is_kept(page) for group, page in pages)

    def keep_states(self, salt: bytes, tokens: Sequence[int], states: States) -> None:
        """Hold what layers without pages had after ``tokens``, if the pages of these are held."""
        data = token_bytes(tokens)
        match = self.tree.match(salt, data)
        if match.path and match.tokens == len(tokens) and match.tail == match.path[-1].count:
            self._store_states(match.path[-1], states)

    def evict(self, count: int) -> int:
        """Free ``count`` pages that nobody else holds, or what there is; returns how many."""
        freed = self._evict(count)
        if freed:
            log.info("cached pages evicted: %d", freed)
        return freed

    def _evict(self, count: int) -> int:
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

    def let_go(self, pages: Iterable[tuple[int, int]]) -> bool:
        """Give up these pages (cache group and id), and what comes after them in prompts; False if none are held.

        Whoever else holds such a page may then write to it and needs no copy.
        """
        wanted = set(pages)
        held = [
            node
            for node in self.tree.oldest_first()
            if any((group, page) in wanted for group, page in enumerate(node.pages))
        ]
        gone = {id(node): node for top in held for node in self.tree.below(top)}
        for node in gone.values():
            self._drop(node, evicted=True)
        return bool(held)

    def evict_prompt(self) -> bool:
        """Evict the least recently used prompt, up to where others branch off; False if nothing was stored."""
        node = next((node for node in self.tree.oldest_first() if not node.children), None)
        while node is not None and node.parent is not None and not node.children:
            parent = node.parent
            self._drop(node, evicted=True)
            node = parent
        return node is not None

    def clear(self) -> None:
        """Give everything up."""
        for node in list(self.tree.oldest_first()):
            self._drop(node)

    def holders(self) -> Iterator[tuple[int, int]]:
        """Cache group and page id of every page held, for the audit."""
        for node in self.tree.oldest_first():
            for group, page in enumerate(node.pages):
                if page >= 0:
                    yield group, page

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
                    if self.on_evict is not None:
                        self.on_evict(node)
                    node.pages[group] = -1
                    freed += self._give_up(group, page, evicted=True)
        return freed

    def _drop(self, node: PrefixNode, evicted: bool = False) -> int:
        """Take out a node without children; returns how many of its pages are free now."""
        if evicted:
            self.evicted_tokens += node.count
            if self.on_evict is not None:
                self.on_evict(node)
        self._drop_states(node)
        self.tree.remove(node)
        pages = [(group, page) for group, page in enumerate(node.pages) if page >= 0]
        return sum(self._give_up(group, page, evicted) for group, page in pages)

    def _give_up(self, group: int, page: int, evicted: bool) -> bool:
        pool = self._session.pools[group]
        freed = pool.allocator.unkeep(page)
        if evicted:
            self.evicted += 1
            self._session.emit("tinykv_page_evicted", PageEvicted(pool.name, page))
        return freed

    # Layers without pages -------------------------------------------------------------------------------------------

    def _store_states(self, node: PrefixNode, states: States) -> None:
        kept = {index: copy.deepcopy(states[index]) for index in self._session.stateful}
        for leaf in kept.values():
            if isinstance(leaf, ArraysCache):
                # A row of a batch would keep the whole batch's arrays.
                leaf.state = tree_map(_own_copy, leaf.state)
        size = sum(leaf.nbytes for leaf in kept.values())
        self._drop_states(node)
        if size > self._state_limit:
            self._prune(node)
            return
        mx.eval([leaf.state for leaf in kept.values()])  # so that any thread can take them over
        node.state, node.state_bytes = kept, size
        self._states[node] = None
        self._state_bytes += size
        while self._state_bytes > self._state_limit:
            oldest = next(iter(self._states))
            if self.on_evict is not None:
                self.on_evict(oldest)
            self._drop_states(oldest)
            self._prune(oldest, evicted=True)

    def _prune(self, node: PrefixNode, evicted: bool = False) -> None:
        """Take out a node that has nothing to offer any more, and its ancestors like it; of these it tells, if asked.

        Without its ancestors, what was evicted would not be found again on disk.
        """
        leaf = node
        if evicted and not node.children and max(node.pages, default=-1) < 0:
            self.evicted_tokens += node.count
        while node.parent is not None and not node.children and node.state is None and max(node.pages, default=-1) < 0:
            parent = node.parent
            self._drop(node, evicted and node is not leaf)
            node = parent

    def _drop_states(self, node: PrefixNode) -> None:
        if node.state is not None:
            del self._states[node]
            self._state_bytes -= node.state_bytes
            node.state, node.state_bytes = None, 0


def _own_copy(item: Any) -> Any:
    return mx.stack([item])[0] if isinstance(item, mx.array) else item
