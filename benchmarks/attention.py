"""Attention alone: mlx's dense one, gather, and the backends that read pages, side by side.

    python benchmarks/attention.py [--dtype float32 bfloat16 float16] [--page-size 16 32 64 128] [--quick] [--json FILE]

Times are medians of calls on cold caches. "as shipped" is mlx's dense attention without a fast BLAS, measured in a
second process; everything else has the BLAS that was found. GB/s count the bytes of K and V once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402

from tinykv_plugin.allocator import PageAllocator  # noqa: E402
from tinykv_plugin.journal import Journal  # noqa: E402
from tinykv_plugin.kv_format import KVFormat  # noqa: E402
from tinykv_plugin.manager import default_manager  # noqa: E402
from tinykv_plugin.metadata import PagedKVMetadata  # noqa: E402
from tinykv_plugin.pages import LayerPages, LayerSpec  # noqa: E402
from tinykv_plugin.pool import FULL_PRECISION  # noqa: E402
from tinykv_plugin.protocols import AttentionRequest  # noqa: E402
from tinykv_plugin.step import GroupStep  # noqa: E402
from tinykv_plugin.table import PageTable, Retention  # noqa: E402

COLD_BYTES = 256 << 20
AS_SHIPPED = "--as-shipped"


@dataclass(frozen=True)
class Shape:
    """One case: rows with their context lengths, heads, and query tokens per row."""

    name: str
    contexts: tuple[int, ...]
    query_heads: int
    kv_heads: int
    dim: int
    queries: int = 1

    def cut(self, longest: int) -> Shape:
        """The same with at most ``longest`` tokens in a row."""
        contexts = tuple(min(context, longest) for context in self.contexts)
        return replace(self, contexts=contexts, queries=min(self.queries, longest))

    def kv_bytes(self, dtype: mx.Dtype) -> int:
        return 2 * sum(self.contexts) * self.kv_heads * self.dim * dtype.size


MIXED = (64, 128, 256, 512, 1024, 2048, 4096, 8192) * 2
SHAPES = [
    Shape("1,32,8,128,4096", (4096,), 32, 8, 128),
    Shape("8,9,3,64,1024", (1024,) * 8, 9, 3, 64),
    Shape("1,4,1,256,2048", (2048,), 4, 1, 256),
    Shape("16,32,8,128,64-8192", MIXED, 32, 8, 128),
    Shape("1,32,8,128, as one row", (sum(MIXED),), 32, 8, 128),
    Shape("1,32,8,128,4096 prefill 512", (4096,), 32, 8, 128, 512),
]


def median_ms(calls: list[Callable[[], Any]], seconds: float) -> float:
    """The median time of one call; the calls take turns, so that each finds its data out of the caches."""
    mx.eval(calls[0]())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        for call in calls:
            start = time.perf_counter()
            mx.eval(call())
            times.append(time.perf_counter() - start)
            if len(times) >= 3 and time.perf_counter() > end:
                break
    return statistics.median(times) * 1e3


def copies_for(shape: Shape, dtype: mx.Dtype) -> int:
    return max(1, min(16, COLD_BYTES // shape.kv_bytes(dtype)))


def some_tokens(shape: Shape, context: int, dtype: mx.Dtype) -> mx.array:
    """A row's keys or values, ``(1, kv_heads, context, dim)``: a few random ones again and again: made soon."""
    few = mx.random.normal((1, shape.kv_heads, min(context, 256), shape.dim)).astype(dtype)
    return mx.contiguous(mx.tile(few, (1, 1, -(-context // few.shape[2]), 1))[:, :, :context])


def dense(shape: Shape, dtype: mx.Dtype, seconds: float) -> float:
    """Mlx's own attention on tensors padded to the longest row, as a batch of stock mlx-lm has them."""
    rows, longest = len(shape.contexts), max(shape.contexts)
    queries = mx.random.normal((rows, shape.query_heads, shape.queries, shape.dim)).astype(dtype)
    mask: Any = "causal" if shape.queries > 1 else None
    if len(set(shape.contexts)) > 1:
        mask = (mx.arange(longest)[None] < mx.array(shape.contexts)[:, None])[:, None, None]
    tensors = [
        tuple(mx.tile(some_tokens(shape, longest, dtype), (rows, 1, 1, 1)) for _ in range(2))
        for _ in range(copies_for(shape, dtype) if rows * longest * shape.kv_heads * shape.dim < 2**26 else 1)
    ]
    mx.eval(queries, tensors)
    scale = shape.dim**-0.5
    return median_ms(
        [
            lambda keys=keys, values=values: mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask
            )
            for keys, values in tensors
        ],
        seconds,
    )


def paged(
    shape: Shape,
    dtype: mx.Dtype,
    page_size: int,
    backend: Any,
    writer: Any,
    seconds: float,
    kv_format: KVFormat = FULL_PRECISION,
) -> float | None:
    """A backend on pages in random order; None if it doesn't support the case."""
    spec = LayerSpec(shape.kv_heads, shape.dim, shape.dim, dtype, dtype).stored_as(kv_format)
    request = AttentionRequest(
        shape.query_heads,
        shape.kv_heads,
        shape.dim,
        shape.dim,
        dtype,
        page_size,
        shape.queries,
        "causal" if shape.queries > 1 else "none",
        None,
        0,
        False,
    )
    if backend.supports(request):
        return None
    journal = Journal()
    allocator = PageAllocator(journal)
    total = sum(-(-context // page_size) for context in shape.contexts)
    allocator.resize(total)
    order = np.random.default_rng(0).permutation(allocator.allocate(total)).tolist()
    tables = []
    for context in shape.contexts:
        table = PageTable(allocator, journal, page_size, Retention())
        table.append([order.pop() for _ in range(-(-context // page_size))])
        tables.append(table)
    layers = []
    tokens = [spec.encode(*(some_tokens(shape, context, dtype) for _ in range(2))) for context in shape.contexts]
    mx.eval(tokens)
    for _ in range(copies_for(shape, dtype)):
        pages = LayerPages(spec, page_size)
        writer.resize(pages, total)
        for table, context, (keys, values) in zip(tables, shape.contexts, tokens, strict=True):
            step = GroupStep([table], [context], [context], context)
            writer.write(PagedKVMetadata(pages, step), keys, values)
        mx.eval(pages.state())
        layers.append(pages)
    queries = mx.random.normal((len(tables), shape.query_heads, shape.queries, shape.dim)).astype(dtype)
    mx.eval(queries)
    step = GroupStep(tables, list(shape.contexts), [shape.queries] * len(tables), shape.queries)
    return median_ms(
        [
            lambda pages=pages: backend.attend(
                queries,
                PagedKVMetadata(pages, step),
                scale=shape.dim**-0.5,
                mask="causal" if shape.queries > 1 else None,
                sinks=None,
            )
            for pages in layers
        ],
        seconds,
    )


def bandwidth(elements: int) -> float:
    """GB/s of reading a large array with as many threads as there are processors."""
    threads = os.cpu_count() or 1
    parts = [np.ones(elements, dtype=np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            times.append(time.perf_counter() - start)
    return threads * parts[0].nbytes / statistics.median(times) / 1e9


def as_shipped(dtypes: list[str], options: list[str]) -> dict[str, float]:
    """Dense times of a process without a fast BLAS."""
    command = [sys.executable, __file__, AS_SHIPPED, "--dtype", *dtypes, *options]
    answer = subprocess.run(
        command, env=os.environ | {"TINYKV_BLAS": "off"}, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--page-size", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--quick", action="store_true", help="short measurements, first page size only")
    parser.add_argument("--longest", type=int, help="cut contexts and prompts to so many tokens")
    parser.add_argument(AS_SHIPPED, action="store_true", help=argparse.SUPPRESS)
    arguments = parse(parser, argv, dtype=["float32"], page_size=[16], quick=True, longest=64)
    seconds = 0.0 if arguments.smoke else 0.3 if arguments.quick else 1.0
    shapes = [shape.cut(arguments.longest) for shape in SHAPES] if arguments.longest else SHAPES
    if arguments.as_shipped:
        print(
            json.dumps(
                {
                    f"{s.name} {d}": dense(s, getattr(mx, d), seconds)
                    for d in arguments.dtype
                    for s in shapes[:3] + shapes[5:]
                }
            )
        )
        return
    page_sizes = arguments.page_size[:1] if arguments.quick else arguments.page_size
    plugins = default_manager()
    gather, backends = plugins.gather(), [backend for backend in plugins.backends("auto") if backend.direct]
    console = Console()
    read = bandwidth(1 << (20 if arguments.smoke else 27))
    console.print(f"BLAS {BLAS.name}; {os.cpu_count()} processors; reading memory: {read:.1f} GB/s")
    shipped = as_shipped(arguments.dtype, ["--smoke"] if arguments.smoke else ["--quick"] if arguments.quick else [])
    results: dict[str, Any] = {"bandwidth GB/s": read}
    losing = []
    for name in arguments.dtype:
        dtype = getattr(mx, name)
        table = Table(title=f"{name}: ms (x: times faster than dense; GB/s)")
        for column in ("rows, q heads, kv heads, dim, context", "page", "as shipped", "dense", "gather"):
            table.add_column(column, justify="right")
        for backend in backends:
            table.add_column(backend.name, justify="right")
        for shape in shapes:
            stock = dense(shape, dtype, seconds)
            for page_size in page_sizes:
                times = {"gather": paged(shape, dtype, page_size, gather, gather, seconds)}
                for backend in backends:
                    times[backend.name] = paged(shape, dtype, page_size, backend, backend, seconds)
                key = f"{shape.name} {name}"
                results[f"{key} page {page_size}"] = {"dense": stock, "as shipped": shipped.get(key), **times}
                cells = []
                for label, value in times.items():
                    if value is None:
                        cells.append("not supported")
                        continue
                    speed = shape.kv_bytes(dtype) / value / 1e6
                    cells.append(f"{value:.2f} (x{stock / value:.1f}; {speed:.1f})")
                    if value > stock:
                        losing.append(f"{label} {key} page {page_size}: x{stock / value:.2f}")
                before = shipped.get(key)
                table.add_row(shape.name, str(page_size), f"{before:.2f}" if before else "", f"{stock:.2f}", *cells)
        console.print(table)
    console.print("Slower than dense:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
