"""Decode attention over quantized K/V: mlx-lm's quantized attention, and pages in each format, side by side.

    python benchmarks/quantized.py [--dtype float32] [--contexts 4096 16384] [--quick] [--json FILE]

Times are medians of calls on cold caches, of one layer and one new token; the formats of one column take turns. "as
pages" is the same backend on pages in the model's dtype. Bytes are those of a token's K and V in one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from attention_calls import Shape, copies_for, dense_calls, medians_ms, paged_calls, some_tokens  # noqa: E402
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


def stock_calls(shape: Shape, dtype: mx.Dtype, bits: int) -> list[Callable[[], mx.array]]:
    """mlx-lm's own attention over its QuantizedKVCache."""
    (context,) = shape.contexts
    queries = mx.random.normal((1, shape.query_heads, 1, shape.dim)).astype(dtype)
    sides = [mx.quantize(some_tokens(shape, context, dtype), group_size=GROUP_SIZE, bits=bits) for _ in range(2)]
    mx.eval(sides)
    packed = [
        [[part + mx.zeros(1, part.dtype) for part in side] for side in sides] for _ in range(copies_for(shape, dtype))
    ]
    mx.eval(queries, packed)
    return [
        lambda keys=keys, values=values: quantized_scaled_dot_product_attention(
            queries, keys, values, scale=shape.dim**-0.5, mask=None, group_size=GROUP_SIZE, bits=bits
        )
        for keys, values in packed
    ]


def measure(shape: Shape, dtype: mx.Dtype, backends: list[Any], seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds of every format, "full" first, with mlx-lm's caches and with each backend that can be used here."""
    cases = {"full": dense_calls(shape, dtype)}
    for label, (key_bits, value_bits) in FORMATS.items():
        if key_bits == value_bits:
            cases[label] = stock_calls(shape, dtype, key_bits)
    found = {"mlx-lm": medians_ms(cases, seconds * len(cases))}
    for backend in backends:
        formats = {"full": KVFormat()} | {name: KVFormat(*bits, GROUP_SIZE) for name, bits in FORMATS.items()}
        calls = {name: paged_calls(shape, dtype, PAGE_SIZE, backend, backend, one) for name, one in formats.items()}
        usable = {name: one for name, one in calls.items() if one is not None}
        if usable:
            found[backend.name] = medians_ms(usable, seconds * len(usable))
    return found


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
                found = measure(shape, dtype, backends, seconds)
                own = found.pop("mlx-lm")
                table = Table("K/V", "bytes", "mlx-lm ms", title=shape.name, title_justify="left")
                for column in found:
                    table.add_column(f"{column} ms (x mlx-lm; x as pages)", justify="right")
                spec = LayerSpec(kv_heads, dim, dim, dtype, dtype)
                for label in ("full", *FORMATS):
                    kv_format = KVFormat(*FORMATS[label], GROUP_SIZE) if label in FORMATS else KVFormat()
                    theirs = own.get(label)
                    cells = [f"{theirs:.2f}" if theirs else "cannot"]
                    for column, times in found.items():
                        ratios = {} if theirs is None else {"mlx-lm's": theirs / times[label]}
                        if label != "full":
                            ratios["full pages"] = times["full"] / times[label]
                        cells.append(f"{times[label]:.2f} ({'; '.join(f'x{ratio:.2f}' for ratio in ratios.values())})")
                        losing += [
                            f"{column}, {shape.name}, {label}: x{ratio:.2f} of {what}"
                            for what, ratio in ratios.items()
                            if ratio < 1
                        ]
                    name_of = f"{label} bits" if label in FORMATS else name
                    table.add_row(name_of, str(spec.stored_as(kv_format).token_bytes()), *cells)
                    results[f"{shape.name} {label}"] = {"mlx-lm": theirs} | {k: v[label] for k, v in found.items()}
                console.print(table)
    console.print("Slower:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
