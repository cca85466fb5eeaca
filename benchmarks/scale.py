"""Bookkeeping at scale, without a model: many rows, a large pool, long contexts; joins, leaves, forks, evictions.

    python benchmarks/scale.py [--rows 1000] [--pages 1000000] [--context 1000000] [--steps 60] [--json FILE]

Prints the time of one decode step's bookkeeping (reserve, slot mapping, block table in the form kernels read, finish)
per row, steady and after rows joined, left or forked; what the change itself takes; and what a page takes in bytes of
bookkeeping, block table included. Times are medians.
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from running import parse, parser_of, save

from tinykv_plugin.config import KVCacheConfig
from tinykv_plugin.layer import PagedLayer
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.plan import CachePlan
from tinykv_plugin.pool import Budget
from tinykv_plugin.protocols import LayerChoice
from tinykv_plugin.sequence import PagedSequence
from tinykv_plugin.session import PagedSession

SPEC = LayerSpec(1, 1, 1, mx.float16, mx.float16)
PAGE_SIZE = 32
STEP_TARGET, BYTES_TARGET = 2.0, 100.0


class NoBackend:
    """Has pages in name only."""

    name, direct, priority = "none", True, 0

    def supports(self, request: Any) -> list[str]:
        return []

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        pages.keys = pages.values = np.empty((num_pages, 0, PAGE_SIZE, 0))  # type: ignore[assignment]

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass


def make_session(pages: int) -> PagedSession:
    backend: Any = NoBackend()
    layer = PagedLayer(0, LayerChoice("full"), 0, True, "", SPEC)
    context: Any = SimpleNamespace(
        model=SimpleNamespace(parameters=dict),
        config=KVCacheConfig(page_size=PAGE_SIZE, max_pages=pages, memory="1TiB"),
        emit=lambda name, event: None,
        gather=backend,
    )
    return PagedSession(context, CachePlan([layer], {"full": None}, [], backend, []), Budget(1 << 40))


class Load:
    """Running rows in a pool of ``pages`` pages, of which their contexts (at most ``longest``) fill about ``share``."""

    def __init__(self, rows: int, pages: int, longest: int, share: float = 0.4) -> None:
        self.rng = random.Random(0)
        self.session = make_session(pages)
        tracemalloc.start()
        mean = pages * PAGE_SIZE * share / rows
        lengths = [min(longest, max(1, int(self.rng.expovariate(1 / mean)))) for _ in range(rows)]
        self.rows = [self.add(length) for length in lengths]
        self.longest = longest
        self.decode()
        self.used = self.session.pools[0].allocator.used
        page_ids = self.session.batches.recent[0].block_tables[0].device_page_ids()  # which tracemalloc doesn't see
        self.page_bytes = (tracemalloc.get_traced_memory()[0] + page_ids.nbytes) / self.used
        tracemalloc.stop()

    def add(self, tokens: int) -> PagedSequence:
        row = self.session.new_sequence(None)
        self.session.begin([row], [tokens], tokens).finish_layer(1)
        return row

    def decode(self) -> float:
        """Seconds of one step's bookkeeping."""
        start = time.perf_counter()
        step = self.session.begin(self.rows, [1] * len(self.rows), 1)
        group = step.groups[0]
        group.slot_mapping()
        group.context_lens_array()
        group.page_ids()
        group.row_starts()
        step.finish_layer(1)
        return time.perf_counter() - start

    def steady(self) -> None:
        pass

    def join(self, tokens: int | None = None) -> None:
        self.rows.append(self.add(self.rng.randrange(1, 4000) if tokens is None else tokens))

    def leave(self) -> None:
        self.rows.pop(self.rng.randrange(len(self.rows)))
        self.session.collect()  # what the next step would do

    def join_and_leave(self) -> None:
        self.join(self.longest)
        self.decode()
        self.rows.pop()
        self.session.collect()

    def fork(self) -> None:
        self.rows.append(self.rows[self.rng.randrange(len(self.rows))].fork(1))

    def all_three(self) -> None:
        self.leave()
        self.join()
        self.leave()
        self.fork()

    def evict(self) -> None:
        """A row leaves and its pages are stored; one joins, for which stored ones give way."""
        row = self.rows.pop(self.rng.randrange(len(self.rows)))
        first = self.rng.randrange(1 << 30)
        with self.session.lock:
            self.session.prefix.keep(list(range(first, first + row.tokens)), row, {}, tail=True)
        tokens = row.tokens
        del row
        self.join(tokens)

    def measure(self, change: Callable[[], None], steps: int) -> dict[str, float]:
        """Medians of ``steps`` steps, each after a change."""
        self.decode()
        changes, times, before = [], [], len(self.rows)
        for _ in range(steps):
            start = time.perf_counter()
            change()
            changes.append(time.perf_counter() - start)
            times.append(self.decode() / len(self.rows) * 1e6)
        return {
            "rows": before,
            "pool pages": self.session.pools[0].limit,
            "pages used": self.session.pools[0].allocator.used,
            "longest context": max(row.tokens for row in self.rows),
            "us per row": statistics.median(times),
            "ms per change": statistics.median(changes) * 1e3,
            "bytes per page": self.page_bytes,
        }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--context", type=int, default=1_000_000, help="the longest context (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parse(parser, argv, rows=20, pages=40_000, context=20_000, steps=3)
    rows, pages, longest, steps = arguments.rows, arguments.pages, arguments.context, arguments.steps
    results = {}

    def note(name: str, load: Load, change: Callable[[], None]) -> None:
        results[name] = load.measure(change, steps)

    load = Load(rows, max(rows, pages // 20), longest)
    note("steady, small pool", load, load.steady)
    load = Load(rows, pages, 2000)
    note("steady, short contexts", load, load.steady)
    load = Load(rows, pages, longest)
    note("steady, long contexts", load, load.steady)
    note("a row joins", load, load.join)
    note("a row leaves", load, load.leave)
    note("a row forks", load, load.fork)
    note("one joins, two leave, one forks", load, load.all_three)
    load.join(longest)
    note("steady, with the longest context", load, load.steady)
    note("with the longest: one joins, two leave, one forks", load, load.all_three)
    note("the longest context joins and leaves", load, load.join_and_leave)
    load = Load(rows, pages, longest, share=0.9)
    note("full pool: one leaves and is stored, one joins", load, load.evict)

    table = Table(title="Bookkeeping of one decode step (medians)")
    table.add_column("after")
    names = list(next(iter(results.values())))
    for name in names:
        table.add_column(name, justify="right")
    for label, numbers in results.items():
        cells = (
            f"{numbers[name]:,.2f}" if name[:2] in ("us", "ms", "by") else f"{numbers[name]:,.0f}" for name in names
        )
        table.add_row(label, *cells)
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    console.print(f"Targets: {STEP_TARGET:.0f} us per row, {BYTES_TARGET:.0f} bytes per page.")
    losing = [
        label
        for label, numbers in results.items()
        if numbers["us per row"] > STEP_TARGET or numbers["bytes per page"] > BYTES_TARGET
    ]
    console.print(f"Not met by: {', '.join(losing) or 'none'}.")
    save(arguments, results)


if __name__ == "__main__":
    main()
