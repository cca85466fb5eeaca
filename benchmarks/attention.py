"""Attention alone: mlx's dense one, gather, and the backends that read pages, side by side.

    python benchmarks/attention.py [--dtype float32 bfloat16 float16] [--page-size 16 32 64 128] [--quick]
        [--cached] [--json FILE]

Times are medians of calls that find K and V outside the processor's cache, as a model's decode does, which has read its
weights in between; --cached gives each call the same ones. "as shipped" is mlx's dense attention without a fast
BLAS, measured in a second process; everything else has the BLAS that was found. GB/s count the bytes of K and V once;
"% of loop" compares them with reading a large array, before and after. Gather has pages of the default size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from attention_calls import MemoryLoop, Shape, dense, medians_ms, paged, paged_calls, stay_in_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402

from tinykv_plugin.config import KVCacheConfig  # noqa: E402
from tinykv_plugin.manager import default_manager  # noqa: E402

AS_SHIPPED = "--as-shipped"
MIXED = (64, 128, 256, 512, 1024, 2048, 4096, 8192) * 2
ONE_ROW = "the same as one row"
SHAPES = [
    Shape("1,32,8,128,4096", (4096,), 32, 8, 128),
    Shape("8,9,3,64,1024", (1024,) * 8, 9, 3, 64),
    Shape("1,4,1,256,2048", (2048,), 4, 1, 256),
    Shape("16,32,8,128,64-8192", MIXED, 32, 8, 128),
    Shape(ONE_ROW, (sum(MIXED),), 32, 8, 128),
    Shape("1,32,8,128,4096 prefill 512", (4096,), 32, 8, 128, 512),
]


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
    parser.add_argument("--quick", action="store_true", help="short measurements, the default page size only")
    parser.add_argument(
        "--cached", action="store_true", help="the same K/V in every call: the processor's cache has it"
    )
    parser.add_argument("--longest", type=int, help="cut contexts and prompts to so many tokens")
    parser.add_argument(AS_SHIPPED, action="store_true", help=argparse.SUPPRESS)
    arguments = parse(parser, argv, dtype=["float32"], quick=True, longest=64)
    if arguments.cached:
        stay_in_cache()
    seconds = 0.0 if arguments.smoke else 0.2 if arguments.quick else 0.5
    loop_megabytes = 1 if arguments.smoke else 256
    shapes = [shape.cut(arguments.longest) for shape in SHAPES] if arguments.longest else SHAPES
    if arguments.as_shipped:
        cases = [(s, d) for d in arguments.dtype for s in shapes[:3] + shapes[5:]]
        print(json.dumps({f"{s.name} {d}": dense(s, getattr(mx, d), seconds) for s, d in cases}))
        return
    usual = KVCacheConfig.model_fields["page_size"].default
    page_sizes = [usual] if arguments.quick else arguments.page_size
    plugins = default_manager()
    gather, backends = plugins.gather(), [backend for backend in plugins.backends("auto") if backend.direct]
    console = Console()
    console.print(f"BLAS {BLAS.name}; {os.cpu_count()} processors")
    shipped = as_shipped(
        arguments.dtype, [f"--{name}" for name in ("smoke", "quick", "cached") if getattr(arguments, name)]
    )
    results: dict[str, Any] = {}
    losing = []
    for name in arguments.dtype:
        dtype = getattr(mx, name)
        table = Table(title=f"{name}: ms (times faster than dense)")
        for column in ("rows, q heads, kv heads, dim, context", "as shipped", "dense", "backend", "page", "ms"):
            table.add_column(column, justify="right")
        for column in ("x dense", "x shipped", "GB/s", "% of loop"):
            table.add_column(column, justify="right")
        for shape in shapes:
            stock, key = dense(shape, dtype, seconds), f"{shape.name} {name}"
            before = shipped.get(key)
            found = results[key] = {"dense": stock, "as shipped": before}
            for backend, page_size in [(gather, usual), *((b, size) for size in page_sizes for b in backends)]:
                loop = MemoryLoop(loop_megabytes)
                loop.some()
                value = paged(shape, dtype, page_size, backend, backend, seconds)
                loop.some()
                if value is None:
                    table.add_row(shape.name, "", "", backend.name, str(page_size), "not supported", *[""] * 4)
                    continue
                speed, read = shape.kv_bytes(dtype) / value / 1e6, loop.speed()
                found[f"{backend.name} page {page_size}"] = {"ms": value, "GB/s": speed, "loop GB/s": read}
                table.add_row(
                    shape.name,
                    f"{before:.2f}" if before else "",
                    f"{stock:.2f}",
                    backend.name,
                    str(page_size),
                    f"{value:.2f}",
                    f"{stock / value:.1f}",
                    f"{before / value:.1f}" if before else "",
                    f"{speed:.1f}",
                    f"{100 * speed / read:.0f}",
                )
                if value > stock:
                    losing.append(f"{backend.name} {key} page {page_size}: x{stock / value:.2f}")
        console.print(table)
        for backend in backends:
            for size in page_sizes:
                cases = {shape.name: paged_calls(shape, dtype, size, backend, backend) for shape in shapes[3:5]}
                usable = {case: calls for case, calls in cases.items() if calls is not None}
                if usable:
                    mixed, row = medians_ms(usable, 8 * seconds).values()
                    results[f"{name} {backend.name} page {size}: mixed / one row"] = mixed / row
                    console.print(
                        f"{name}, {backend.name} page {size}, in turns: rows of mixed lengths {mixed:.2f} ms, as one "
                        f"row {row:.2f} ms: x{mixed / row:.2f}"
                    )
    console.print("Slower than dense:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
