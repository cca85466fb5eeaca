"""Decode attention over quantized K/V: mlx-lm's quantized attention, and pages in each format, side by side.

    python benchmarks/quantized.py [--dtype float32] [--contexts 4096 16384] [--quick] [--json FILE]

Times are medians of calls on cold caches, of one layer and one new token. "as pages" is the same backend on pages in
the model's dtype. Bytes are those of a token's K and V in one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from attention import Shape, copies_for, dense, median_ms, paged, some_tokens  # noqa: E402
from mlx_lm.models.base import quantized_scaled_dot_product_attention  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402

from tinykv_plugin.kv_format import KVFormat  # noqa: E402
from tinykv_plugin.manager import default_manager  # noqa: E402
from tinykv_plugin.pages import LayerSpec  # noqa: E402

PAGE_SIZE = 32
GROUP_SIZE = 64
FORMATS = {"8": (8, 8), "6": (6, 6), "4": (4, 4), "K8V4": (8, 4)}
HEADS = {"9 query heads, 3 kv heads of 64": (9, 3, 64), "32 query heads, 8 kv heads of 128": (32, 8, 128)}


def stock(shape: Shape, dtype: mx.Dtype, bits: int, seconds: float) -> float:
    """mlx-lm's own attention over its QuantizedKVCache."""
    (context,) = shape.contexts
    queries = mx.random.normal((1, shape.query_heads, 1, shape.dim)).astype(dtype)
    sides = [mx.quantize(some_tokens(shape, context, dtype), group_size=GROUP_SIZE, bits=bits) for _ in range(2)]
    mx.eval(sides)
    packed = [
        [[part + mx.zeros(1, part.dtype) for part in side] for side in sides] for _ in range(copies_for(shape, dtype))
    ]
    mx.eval(queries, packed)
    return median_ms(
        [
            lambda keys=keys, values=values: quantized_scaled_dot_product_attention(
                queries, keys, values, scale=shape.dim**-0.5, mask=None, group_size=GROUP_SIZE, bits=bits
            )
            for keys, values in packed
        ],
        seconds,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--quick", action="store_true", help="short measurements")
    arguments = parse(parser, argv, contexts=[64], quick=True)
    seconds = 0.0 if arguments.smoke else 0.2 if arguments.quick else 0.6
    plugins = default_manager()
    backends = [backend for backend in plugins.backends("auto") if getattr(backend, "reads_quantized", False)]
    console = Console(width=150)
    console.print(f"BLAS {BLAS.name}")
    results: dict[str, Any] = {}
    losing: list[str] = []
    for name in arguments.dtype:
        dtype = getattr(mx, name)
        for title, (query_heads, kv_heads, dim) in HEADS.items():
            for context in arguments.contexts:
                shape = Shape(f"{title}, {context} tokens, {name}", (context,), query_heads, kv_heads, dim)
                table = Table("K/V", "bytes", "mlx-lm ms", title=shape.name, title_justify="left")
                full: dict[str, float] = {}
                for backend in backends:
                    time = paged(shape, dtype, PAGE_SIZE, backend, backend, seconds)
                    if time is not None:  # it can be used here
                        table.add_column(f"{backend.name} ms (x mlx-lm; x as pages)", justify="right")
                        full[backend.name] = time
                spec = LayerSpec(kv_heads, dim, dim, dtype, dtype)
                own = dense(shape, dtype, seconds)
                cells = [f"{time:.2f} (x{own / time:.1f})" for time in full.values()]
                table.add_row(name, str(spec.token_bytes()), f"{own:.2f}", *cells)
                results[f"{shape.name} full"] = {"mlx-lm": own, **full}
                for label, (key_bits, value_bits) in FORMATS.items():
                    kv_format = KVFormat(key_bits, value_bits, GROUP_SIZE)
                    theirs = stock(shape, dtype, key_bits, seconds) if key_bits == value_bits else None
                    row: dict[str, Any] = {"mlx-lm": theirs}
                    cells = []
                    for backend in backends:
                        if backend.name not in full:
                            continue
                        time = paged(shape, dtype, PAGE_SIZE, backend, backend, seconds, kv_format)
                        assert time is not None
                        row[backend.name] = time
                        as_pages = full[backend.name] / time
                        ratio = f"x{theirs / time:.1f}; " if theirs else ""
                        cells.append(f"{time:.2f} ({ratio}x{as_pages:.2f})")
                        if theirs and theirs < time:
                            losing.append(
                                f"{backend.name}, {shape.name}, {label} bits: x{theirs / time:.2f} of mlx-lm's"
                            )
                        if as_pages < 1:
                            losing.append(f"{backend.name}, {shape.name}, {label} bits: x{as_pages:.2f} of full pages")
                    size = spec.stored_as(kv_format).token_bytes()
                    table.add_row(f"{label} bits", str(size), f"{theirs:.2f}" if theirs else "cannot", *cells)
                    results[f"{shape.name} {label}"] = row
                console.print(table)
    console.print("Slower:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
