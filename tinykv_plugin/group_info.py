"""GroupInfo: a cache group, as others may know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool import PagePool


@dataclass(frozen=True)
class GroupInfo:
    """A cache group. ``page_bytes`` is one page over all of its ``layers``; ``page_limit`` what the budget allows.

    ``model_token_bytes`` is what a token's K/V would take in the model's own dtype.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    page_bytes: int
    page_size: int
    page_limit: int
    model_token_bytes: int

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
        )
