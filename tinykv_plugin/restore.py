"""Filling an empty sequence with K/V that were computed before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .compaction import provide_room
from .laying_out import pages_for
from .metadata import PagedKVMetadata
from .open_page import write_open
from .open_tails import Tail, as_made
from .pool import allocate_each
from .reading import pages_of
from .step import GroupStep

if TYPE_CHECKING:
    from .sequence import PagedSequence
    from .session import PagedSession


@dataclass(frozen=True)
class HeldTokens:
    """What one layer has of a saved sequence: spans of K and V ``(1, kv_heads, tokens, …)`` by their end.

    K and V are as the model made them or, ``stored``, as the pages hold them; ``tail`` has the newest ones as the model
    made them, for open pages. ``first`` is the oldest position of the last span; earlier spans are tokens a size
    limit keeps.
    """

    first: int
    spans: Sequence[tuple[int, mx.array, mx.array]]
    stored: bool = False
    tail: Tail | None = None


def fill(session: PagedSession, row: PagedSequence, tokens: int, held: Mapping[int, HeldTokens]) -> None:
    """Load an empty sequence with ``tokens`` tokens; ``held`` has for each layer those that it still needs.

    The session's lock is held. Raises OutOfPagesError or PoolGrowthError with the sequence still empty.
    """
    session.enter()
    floors = [
        table.retention.first_kept(tokens)
        if table.retention.page
        else max(held[layer.index].first for layer in session.layers if layer.group == group)
        for group, table in enumerate(row.tables)
    ]
    needed = [table.pages_from(floor, tokens) for table, floor in zip(row.tables, floors, strict=True)]
    session.prefix.eviction.with_room(lambda: provide_room(session.pools, needed))
    savepoint = session.journal.savepoint()
    try:
        for table, floor, pages in zip(row.tables, floors, allocate_each(session.pools, needed), strict=True):
            table.open_at(floor, tokens, pages)
        for layer in session.layers:
            for stop, keys, values in held[layer.index].spans:
                count = keys.shape[2]
                step = GroupStep([row.tables[layer.group]], [stop], [count], count)
                if held[layer.index].stored:
                    target = pages_of(layer)
                    full = as_made(target.spec, stop, (keys, values), held[layer.index].tail)
                else:
                    target = pages_for(session, layer, keys, values)
                    full = keys, values
                    keys, values = target.spec.encode(keys, values)
                session.writer.write(PagedKVMetadata(target, step), keys, values)
                if target.open is not None:
                    write_open(session.writer, row.tables[-1], stop, target.open, *full)
                    if held[layer.index].stored and held[layer.index].tail is None and tokens % target.page_size:
                        row.note_rounded(tokens)
    except BaseException:
        session.journal.rollback(savepoint)
        raise
    session.journal.commit(savepoint)
    row.tokens = tokens
    row.version += 1
