"""How near attention over quantized K/V comes to what it would be in float64: pages, and mlx-lm's quantized attention.

    python benchmarks/rounding.py [--model PATH] [--tokens 1024] [--queries 1 4 256] [--json FILE]

Queries, keys and values are those of a model on a text (benchmarks/texts), layer by layer. K and V are quantized once;
what is compared is only how they are read: dequantized, multiplied and added, in float32. The error is the root of the
mean square of the differences, relative to the output, on average over the layers. Without --model the demo model
SmolLM2-135M is fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.models.base import quantized_scaled_dot_product_attention  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.cli.patches import replaced  # noqa: E402
from tinykv_plugin.manager import default_manager  # noqa: E402

TEXT = Path(__file__).parent / "texts" / "samuel.txt"
GROUP_SIZE = 64
ATTENTION = "scaled_dot_product_attention"

# Queries, keys and values of a layer, and the factor of the scores.
Call = tuple[mx.array, mx.array, mx.array, float]


def calls_of(model: Any, tokens: mx.array) -> list[Call]:
    """What the model gives to attention, in every layer."""
    module, found = sys.modules[type(model).__module__], []
    own = getattr(module, ATTENTION)

    def note(queries: mx.array, keys: mx.array, values: mx.array, *more: Any, scale: float, **options: Any) -> mx.array:
        found.append((queries, keys, values, scale))
        result: mx.array = own(queries, keys, values, *more, scale=scale, **options)
        return result

    with replaced(module, ATTENTION, note):
        mx.eval(model(tokens[None], cache=make_prompt_cache(model)), found)
    return found


def exact(side: mx.array, bits: int) -> np.ndarray:
    """``side`` quantized and dequantized, in float64."""
    packed, scales, biases = mx.quantize(side, GROUP_SIZE, bits)
    elements = mx.dequantize(packed, mx.ones_like(scales), mx.zeros_like(biases), GROUP_SIZE, bits)
    scales, biases = (np.repeat(np.array(x, dtype=np.float64), GROUP_SIZE, axis=-1) for x in (scales, biases))
    return np.array(elements, dtype=np.float64) * scales + biases


def in_float64(call: Call, queries: int, bits: int) -> np.ndarray:
    """The output for the last ``queries`` tokens."""
    q, keys, values, scale = call
    k, v = exact(keys, bits), exact(values, bits)
    groups = q.shape[1] // k.shape[1]
    last = np.array(q[:, :, -queries:], dtype=np.float64)
    scores = last @ np.repeat(k, groups, axis=1).swapaxes(2, 3) * scale
    context = k.shape[2]
    scores += np.where(np.arange(context) <= np.arange(context - queries, context)[:, None], 0, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(v, groups, axis=1)


def with_pages(model: Any, calls: Sequence[Call], queries: int, bits: int, backend: str) -> list[mx.array] | None:
    """The outputs with pages that ``backend`` reads; None if it can't be used here."""
    module = sys.modules[type(model).__module__]
    with tinykv.attach(model, attention=backend, bits=bits, group_size=GROUP_SIZE) as kv:
        if kv.plan[0].backend != backend:
            return None
        caches = make_prompt_cache(model)
        for cache, (_, keys, values, _) in zip(caches, calls, strict=True):
            cache.update_and_fetch(keys[:, :, :-queries], values[:, :, :-queries])
        mask, found = caches[0].make_mask(queries), []
        for cache, (q, keys, values, scale) in zip(caches, calls, strict=True):
            handles = cache.update_and_fetch(keys[:, :, -queries:], values[:, :, -queries:])
            output = getattr(module, ATTENTION)(q[:, :, -queries:], *handles, cache=cache, scale=scale, mask=mask)
            found.append(output)
        mx.eval(found)
        return found


def with_mlx_lm(calls: Sequence[Call], queries: int, bits: int) -> list[mx.array]:
    """The outputs of mlx-lm's quantized attention."""
    mask = "causal" if queries > 1 else None
    return [
        quantized_scaled_dot_product_attention(
            q[:, :, -queries:],
            *(mx.quantize(side, GROUP_SIZE, bits) for side in (keys, values)),
            scale=scale,
            mask=mask,
            group_size=GROUP_SIZE,
            bits=bits,
        )
        for q, keys, values, scale in calls
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model in mlx-lm's format")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 4, 256])
    arguments = parse(parser, argv, tokens=48, queries=[1, 8])
    model, tokenizer = load(model_folder(arguments, dtype="float32"))
    calls = calls_of(model, mx.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: arguments.tokens]))
    names = [one.name for one in default_manager().backends("auto") if getattr(one, "reads_quantized", False)]
    console = Console(width=120)
    results: dict[str, dict[str, float]] = {}
    for bits in (8, 6, 5, 4):
        for queries in arguments.queries:
            right = [in_float64(call, queries, bits) for call in calls]
            found = {"mlx-lm": with_mlx_lm(calls, queries, bits)}
            for name in names:
                outputs = with_pages(model, calls, queries, bits, name)
                if outputs is not None:
                    found[name] = outputs
            results[f"{bits} bits, {queries} new tokens"] = {
                name: float(np.mean([relative(*pair) for pair in zip(outputs, right, strict=True)]))
                for name, outputs in found.items()
            }
    columns = list(next(iter(results.values())))
    table = Table("K/V", *columns)
    for case, errors in results.items():
        table.add_row(case, *(f"{errors[name]:.2e}" for name in columns))
    console.print(table)
    save(arguments, results)


def relative(found: mx.array, right: np.ndarray) -> float:
    """The error of an output, relative to it."""
    apart = np.array(found, dtype=np.float64) - right
    return float(np.sqrt(np.square(apart).mean() / np.square(right).mean()))


if __name__ == "__main__":
    main()
