"""Bookkeeping at scale, without a model: many rows, a large pool, long contexts, joins, leaves, forks.

    python benchmarks/scale.py [--rows 1000] [--pages 1000000] [--steps 200] [--json FILE]

Prints the time of one decode step's bookkeeping per row (reserve, slot mapping, block table, finish), what a page
takes in bytes of bookkeeping, and both for pools and contexts of growing size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

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


def add(session: PagedSession, tokens: int) -> PagedSequence:
    row = session.new_sequence(None)
    session.begin([row], [tokens], tokens).finish_layer(1)
    return row


def decode(session: PagedSession, rows: list[PagedSequence]) -> tuple[float, float]:
    """One step's bookkeeping; seconds for pages and slots, and for handing the block table to the device."""
    start = time.perf_counter()
    step = session.begin(rows, [1] * len(rows), 1)
    step.groups[0].slot_mapping()
    step.groups[0].context_lens_array()
    middle = time.perf_counter()
    step.groups[0].block_table()
    table = time.perf_counter() - middle
    step.finish_layer(1)
    return time.perf_counter() - start - table, table


def scenario(rows_wanted: int, pages: int, longest: int, steps: int, churn: bool) -> dict[str, float]:
    rng = random.Random(0)
    session = make_session(pages)
    tracemalloc.start()
    mean = pages * PAGE_SIZE * 0.4 / rows_wanted
    lengths = [min(longest, max(1, int(rng.expovariate(1 / mean)))) for _ in range(rows_wanted)]
    rows = [add(session, length) for length in lengths]
    used = session.pools[0].allocator.used
    held = tracemalloc.get_traced_memory()[0] / used
    tracemalloc.stop()
    decode(session, rows)
    times, uploads, changes = [], [], []
    for _ in range(steps):
        if churn:
            before = time.perf_counter()
            rows.pop(rng.randrange(len(rows)))
            rows.append(add(session, rng.randrange(1, 4000)))
            rows.pop(rng.randrange(len(rows)))
            rows.append(rows[rng.randrange(len(rows))].fork(1))
            changes.append(time.perf_counter() - before)
        booking, upload = decode(session, rows)
        times.append(booking)
        uploads.append(upload)
    return {
        "rows": rows_wanted,
        "pool pages": pages,
        "pages used": used,
        "longest context": max(lengths),
        "us per row": statistics.median(times) / rows_wanted * 1e6,
        "us per row, table upload": statistics.median(uploads) / rows_wanted * 1e6,
        "ms per join+leave+fork": statistics.median(changes) * 1e3 if changes else 0.0,
        "bytes per page": held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    rows, pages, steps = arguments.rows, arguments.pages, arguments.steps
    results = {
        "small pool": scenario(rows, pages // 20, 10**6, steps, churn=False),
        "large pool, short contexts": scenario(rows, pages, 2_000, steps, churn=False),
        "large pool, contexts to a million": scenario(rows, pages, 10**6, steps, churn=False),
        "the same with a join, a leave and a fork a step": scenario(
            rows, pages, 10**6, max(10, steps // 10), churn=True
        ),
    }
    table = Table(title="Bookkeeping of one decode step (median)")
    table.add_column("scenario")
    names = list(next(iter(results.values())))
    for name in names:
        table.add_column(name, justify="right")
    for label, numbers in results.items():
        table.add_row(
            label,
            *(f"{numbers[name]:,.2f}" if name[:2] in ("us", "ms", "by") else f"{numbers[name]:,.0f}" for name in names),
        )
    console = Console()
    console.print(table)
    console.print("Targets: 2 us per row, 100 bytes per page.")
    losing = [
        label for label, numbers in results.items() if numbers["us per row"] > 2 or numbers["bytes per page"] > 100
    ]
    console.print(f"Not met by: {', '.join(losing) or 'none'}.")
    console.print("The block table is a rectangle, so handing it to the device grows with rows x the longest context.")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
