"""PrefixDisk: moves pages of stored prompts between the pools and a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .compaction import provide_room
from .group_info import OPEN
from .metadata import PagedKVMetadata
from .page_index import StoredPage
from .pool import allocate_each
from .prefix_cut import Cut
from .prefix_store import PrefixStore
from .prefix_tree import TOKEN_BYTES, Match, PrefixNode, page_hash
from .step import GroupStep

if TYPE_CHECKING:
    from .sequence import PagedSequence
    from .session import PagedSession


class PrefixDisk:
    """What a prefix cache does with its folder. The session's lock is held in all calls, no transaction is open.

    ``stored_tokens`` is how many tokens the last :meth:`load` brought.
    """

    def __init__(self, session: PagedSession, store: PrefixStore) -> None:
        self.store = store
        self.stored_tokens = 0
        self._session = session

    def extend(self, match: Match, tokens: bytes) -> Match:
        """``match`` and what the folder has after its full pages, if that is longer."""
        size = self._session.page_size
        step = size * TOKEN_BYTES
        path: list[Any] = match.path[: match.tokens // size]
        key = path[-1].hash if path else match.root.hash
        while len(part := tokens[len(path) * step : (len(path) + 1) * step]) == step:
            key = page_hash(key, part)
            found = self.store.find(key, part)
            if found is None:
                break
            path.append(found)
        if len(path) * size > match.tokens:
            match = Match(match.root, path, len(path) * size, size)
        return replace(match, ends=self._partial_pages([match.root.hash, *(page.hash for page in path)]))

    def _partial_pages(self, parents: Sequence[bytes]) -> dict[int, list[StoredPage]]:
        """The partial pages there are behind each of ``parents``: only recurrent layers need such an end."""
        found: dict[int, list[StoredPage]] = {}
        depths = {key: depth for depth, key in enumerate(parents)}
        for parent, page in self.store.partial_pages(parents) if self._session.stateful else ():
            found.setdefault(depths[parent], []).append(page)
        return found

    def stored(self, cut: Cut) -> bool:
        """Whether any page of ``cut`` is only on disk."""
        return any(isinstance(node, StoredPage) for node in cut.nodes)

    def load(self, cut: Cut, row: PagedSequence, with_room: Callable[[Callable[[], object]], object]) -> Cut | None:
        """Fill an empty sequence with the pages of ``cut``; returns it with its states.

        None, with nothing changed, if a file can't be read or there is no room beside what is in use.
        """
        session, pools, journal = self._session, self._session.pools, self._session.journal
        first = next(index for index, node in enumerate(cut.nodes) if isinstance(node, StoredPage))
        held = [cut.held(group, table) for group, table in enumerate(row.tables)]
        wanted = {logical for group in held for logical in group if logical >= first}
        files: dict[int, Any] = {logical: self.store.load(cut.nodes[logical]) for logical in sorted(wanted)}
        last = cut.nodes[-1]
        states = self._load_states(last) if isinstance(last, StoredPage) and session.stateful else cut.states or {}
        if any(file is None or not self._fits(file) for file in files.values()) or states is None:
            return None
        # What is in memory is held by a request, so that it isn't evicted to make room, and is followed if it moves.
        holding = session.new_sequence(None)
        for group, table in enumerate(holding.tables):
            pages = [cut.nodes[logical].pages[group] for logical in held[group] if logical < first]
            pools[group].allocator.share(pages)
            table.append(pages)
        needed = [len(logicals) - len(table.pages) for logicals, table in zip(held, holding.tables, strict=True)]
        savepoint = None
        try:
            with_room(lambda: provide_room(pools, needed))
            savepoint = journal.savepoint()
            fresh = allocate_each(pools, needed)
            for group, table in enumerate(row.tables):
                table.open_at(cut.floors[group], cut.tokens, [*holding.tables[group].pages, *fresh[group]])
                self._write(row, group, [logical for logical in held[group] if logical >= first], files)
        except Exception:
            if savepoint is not None:
                journal.rollback(savepoint)
            for table in holding.tables:
                table.truncate(0)
            return None
        journal.commit(savepoint)
        for table in holding.tables:
            table.hand_over()
        row.tokens = cut.tokens
        row.version += 1
        mx.eval([layer.state() for pool in pools for layer in pool.layers.values()])
        self.stored_tokens = cut.tokens - first * session.page_size
        self.store.touch(dict.fromkeys((node.hash for node in cut.nodes), time.time()))
        return Cut(cut.tokens, cut.nodes, cut.floors, states, cut.reason)

    def save(self, node: PrefixNode, wait: bool = False) -> None:
        """Write a page in the background; a partial one is worth a file only with what layers without pages held.

        With ``wait`` only if the page before it is there too. What gives way in memory goes end first, and the rest is
        still to come.
        """
        partial = node.count < self._session.page_size
        if partial and node.state is None:
            return
        depth, parent = 0, node.parent
        while parent is not None:
            depth, parent = depth + 1, parent.parent
        states = None if node.state is None else [node.state[index] for index in self._session.stateful]
        groups = [page >= 0 for page in node.pages]
        assert node.parent is not None, "a root is no page"
        after = node.parent.hash if wait and node.parent.parent is not None else None
        self.store.save(
            node.hash,
            node.tokens,
            depth,
            groups,
            lambda: self._read(node),
            states,
            node.used,
            wait,
            after,
            node.parent.hash if partial else None,
        )

    def flush(self, nodes: Sequence[PrefixNode]) -> None:
        """Write all of these, the first ones first should there be no room for all."""
        # What is there already, and was used since, is not to give way to the others.
        self.store.touch({node.hash: node.used for node in nodes}, wait=True)
        for node in nodes:
            self.save(node, wait=True)

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        self.store.close()

    def _read(self, node: PrefixNode) -> dict[str, mx.array]:
        """Copies of a page's K and V in every layer, evaluated."""
        arrays: dict[str, mx.array] = {}
        for pool, page in zip(self._session.pools, node.pages, strict=True):
            for index, pages in pool.layers.items():
                if page >= 0 and pages.keys is not None:
                    names = _names(index, pool.name == OPEN)
                    arrays.update(zip(names, pages.read_page(page), strict=True))
        mx.eval(arrays)
        return arrays

    def _fits(self, file: dict[str, mx.array]) -> bool:
        """Whether a file's pages have the shapes and dtypes of this model's."""
        for layer in self._session.layers:
            if layer.spec is not None:
                for opened, spec in ((False, layer.spec), (True, layer.spec.unpacked)):
                    keys, values = (file.get(name) for name in _names(layer.index, opened))
                    if keys is None or values is None:
                        continue
                    if keys.ndim != 4 or values.ndim != 4 or keys.shape[2] != self._session.page_size:
                        return False
                    held = [(side.shape[1], side.shape[3], side.dtype) for side in (keys, values)]
                    if held != [(spec.kv_heads, *stored) for stored in spec.stored]:
                        return False
        return True

    def _write(self, row: PagedSequence, group: int, logicals: Sequence[int], files: dict[int, Any]) -> None:
        """Put stored pages into those of a sequence; runs of them at once."""
        session, size = self._session, self._session.page_size
        start = 0
        for end in range(1, len(logicals) + 1):
            if end < len(logicals) and logicals[end] == logicals[end - 1] + 1:
                continue
            run, start = logicals[start:end], end
            stop, count = (run[-1] + 1) * size, len(run) * size
            step = GroupStep([row.tables[group]], [stop], [count], count)
            for index, pages in session.pools[group].layers.items():
                keys, values = (
                    mx.concatenate([files[logical][name] for logical in run], axis=2)
                    for name in _names(index, session.pools[group].name == OPEN)
                )
                session.writer.write(PagedKVMetadata(pages, step), keys, values)

    def states(self, cut: Cut) -> Iterator[tuple[int, dict[int, Any]]]:
        """What layers without pages held at earlier places in the stored pages of ``cut``, by the tokens before them.

        Once the pages are in memory, nobody would look for it on disk.
        """
        for logical, node in enumerate(cut.nodes[:-1]):
            if isinstance(node, StoredPage) and node.state is not None:
                states = self._load_states(node)
                if states is not None:
                    yield (logical + 1) * self._session.page_size, states

    def _load_states(self, node: StoredPage) -> dict[int, Any] | None:
        states = self.store.load_state(node)
        if states is None or len(states) != len(self._session.stateful):
            return None
        return dict(zip(self._session.stateful, states, strict=True))


def _names(index: int, opened: bool) -> tuple[str, str]:
    """The names of a layer's K and V in a file; those of an open page are apart."""
    layer = f"{index}.open" if opened else f"{index}"
    return f"{layer}.keys", f"{layer}.values"
