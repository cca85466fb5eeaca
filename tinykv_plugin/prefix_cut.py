"""Where a stored prompt can be continued: the longest beginning whose every layer is still whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .prefix_tree import TOKEN_BYTES, Match, PrefixNode
from .retention import Retention
from .table import PageTable

WINDOW = "a window has dropped what is behind it"
PAGE = "the page in which it ends was not kept in the model's dtype"
STATE = "the state of recurrent layers was not stored there"


@dataclass(frozen=True)
class Cut:
    """The first ``tokens`` tokens, in the pages of ``nodes``; the last page may hold more than is used.

    ``floors`` is the first position that each cache group has pages for, ``states`` what layers without pages held
    there. ``reason`` says why it isn't longer than it is, if more was stored.
    """

    tokens: int = 0
    nodes: Sequence[Any] = ()
    floors: Sequence[int] = ()
    states: Any = None
    reason: str = field(default="", compare=False)

    def held(self, group: int, table: PageTable) -> list[int]:
        """The logical pages of ``group`` that a sequence cut here holds."""
        total = len(self.nodes)
        kept = min(table.kept_pages, total)
        return [*range(kept), *range(max(kept, self.floors[group] // table.page_size), total)]


def best_cut(match: Match, tokens: bytes, retentions: Sequence[Retention], stateful: bool, page_size: int) -> Cut:
    """The longest usable part of ``match``, which is of the prompt ``tokens``.

    ``retentions`` are the cache groups'. With ``stateful`` layers only the ends of stored prompts will do.
    """
    reason = ""
    if stateful:
        for count, nodes in _ends_with_state(match, tokens, page_size):
            if _Gaps(nodes, retentions, page_size).before(count) is None:
                return Cut(count, nodes, _floors(nodes, count, retentions, page_size), nodes[-1].state, STATE)
        return Cut(reason=STATE)
    count, gaps = match.tokens, _Gaps(match.path, retentions, page_size)
    while count:
        missing = gaps.before(count)
        if missing is None:
            nodes = match.path[: -(-count // page_size)]
            return Cut(count, nodes, _floors(nodes, count, retentions, page_size), None, reason)
        page, group = missing
        reason = PAGE if retentions[group].page else WINDOW
        count = page * page_size
    return Cut(reason=reason)


def _ends_with_state(match: Match, tokens: bytes, page_size: int) -> Iterator[tuple[int, list[PrefixNode]]]:
    """Ends of stored prompts that ``tokens`` begin with and whose state was kept, the longest first."""
    step = page_size * TOKEN_BYTES
    for depth in reversed(range(len(match.path) + 1)):
        parent = match.path[depth - 1] if depth else match.root
        rest = tokens[depth * step : (depth + 1) * step]
        below = [*parent.children.values(), *match.path[depth : depth + 1], *match.ends.get(depth, ())]
        ends = {id(child): child for child in below}
        usable = [child for child in ends.values() if child.state is not None and rest.startswith(child.tokens)]
        for child in sorted(usable, key=lambda node: node.count, reverse=True):
            yield depth * page_size + child.count, [*match.path[:depth], child]


class _Gaps:
    """Where pages are missing in each cache group, looked up in constant time."""

    def __init__(self, nodes: Sequence[Any], retentions: Sequence[Retention], page_size: int) -> None:
        self._retentions = retentions
        self._size = page_size
        pages = np.array([node.pages for node in nodes], dtype=np.int64).reshape(len(nodes), len(retentions))
        missing = np.where(pages < 0, np.arange(len(nodes))[:, None], -1)
        # The last missing page up to each one.
        self._last = np.maximum.accumulate(missing, axis=0)

    def before(self, count: int) -> tuple[int, int] | None:
        """The highest page that the token at position ``count`` would need but that isn't there, and its cache group.

        None: all are there.
        """
        total = -(-count // self._size)
        found = (-1, 0)
        for group, retention in enumerate(self._retentions):
            kept = min(total, -(-retention.keep // self._size))
            if kept:
                found = max(found, (int(self._last[kept - 1, group]), group))
            last = int(self._last[total - 1, group])
            if last >= max(kept, retention.first_needed(count) // self._size):
                found = max(found, (last, group))
        return found if found[0] >= 0 else None


def _floors(nodes: Sequence[PrefixNode], count: int, retentions: Sequence[Retention], page_size: int) -> list[int]:
    """The first position of each group from which on all pages are there."""
    floors = []
    for group, retention in enumerate(retentions):
        kept = min(len(nodes), -(-retention.keep // page_size))
        first = min(len(nodes), max(kept, retention.first_needed(count) // page_size))
        while first > kept and nodes[first - 1].pages[group] >= 0:
            first -= 1
        floors.append(first * page_size if first > kept else 0)
    return floors
