"""Variant: the template constants of an attention kernel, chosen by shape alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

# Tokens of a part. Fixed, so that a row's sums are formed alike alone, in any batch and on any device.
PART = 512
# Simdgroups of a threadgroup, and tokens that one of them takes at a time; these must lie in one page.
SIMDGROUPS = 8
TOKENS = 4
# Floats that a lane may keep for queries and outputs: beyond this the query vectors of a K/V head are served in
# several passes, each of which reads the head's K and V again.
LANE_FLOATS = 64
MOST_QUERIES = 8
MOST_DIM = 576
DIM_STEP = 8
PAGE_STEP = TOKENS
THREADS = 32 * SIMDGROUPS


def lane_size(dim: int) -> int:
    """Elements of a head that one lane holds; ``lane_size`` of common.metal."""
    run = 4 if dim % 128 == 0 else 2 if dim % 64 == 0 else 1
    return math.ceil(dim / (32 * run)) * run


@dataclass(frozen=True)
class Variant:
    """What an attention call needs of a kernel, as far as it is compiled in.

    ``mask``: 0 none, 1 boolean, 2 added.
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

    @functools.cached_property
    def vectors(self) -> int:
        """Query vectors that share a K/V head."""
        return self.group * self.queries

    @functools.cached_property
    def passes(self) -> int:
        """Threadgroups that read a part's K and V of one head, each for some of its query vectors."""
        most = max(1, LANE_FLOATS // (lane_size(self.key_dim) + lane_size(self.value_dim)))
        return math.ceil(self.vectors / most)

    @functools.cached_property
    def pass_size(self) -> int:
        """Query vectors of one pass."""
        return math.ceil(self.vectors / self.passes)

    @functools.cached_property
    def constants(self) -> list[tuple[str, int | bool]]:
        """For attend.metal, but for the type of its output and whether there is one part."""
        return [
            ("K_DIM", self.key_dim),
            ("V_DIM", self.value_dim),
            ("PAGE", self.page_size),
            ("GROUP", self.group),
            ("QUERIES", self.queries),
            ("PASS", self.pass_size),
            ("PART", PART),
            ("SIMDGROUPS", SIMDGROUPS),
            ("TOKENS", TOKENS),
            ("CAUSAL", self.causal),
            ("WINDOW", self.window),
            ("SINKS", self.sinks),
            ("SOFTCAP", self.softcap),
            ("MASK", self.mask),
        ]


# The same object for the same fields: a model asks for it at every layer and step.
variant_of = functools.cache(Variant)
