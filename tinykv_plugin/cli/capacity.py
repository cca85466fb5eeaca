"""What fits a page budget, and what mlx-lm's own caches would take for the same: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STOCK_STEP = 256
"""mlx-lm's KVCache grows by this many tokens."""


@dataclass(frozen=True)
class GroupSize:
    """One cache group. ``page_bytes`` of one page over all its layers, ``page_limit`` of its pages by the budget.

    ``held`` tokens are kept of a long sequence: those of the window and those kept for a rewind (None: all).
    ``model_token_bytes`` is what a token takes in the model's own dtype (None: as in the pages). An ``open`` group has
    tokens that other groups have too.
    """

    window: int | None
    held: int | None
    page_size: int
    page_bytes: int
    page_limit: int
    model_token_bytes: int | None = None
    open: bool = False

    @property
    def token_bytes(self) -> float:
        """Bytes of a token over all layers of the group."""
        return 0 if self.open else self.page_bytes / self.page_size

    def pages(self, tokens: int) -> int:
        """Pages that a request of ``tokens`` tokens holds while it generates."""
        pages = -(-tokens // self.page_size)
        # Where a window starts and ends inside a page it touches one page more.
        return pages if self.held is None else min(pages, -(-self.held // self.page_size) + 1)

    def stock_bytes(self, tokens: int) -> float:
        """Bytes that mlx-lm's KVCache, or RotatingKVCache for a window, holds for these layers."""
        if self.open:
            return 0
        stepped = -(-tokens // STOCK_STEP) * STOCK_STEP
        token_bytes = self.token_bytes if self.model_token_bytes is None else self.model_token_bytes
        return token_bytes * (stepped if self.window is None else min(stepped, self.window))


def request_bytes(groups: Sequence[GroupSize], tokens: int) -> int:
    """Bytes of all pages of a request of ``tokens`` tokens."""
    return sum(group.pages(tokens) * group.page_bytes for group in groups)


def stock_request_bytes(groups: Sequence[GroupSize], tokens: int) -> int:
    """Bytes mlx-lm's own caches hold for a request of ``tokens`` tokens."""
    return int(sum(group.stock_bytes(tokens) for group in groups))


def requests_that_fit(groups: Sequence[GroupSize], budget: int, tokens: int) -> int:
    """How many requests of ``tokens`` tokens the budget and the groups' limits allow at once."""
    by_limit = min(group.page_limit // group.pages(tokens) for group in groups)
    return min(by_limit, budget // request_bytes(groups, tokens))


def longest_request(groups: Sequence[GroupSize], budget: int) -> int | None:
    """Tokens of the longest single request that fits, None if its layers all have a window (it never ends)."""
    growing = [group for group in groups if group.held is None]
    fixed = [group for group in groups if group.held is not None]
    if not growing:
        return None
    # The windows are full long before the budget is.
    left = budget - sum(group.pages(2**62) * group.page_bytes for group in fixed)
    pages = min(group.page_limit for group in growing)
    pages = min(pages, max(0, left) // sum(group.page_bytes for group in growing))
    return pages * growing[0].page_size
