"""Attention within chunks of the context, as attention over contexts that begin with a chunk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .protocols import AttentionRequest
from .step import GroupStep


@dataclass(frozen=True)
class Segment:
    """Queries ``start`` to ``stop`` of a step, which are all in one chunk, and where their chunk's tokens are."""

    start: int
    stop: int
    step: GroupStep


def segments_of(step: GroupStep, chunk: int) -> list[Segment]:
    """``step`` cut at the chunks' borders; empty if that can't be done.

    A chunk must begin with a page, and several rows must each have all their queries in one chunk.
    """
    return step.cached(("segments", chunk), lambda: _segments(step, chunk))


def without_chunk(request: AttentionRequest) -> AttentionRequest:
    """``request`` as a backend meets it after :func:`segments_of`, if its queries are in one chunk."""
    if request.chunk is None or request.chunk % request.page_size:
        return request
    return replace(request, chunk=None, window=None)


def _segments(step: GroupStep, chunk: int) -> list[Segment]:
    if chunk % step.page_size:
        return []
    firsts = [(context - 1) // chunk * chunk for context in step.context_lens]
    if all(start >= first for start, first in zip(step.starts, firsts, strict=True)):
        return [Segment(0, step.width, _from(step, firsts, step.context_lens, step.query_lens, step.width))]
    if not step.alone:
        return []
    (start,), (stop,) = step.starts, step.context_lens
    cuts = [start, *range((start // chunk + 1) * chunk, stop, chunk), stop]
    return [
        Segment(a - start, b - start, _from(step, [a // chunk * chunk], [b], [b - a], b - a))
        for a, b in itertools.pairwise(cuts)
    ]


def _from(
    step: GroupStep, firsts: Sequence[int], contexts: Sequence[int], queries: Sequence[int], width: int
) -> GroupStep:
    """A step whose rows' contexts begin at the positions ``firsts``."""
    tables = [table.view(first // step.page_size) for table, first in zip(step.tables, firsts, strict=True)]
    lengths = [context - first for context, first in zip(contexts, firsts, strict=True)]
    part = GroupStep(tables, lengths, queries, width)
    if step.open is not None:
        part.open = _from(step.open, firsts, contexts, queries, width)
    return part
