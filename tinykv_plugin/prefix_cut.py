"""Where a stored prompt can be continued: the longest beginning whose every layer is still whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .prefix_tree import TOKEN_BYTES, Match, PrefixNode
from .table import PageTable, Retention

WINDOW = "a window has dropped what is behind it"
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
            if _first_missing(nodes, count, retentions, page_size) is None:
                return Cut(count, nodes, _floors(nodes, count, retentions, page_size), nodes[-1].state, STATE)
        return Cut(reason=STATE)
    count = match.tokens
    while count:
        nodes = match.path[: -(-count // page_size)]
        missing = _first_missing(nodes, count, retentions, page_size)
        if missing is None:
            return Cut(count, nodes, _floors(nodes, count, retentions, page_size), None, reason)
        reason = WINDOW
        count = missing * page_size
    return Cut(reason=reason)


def _ends_with_state(match: Match, tokens: bytes, page_size: int) -> Iterator[tuple[int, list[PrefixNode]]]:
    """Ends of stored prompts that ``tokens`` begin with and whose state was kept, the longest first."""
    step = page_size * TOKEN_BYTES
    for depth in reversed(range(len(match.path) + 1)):
        parent = match.path[depth - 1] if depth else match.root
        rest = tokens[depth * step : (depth + 1) * step]
        ends = {id(child): child for child in [*parent.children.values(), *match.path[depth : depth + 1]]}
        usable = [child for child in ends.values() if child.state is not None and rest.startswith(child.tokens)]
        for child in sorted(usable, key=lambda node: node.count, reverse=True):
            yield depth * page_size + child.count, [*match.path[:depth], child]


def _first_missing(
    nodes: Sequence[PrefixNode], count: int, retentions: Sequence[Retention], page_size: int
) -> int | None:
    """The highest logical page that the token at position ``count`` would need but that isn't there; None: all are."""
    missing = [
        logical
        for group, retention in enumerate(retentions)
        for logical in _needed(len(nodes), count, retention, page_size)
        if nodes[logical].pages[group] < 0
    ]
    return max(missing, default=None)


def _needed(total: int, count: int, retention: Retention, page_size: int) -> list[int]:
    kept = min(total, -(-retention.keep // page_size))
    return [*range(kept), *range(max(kept, retention.first_needed(count) // page_size), total)]


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
