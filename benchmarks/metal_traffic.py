"""What the Metal kernels load and store, counted while they run on a CPU: a Mac isn't needed, g++ is.

    python benchmarks/metal_traffic.py [--context 1024] [--json FILE]

"read" is how often each byte of K and V is loaded by a threadgroup of the decode kernel: 1 is the least. Next to it
the same for mlx's own kernel for dense tensors (sdpa_vector, for the head dims it has). "extra" is what else moves,
relative to K and V: queries, block table, partial sums and output; each lane counts, though neighbours share a load.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from running import parse, parser_of, save

HARNESS = Path(__file__).parents[1] / "tests" / "metal_on_cpu"
sys.path.insert(0, str(HARNESS))

from metal_case import Case  # noqa: E402
from msl_cpu import build  # noqa: E402
from msl_cpu.device import Device  # noqa: E402
from msl_cpu.program import KERNELS, MLX_INCLUDE, Argument, Kind, Program  # noqa: E402
from msl_cpu.translate import flattened  # noqa: E402
from tinykv_metal.backend import MetalBackend  # noqa: E402
from tinykv_metal.variant import THREADS, Variant  # noqa: E402

# Query heads, K/V heads, head dim, query tokens per row.
SHAPES = [
    (32, 8, 128, 1),
    (32, 8, 128, 4),
    (32, 32, 128, 1),
    (24, 8, 64, 1),
    (9, 3, 64, 1),
    (64, 8, 64, 1),
    (40, 8, 128, 1),
    (64, 4, 128, 1),
    (8, 4, 256, 1),
    (16, 16, 80, 1),
    (64, 8, 128, 1),
    (16, 2, 256, 1),
    (32, 4, 256, 1),
    (16, 2, 512, 1),
    (16, 1, 512, 1),
]
DENSE_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True)
class Traffic:
    """Of one shape; bytes read and moved are relative to those of K and V."""

    query_heads: int
    kv_heads: int
    dim: int
    queries: int
    passes: int
    sets: int
    threads: int
    threadgroups: int
    threadgroup_bytes: int
    read: float
    extra: float
    mlx_read: float | None


def paged(shape: tuple[int, int, int, int], context: int) -> Traffic:
    """One row of ``context`` tokens in pages of 32; one K/V head, as all of them do the same."""
    query_heads, kv_heads, dim, queries = shape
    group = query_heads // kv_heads
    device = Device("check", keep_launches=True)
    mx.fast.metal_kernel = device.metal_kernel
    backend = MetalBackend()
    case = Case([context], queries, query_heads=group, kv_heads=1, key_dim=dim, page_size=32, dtype=mx.float16)
    case.fill(backend).attend(backend)
    attend, *rest = device.launches
    pools = [attend.arguments[name] for name in ("key_pages", "value_pages")]
    whole = 2 * context * dim * mx.float16.size
    others = [
        argument
        for launch in (attend, *rest)
        for name, argument in launch.arguments.items()
        if not any(argument is pool for pool in pools) and not name.endswith(("_shape", "_strides"))
    ]
    variant = Variant(dim, dim, 32, group, queries)
    return Traffic(
        *shape,
        variant.division.passes,
        variant.division.sets,
        THREADS,
        attend.counts.threadgroups * kv_heads,
        attend.counts.threadgroup_bytes,
        sum(pool.bytes_read for pool in pools) / whole,
        sum(argument.bytes_read + argument.bytes_written for argument in others) / whole,
        dense(group, dim, context) if queries == 1 and dim in DENSE_DIMS else None,
    )


def dense(group: int, dim: int, context: int) -> float:
    """How often mlx's sdpa_vector loads each byte of K and V of one head."""
    source = flattened(KERNELS / "sdpa_vector.h", [build.INCLUDE, MLX_INCLUDE])
    program = Program(source, "sdpa_vector", f"half, {dim}, {dim}", "check")
    numbers = np.random.default_rng(0).standard_normal
    queries, keys, values = (
        Argument(numbers(size).astype(np.float16)) for size in ((group, dim), (context, dim), (context, dim))
    )
    out = Argument(np.zeros((group, dim), np.float16), Kind.OUTPUT)
    sizes = [Argument(np.array(group, np.int32)), Argument(np.array(context, np.int32))]
    strides = [Argument(np.array(stride, np.uint64)) for stride in (context * dim, dim)]
    constants = dict.fromkeys(("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks"), 0)
    program.run(
        [queries, keys, values, out, *sizes, *strides, *strides, Argument(np.array(dim**-0.5, np.float32))]
        + [Argument(None)] * 7,
        (group * 1024, 1, 1),
        (1024, 1, 1),
        constants=constants,
    )
    assert keys.data is not None
    return (keys.bytes_read + values.bytes_read) / (2 * keys.data.nbytes)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=int, help="the first few of the shapes only")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the row")
    arguments = parse(parser, argv, context=64, shapes=1)
    if build.problem():
        sys.exit(build.problem())
    found = [paged(shape, arguments.context) for shape in SHAPES[: arguments.shapes]]
    table = Table(title=f"decode attention over {arguments.context:,} tokens, float16, pages of 32 tokens")
    for column in (
        *("q heads", "kv heads", "dim", "queries", "passes", "sets", "threads", "threadgroups", "threadgroup bytes"),
        *("read", "mlx read", "extra"),
    ):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            *map(str, (one.query_heads, one.kv_heads, one.dim, one.queries, one.passes, one.sets, one.threads)),
            f"{one.threadgroups:,}",
            f"{one.threadgroup_bytes:,}",
            f"{one.read:.2f}",
            "" if one.mlx_read is None else f"{one.mlx_read:.2f}",
            f"{one.extra:.3f}",
        )
    Console(width=140).print(table)
    losing = [one for one in found if one.mlx_read is not None and one.read > one.mlx_read]
    print("reads more than mlx's kernel:", losing or "none")
    save(arguments, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
