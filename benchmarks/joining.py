"""What it costs that a request joins a batch, leaves it, or is taken out of it, by the context of all requests.

    python benchmarks/joining.py [--contexts 256 2048 16384] [--rows 8] [--layers 4] [--repeat 9] [--json FILE]

Milliseconds for all layers, and bytes that are held more after it, of mlx-lm's ``BatchKVCache`` and of paged caches.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402
from shapes import HEAD_DIM, KV_HEADS, fill, make_model, settle  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.units import format_bytes  # noqa: E402

Request = list[Any]


def merged(requests: Sequence[Request]) -> Request:
    """The requests as the rows of one batch."""
    return [layers[0].merge(list(layers)) for layers in zip(*requests, strict=True)]


def timed(work: Callable[[], Request]) -> tuple[float, int]:
    """Milliseconds of ``work``, and the bytes that it leaves behind."""
    mx.synchronize()
    before, start = mx.get_active_memory(), time.perf_counter()
    settle(work())
    return (time.perf_counter() - start) * 1e3, mx.get_active_memory() - before


def once(requests: Sequence[Request]) -> dict[str, tuple[float, int]]:
    """Each change of a batch, in the order of a batch's life."""
    first, last = requests[:-1], requests[-1]
    batch: Request = []
    taken: Request = []

    def join() -> Request:
        batch[:] = merged(first)
        return batch

    def come() -> Request:
        for layer, new in zip(batch, merged([last]), strict=True):
            layer.extend(new)
        return batch

    def take() -> Request:
        taken[:] = [layer.extract(1) for layer in batch]
        return taken

    def leave() -> Request:
        rows = mx.array([row for row in range(len(requests)) if row != 2 % len(requests)])
        for layer in batch:
            layer.filter(rows)
        return batch

    return {
        "all join": timed(join),
        "one joins": timed(come),
        "one is taken out": timed(take),
        "one leaves": timed(leave),
    }


def measure(make: Callable[[], Request], context: int, rows: int, repeat: int) -> dict[str, tuple[float, float]]:
    """Medians of :func:`once`; the requests' lengths differ a little, so that stock has something to pad."""
    requests = [make() for _ in range(rows)]
    for row, request in enumerate(requests):
        fill(request, context - row)
    runs = [once([copy.copy(request) for request in requests]) for _ in range(repeat)]
    return {
        what: (statistics.median(run[what][0] for run in runs), statistics.median(run[what][1] for run in runs))
        for what in runs[0]
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048, 16384])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=9)
    arguments = parse(parser, argv, contexts=[16, 64], rows=3, layers=2, repeat=1)
    model = make_model(arguments.layers)
    table = Table(
        title=f"{arguments.rows} rows, {arguments.layers} layers, {KV_HEADS} K/V heads of {HEAD_DIM}; medians"
    )
    for column in ("context", "change", "stock ms", "paged ms", "times faster", "stock holds more", "paged holds more"):
        table.add_column(column, justify="right")
    results: dict[str, Any] = {}
    for context in arguments.contexts:
        stock = measure(lambda: [KVCache() for _ in range(arguments.layers)], context, arguments.rows, arguments.repeat)
        with tinykv.attach(model, memory="8GiB"):
            paged = measure(model.make_cache, context, arguments.rows, arguments.repeat)
        for what in stock:
            (dense_ms, dense_bytes), (ms, held) = stock[what], paged[what]
            results[f"{what} at {context}"] = {
                "stock ms": dense_ms, "paged ms": ms, "stock bytes": dense_bytes, "paged bytes": held
            }  # fmt: skip
            numbers = (f"{dense_ms:.2f}", f"{ms:.2f}", f"{dense_ms / ms:.1f}")
            table.add_row(str(context), what, *numbers, format_bytes(dense_bytes), format_bytes(held))
    console = Console()
    console.print(table)
    losing = [
        f"{name}: x{ms['stock ms'] / ms['paged ms']:.2f}"
        for name, ms in results.items()
        if ms["paged ms"] > ms["stock ms"]
    ]
    console.print("Slower than stock:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
