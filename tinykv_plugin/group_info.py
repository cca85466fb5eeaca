"""GroupInfo: a cache group, as others may know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool import PagePool

OPEN = "open"
"""The name of the cache group in which tokens are in the model's dtype until their page is full; the last one."""


@dataclass(frozen=True)
class GroupInfo:
    """A cache group. ``page_bytes`` is one page over all of its ``layers``; ``page_limit`` what the budget allows.

    ``model_token_bytes`` is what a token's K/V would take in the model's own dtype. An ``open`` group has the same
    tokens as others, once more in the model's dtype, until their page is full.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    page_bytes: int
    page_size: int
    page_limit: int
    model_token_bytes: int
    open: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token of a long request takes."""
        return 0 if self.open else self.page_bytes // self.page_size

    @classmethod
    def of(cls, pool: PagePool, window: int | None) -> GroupInfo:
        """What there is to know about the group that has its pages in ``pool``."""
        return cls(
            pool.name,
            tuple(pool.layers),
            window,
            pool.page_bytes,
            pool.page_size,
            pool.limit,
            pool.model_token_bytes,
            pool.name == OPEN,
        )
