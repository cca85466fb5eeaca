"""Retention: which tokens of a sequence its pages must keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError
from .group_info import OPEN

KEPT_TOKENS = 4
"""Tokens at the start that a size limit keeps, as mlx-lm's make_prompt_cache does."""


@dataclass(frozen=True)
class Retention:
    """Which tokens of a sequence can still be read.

    ``window``: a query looks back on that many tokens, itself included (None: on all). ``keep``: the first tokens
    stay whatever the window says. ``rewind``: tokens kept behind the window, so that a trim finds them.

    ``page``: of an open group, where only the tokens of a query's own page of so many are read (0: no such group), and
    by queries before position ``start`` all. Where a trim ends in pages that were dropped, these are made again from
    what other groups hold.
    """

    window: int | None = None
    keep: int = 0
    rewind: int = 0
    page: int = 0
    start: int = 0

    def first_needed(self, tokens: int) -> int:
        """The oldest position (after the kept ones) that the token at position ``tokens`` can read."""
        if self.page:
            return 0 if tokens < self.start else tokens - tokens % self.page
        return 0 if self.window is None else max(0, tokens - max(1, self.window - self.keep) + 1)

    def first_kept(self, tokens: int) -> int:
        """The oldest position (after the kept ones) that is still there when the next token's is ``tokens``.

        What the last token has read is there in any case: a pass that breaks off leaves what a file would have.
        """
        return self.first_needed(max(0, tokens - (self.rewind if self.window is None else max(1, self.rewind))))


def retentions(
    groups: Mapping[str, int | None], max_kv_size: int | None, rewind: int, page_size: int, start: int
) -> list[Retention]:
    """What a request keeps in each of ``groups``, which have a name and a window.

    mlx-lm's size limit keeps the first :data:`KEPT_TOKENS` tokens. Raises ConfigError if it allows no more.
    """
    if max_kv_size and max_kv_size <= KEPT_TOKENS:
        raise ConfigError(
            "max_kv_size", f"{max_kv_size} is not allowed: more than the {KEPT_TOKENS} tokens always kept are needed"
        )
    found = []
    for name, window in groups.items():
        if name == OPEN:
            found.append(Retention(rewind=rewind, page=page_size, start=start))
        elif window is not None:
            found.append(Retention(window, 0, rewind))
        else:
            found.append(Retention(max_kv_size, KEPT_TOKENS, rewind) if max_kv_size else Retention())
    return found
