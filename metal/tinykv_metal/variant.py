"""Variant: the template constants of an attention kernel, chosen by shape alone."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

# Tokens of a part. Fixed, so that a row's sums are formed alike alone, in any batch and on any device.
PART = 512
# Simdgroups of a threadgroup, and tokens that one of them takes at a time at most; these must lie in one page.
SIMDGROUPS = 8
MOST_TOKENS = 4
# Floats that a lane may keep: an Apple GPU has registers for 128 a thread, and addresses take some, too.
LANE_FLOATS = 112
# Floats of threadgroup memory for a tile of tokens, where several sets of simdgroups read them: half of what there is.
TILE_FLOATS = 4096
MOST_QUERIES = 8
MOST_DIM = 576
DIM_STEP = 8
PAGE_STEP = MOST_TOKENS
THREADS = 32 * SIMDGROUPS


def lane_size(dim: int) -> int:
    """Elements of a head that one lane holds; ``lane_size`` of common.metal."""
    run = 4 if dim % 128 == 0 else 2 if dim % 64 == 0 else 1
    return math.ceil(dim / (32 * run)) * run


@dataclass(frozen=True)
class Division:
    """How the query vectors of a K/V head are divided.

    Each of ``passes`` threadgroups, which all read the head's K and V, has ``sets`` sets of simdgroups, which read them
    together, and each set ``size`` vectors. A simdgroup takes ``tokens`` tokens at a time, a threadgroup ``tile``.
    """

    passes: int
    sets: int
    size: int
    tokens: int
    tile: int


@dataclass(frozen=True)
class Variant:
    """What an attention call needs of a kernel, as far as it is compiled in.

    ``mask``: 0 none, 1 boolean, 2 added. ``open``: the tokens of a query's own page are read from other pages.
    """

    key_dim: int
    value_dim: int
    page_size: int
    group: int
    queries: int
    causal: bool = False
    window: bool = False
    sinks: bool = False
    softcap: bool = False
    mask: int = 0
    open: bool = False

    @functools.cached_property
    def vectors(self) -> int:
        """Query vectors that share a K/V head."""
        return self.group * self.queries

    @functools.cached_property
    def division(self) -> Division:
        """The fewest passes, of the fewest sets, with the longest runs of tokens, for which there are registers."""
        # What fits into threadgroup memory, where several sets read it.
        shared = max(MOST_TOKENS, 1 << (TILE_FLOATS // self._token_floats).bit_length() - 1)
        for passes in itertools.count(1):
            for sets in (1, 2, 4, 8):
                size = math.ceil(self.vectors / (passes * sets))
                # From memory, tokens are loaded several at a time so that the loads overlap.
                for tokens in (4, 2) if sets == 1 else (4, 2, 1):
                    tile = SIMDGROUPS * tokens if sets == 1 else shared
                    if SIMDGROUPS // sets * tokens <= tile and self.lane_floats(size, tokens) <= LANE_FLOATS:
                        return Division(passes, sets, size, tokens, tile)
        raise AssertionError("a vector alone always has registers")

    def lane_floats(self, size: int, tokens: int) -> int:
        """Floats of a lane for ``size`` query vectors, ``tokens`` tokens at a time.

        Of each vector its query, its sums and its scores; of each token K; and V of one.
        """
        keys, values = lane_size(self.key_dim), lane_size(self.value_dim)
        return size * (keys + values + 2 + tokens) + tokens * keys + values

    @property
    def _token_floats(self) -> int:
        """Of a token's K and V, as lanes hold them."""
        return 32 * (lane_size(self.key_dim) + lane_size(self.value_dim))

    @functools.cached_property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory."""
        division = self.division
        tile = division.tile * self._token_floats if division.sets > 1 else 0
        return 4 * (max(SIMDGROUPS * self.value_dim, tile) + 2 * division.size * SIMDGROUPS)

    @functools.cached_property
    def constants(self) -> list[tuple[str, int | bool]]:
        """For attend.metal, but for the type of its output and whether there is one part."""
        return [
            ("K_DIM", self.key_dim),
            ("V_DIM", self.value_dim),
            ("PAGE", self.page_size),
            ("GROUP", self.group),
            ("QUERIES", self.queries),
            ("SETS", self.division.sets),
            ("PASS", self.division.size),
            ("PART", PART),
            ("SIMDGROUPS", SIMDGROUPS),
            ("TOKENS", self.division.tokens),
            ("TILE", self.division.tile),
            ("CAUSAL", self.causal),
            ("WINDOW", self.window),
            ("SINKS", self.sinks),
            ("SOFTCAP", self.softcap),
            ("MASK", self.mask),
            ("OPEN", self.open),
        ]


# The same object for the same fields: a model asks for it at every layer and step.
variant_of = functools.cache(Variant)
