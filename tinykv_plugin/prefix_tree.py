"""PrefixTree: full pages (and last, partial ones) found again by the tokens that led to them."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Token ids are below 2^31, but mlx-lm's server puts larger ids of images in their places.
TOKEN_BYTES = 8
HASH_BYTES = 16


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as int64 bytes: what pages are keyed by."""
    return np.asarray(tokens, dtype=np.int64).tobytes()


def page_hash(parent: bytes, tokens: bytes) -> bytes:
    """The hash of a page: of its tokens, and through its parent's hash of everything before it."""
    return hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


class PrefixNode:
    """One logical page of a stored prompt.

    ``tokens`` are its own as bytes, fewer than a page holds only at the end of a prompt. ``pages`` has its page id in
    each cache group, -1 where a window had dropped it. ``state`` is what layers that have no pages held after exactly
    these tokens (None: not kept), ``state_bytes`` its size; ``used`` is when it was used last (seconds,
    as ``time.time``). A root stands for one model and format: its ``hash`` salts those of all pages below.
    """

    __slots__ = ("children", "hash", "pages", "parent", "state", "state_bytes", "tokens", "used")

    def __init__(self, parent: PrefixNode | None, tokens: bytes, pages: list[int], salt: bytes = b"") -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, PrefixNode] = {}
        self.state: Any = None
        self.state_bytes = 0
        self.used = time.time()
        self.hash: bytes = salt if parent is None else page_hash(parent.hash, tokens)

    @property
    def count(self) -> int:
        """Tokens in this page."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True)
class Match:
    """The stored pages that begin a prompt: all but the last match whole, of the last ``tail`` tokens do.

    ``tokens`` is how many tokens they have in common. ``ends`` are partial pages that aren't in the tree, by the number
    of pages of the path before them.
    """

    root: PrefixNode
    path: list[PrefixNode]
    tokens: int
    tail: int
    ends: Mapping[int, Sequence[Any]] = field(default_factory=dict)


class PrefixTree:
    """Pages by what they hold and what came before, in order of use.

    A page is looked up by its tokens themselves below its parent, so no hash collision can mix up texts. Of two
    related nodes the ancestor always counts as used later, so the least recently used node has no children.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.leaves = 0
        self._step = page_size * TOKEN_BYTES
        self._roots: dict[bytes, PrefixNode] = {}
        self._order: OrderedDict[PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def oldest_first(self) -> Iterator[PrefixNode]:
        """All nodes, the least recently used first; not to be changed meanwhile."""
        return iter(self._order)

    def newest_first(self) -> Iterator[PrefixNode]:
        """All nodes, the most recently used first and so ancestors before their descendants."""
        return reversed(self._order)

    def root(self, salt: bytes) -> PrefixNode:
        """The root of all prompts with ``salt``."""
        found = self._roots.get(salt)
        if found is None:
            found = self._roots[salt] = PrefixNode(None, b"", [], salt)
        return found

    def match(self, salt: bytes, tokens: bytes) -> Match:
        """The longest stored beginning of ``tokens`` (as :func:`token_bytes` gives them)."""
        root = node = self.root(salt)
        path: list[PrefixNode] = []
        position = 0
        while (child := node.children.get(tokens[position : position + self._step])) is not None:
            path.append(child)
            node = child
            position += len(child.tokens)
            if len(child.tokens) < self._step:
                break
        tail = node.count if path else 0
        rest = tokens[position : position + self._step]
        common, best = 0, None
        for key, child in node.children.items():
            if key[:TOKEN_BYTES] == rest[:TOKEN_BYTES] and (length := _common_tokens(key, rest)) > common:
                common, best = length, child
        if best is not None:
            path.append(best)
            tail = common
        return Match(root, path, position // TOKEN_BYTES + common, tail)

    def add(self, parent: PrefixNode, tokens: bytes, pages: list[int]) -> PrefixNode:
        """A new node; once it has its descendants, :meth:`touch` puts it and its ancestors in order."""
        assert tokens not in parent.children
        assert parent.parent is None or len(parent.tokens) == self._step, "a partial page is the end of a prompt"
        node = PrefixNode(parent, tokens, pages)
        if parent.parent is None or parent.children:
            self.leaves += 1
        parent.children[tokens] = node
        self._order[node] = None
        return node

    def touch(self, node: PrefixNode) -> None:
        """Note that a node, and with it its ancestors, is used."""
        order, now = self._order, time.time()
        while node.parent is not None:
            order[node] = None
            order.move_to_end(node)
            node.used = now
            node = node.parent

    def remove(self, node: PrefixNode) -> None:
        """Take out a node without children."""
        assert not node.children
        assert node.parent is not None
        parent = node.parent
        del parent.children[node.tokens]
        del self._order[node]
        if parent.children or parent.parent is None:
            self.leaves -= 1

    def below(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """``node`` and all its descendants, children before their parents."""
        found = [node]
        for each in found:
            found += each.children.values()
        return reversed(found)

    def partial_prefix(self, parent: PrefixNode, tokens: bytes) -> PrefixNode | None:
        """A partial page below ``parent`` that ``tokens`` begin with: the page of ``tokens`` stands in for it."""
        return next(
            (
                child
                for key, child in parent.children.items()
                if len(key) < min(self._step, len(tokens)) and tokens.startswith(key)
            ),
            None,
        )


def _common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two keys have in common from the start."""
    count = min(len(first), len(second)) // TOKEN_BYTES
    one, two = (np.frombuffer(key, dtype=np.int64, count=count) for key in (first, second))
    different = np.flatnonzero(one != two)
    return int(different[0]) if different.size else count
