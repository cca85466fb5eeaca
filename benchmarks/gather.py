"""Attention of a decode step by the gather backend beside stock mlx-lm's dense cache, by context and batch.

    python benchmarks/gather.py [--contexts 1024 4096 16384] [--batches 1 8 32] [--steps 12] [--json FILE]

Gather copies every row's pages together before mlx's own attention reads them, so it must cost more than a cache that
is in one piece: this says how much. Rows are of equal length or mixed (from a quarter of the context up to all of it);
stock pads a mixed batch to its longest row. A step is one token's ``update_and_fetch`` and attention in each layer,
evaluated; times are medians, stock and paged taking turns. Bytes are those of K and V held: stock's with its padding
and growth ahead, ours whole pages; waste is the share of either without a token in it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()  # before mlx

import mlx.core as mx  # noqa: E402
from mlx_lm.models import base, llama  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402
from shapes import HEAD_DIM, HEADS, KV_HEADS, fill, make_model  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402

# The shapes of SmolLM2-135M, and fewer layers: the time of a layer is what counts.
LAYERS = 2


@dataclass(frozen=True)
class Result:
    """One context and batch. Times in ms per layer and step; ``waste`` is the share of held bytes without a token."""

    context: int
    batch: int
    rows: str
    stock_ms: float
    gather_ms: float
    ratio: float
    stock_bytes: int
    paged_bytes: int
    stock_waste: float
    paged_waste: float


def joined(make_cache: Callable[[], list[Any]], lengths: Sequence[int]) -> list[Any]:
    """Requests of the given lengths as one batch, as mlx-lm's batch generator makes it; one request stays as it is."""
    requests = [make_cache() for _ in lengths]
    for request, length in zip(requests, lengths, strict=True):
        fill(request, length)
    if len(requests) == 1:
        return requests[0]
    batch = [layers[0].merge(list(layers)) for layers in zip(*requests, strict=True)]
    mx.eval([layer.state for layer in batch])
    return batch


def step(cache: list[Any], attend: Callable[..., mx.array], queries: mx.array, new: mx.array) -> float:
    """Milliseconds of one decode step per layer."""
    start = time.perf_counter()
    mask = cache[0].make_mask(1, return_array=False, window_size=None)
    for layer in cache:
        keys, values = layer.update_and_fetch(new, new)
        out = attend(queries, keys, values, cache=layer, scale=0.125, mask=mask)
        mx.eval(out, layer.state)
    return (time.perf_counter() - start) * 1e3 / len(cache)


def measure(model: Any, context: int, batch: int, mixed: bool, page_size: int, steps: int) -> Result:
    rng = random.Random(context + batch)
    lengths = [rng.randint(context // 4, context) if mixed else context for _ in range(batch)]
    queries = mx.random.normal((batch, HEADS, 1, HEAD_DIM))
    new = mx.random.normal((batch, KV_HEADS, 1, HEAD_DIM))
    mx.eval(queries, new)
    dense = joined(lambda: [KVCache() for _ in range(LAYERS)], lengths)
    with tinykv.attach(model, page_size=page_size, attention="gather", memory="16GiB"):
        paged = joined(model.make_cache, lengths)
        stock, gathered = [], []
        for number in range(steps + 3):
            times = (
                step(dense, base.scaled_dot_product_attention, queries, new),
                step(paged, llama.scaled_dot_product_attention, queries, new),
            )
            if number >= 3:  # the first ones grow what has to grow
                stock.append(times[0])
                gathered.append(times[1])
        tokens = (sum(lengths) + (steps + 3) * batch) * 2 * KV_HEADS * HEAD_DIM * 4 * LAYERS
        stock_bytes = sum(layer.nbytes for layer in dense)
        paged_bytes = sum(layer.nbytes for layer in paged)
        del paged
    stock_ms, gather_ms = statistics.median(stock), statistics.median(gathered)
    return Result(
        context,
        batch,
        "mixed" if mixed else "equal",
        stock_ms,
        gather_ms,
        gather_ms / stock_ms,
        stock_bytes,
        paged_bytes,
        1 - tokens / stock_bytes,
        1 - tokens / paged_bytes,
    )


def show(results: list[Result], page_size: int) -> None:
    console = Console()
    console.width = max(console.width, 100)
    table = Table(title=f"{KV_HEADS} K/V heads of {HEAD_DIM}, float32, pages of {page_size} tokens")
    for name in ("context", "batch", "rows", "stock ms", "gather ms", "ratio", "stock MiB", "pages MiB", "waste"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.context:,}",
            str(result.batch),
            result.rows,
            f"{result.stock_ms:,.2f}",
            f"{result.gather_ms:,.2f}",
            f"{result.ratio:.2f}x",
            f"{result.stock_bytes / 2**20:,.0f}",
            f"{result.paged_bytes / 2**20:,.0f}",
            f"{result.stock_waste:.0%}/{result.paged_waste:.0%}",
        )
    console.print(table)
    console.print(f"BLAS: {BLAS.name}", soft_wrap=True)
    slower = [result for result in results if result.ratio > 1]
    if slower:
        worst = max(slower, key=lambda result: result.ratio)
        console.print(
            f"gather is slower than stock in {len(slower)} of {len(results)} cases, at worst {worst.ratio:.2f}x "
            f"(context {worst.context:,}, batch {worst.batch}, {worst.rows} rows).",
            soft_wrap=True,
        )
    else:
        console.print("gather is as fast as stock in every case.")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12, help="steps to time in each case (default: %(default)s)")
    options = parse(parser, argv, contexts=[64], batches=[1, 2], steps=2)
    mx.random.seed(0)
    model = make_model(LAYERS)
    results = []
    for context in options.contexts:
        for batch in options.batches:
            for mixed in (False, True)[: 1 + (batch > 1)]:
                results.append(measure(model, context, batch, mixed, options.page_size, options.steps))
                mx.clear_cache()
    show(results, options.page_size)
    save(options, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
