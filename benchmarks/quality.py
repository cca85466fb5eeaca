"""Perplexity of a model with K/V in full precision and quantized: pages, and mlx-lm's own quantized cache.

    python benchmarks/quality.py [--model PATH] [--tokens 20480] [--context 2048] [--json FILE]

The text is the First Book of Samuel (benchmarks/texts). It is cut into contexts that are processed in chunks of 256
tokens, each reading the chunks before it from the cache. Every format is measured on a context before the next one is
begun: with --json the file is written after each, and a run that was broken off goes on where it stopped. Without
--model the demo model SmolLM2-135M is fetched.

mlx-lm's cache quantizes as it always does, but its K and V are dequantized before attention: the numbers are the same
up to rounding, which is checked first, and its quantized matrix product takes several times as long on a CPU.

What pages hold is what mlx-lm's cache holds, bit for bit: read by gather 8 bits give the same losses, which is shown
first; with fewer bits a token reads its own page in full precision. The backend that is measured rounds differently
(nearer to float64: benchmarks/rounding.py); rounded to few bits in layer after layer, that grows to what the two
columns of 8 bits differ by, in one direction or the other. How far they are apart has a standard error of its own, from
context to context: many short contexts (--context 256) tell more than few long ones, as all tokens of a context depend
on how its first ones were rounded.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.models import base  # noqa: E402
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402

TEXT = Path(__file__).parent / "texts" / "samuel.txt"
CHUNK = 256
GROUP_SIZE = 64
FULL = "full precision"
FORMATS: dict[str, dict[str, int]] = {
    FULL: {},
    "8 bits": {"bits": 8},
    "6 bits": {"bits": 6},
    "4 bits": {"bits": 4},
    "K8V4": {"key_bits": 8, "value_bits": 4},
}


def dequantized_attention(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, group_size: int, bits: int
) -> mx.array:
    """What mlx-lm's ``quantized_scaled_dot_product_attention`` computes."""
    keys, values = (mx.dequantize(*side, group_size=group_size, bits=bits) for side in (keys, values))
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def check_attention() -> None:
    """That it does compute that."""
    mx.random.seed(0)
    queries = mx.random.normal((1, 9, 8, 64))
    for bits in (8, 6, 4):
        keys, values = (mx.quantize(mx.random.normal((1, 3, 40, 64)), GROUP_SIZE, bits) for _ in range(2))
        case = (queries, keys, values, 0.125, "causal", GROUP_SIZE, bits)
        error = mx.abs(dequantized_attention(*case) - base.quantized_scaled_dot_product_attention(*case)).max()
        assert float(error) < 1e-5, f"{bits} bits: {float(error)}"
    base.quantized_scaled_dot_product_attention = dequantized_attention


def losses(model: Any, tokens: mx.array, cache: Any) -> np.ndarray:
    """Minus the logarithm of the probability of every token but the first."""
    found = []
    for start in range(0, tokens.size - 1, CHUNK):
        stop = min(start + CHUNK, tokens.size - 1)
        logits = model(tokens[None, start:stop], cache=cache)[0].astype(mx.float32)
        chosen = mx.take_along_axis(logits, tokens[start + 1 : stop + 1, None], axis=1)[:, 0]
        found.append(np.array(mx.logsumexp(logits, axis=1) - chosen))
    return np.concatenate(found).astype(np.float64)


def with_pages(model: Any, tokens: mx.array, fields: dict[str, int], attention: str = "auto") -> tuple[np.ndarray, int]:
    """The losses with paged caches, and the bytes of a token in the pages."""
    with tinykv.attach(model, attention=attention, **fields) as kv:
        found = losses(model, tokens, make_prompt_cache(model))
        stats = kv.stats()
        # The arrays themselves, for those who don't believe the statistics.
        pools = [[*pool.layers.values()] for pool in kv.session.pools]
        held = [sum(a.nbytes for pages in pool for a in (pages.keys, pages.values)) for pool in pools]
        assert sum(held) == stats.bytes_reserved, (held, stats)
        assert held[0] == pools[0][0].num_pages * pools[0][0].page_size * stats.bytes_per_token, (held, stats)
        return found, stats.bytes_per_token


def with_mlx_lm(model: Any, fields: dict[str, int]) -> Callable[[], Any] | None:
    """mlx-lm's cache of that format; None where it has none."""
    if not fields:
        return lambda: make_prompt_cache(model)
    if "bits" not in fields:
        return None
    return lambda: [QuantizedKVCache(GROUP_SIZE, fields["bits"]) for _ in model.layers]


def apart(model: Any, tokens: mx.array) -> float:
    """The largest difference of the losses with mlx-lm's cache of 8 bits and with pages that gather reads."""
    own = losses(model, tokens, [QuantizedKVCache(GROUP_SIZE, 8) for _ in model.layers])
    gathered, _ = with_pages(model, tokens, {"bits": 8}, attention="gather")
    return float(np.abs(own - gathered).max())


def measure(model: Any, tokens: mx.array) -> dict[str, Any]:
    """Sums over one context, for every format: of the losses, and of their differences to full precision."""
    row: dict[str, Any] = {"predicted": tokens.size - 1}
    full: np.ndarray | None = None
    for name, fields in FORMATS.items():
        own_cache = with_mlx_lm(model, fields)
        paged, size = with_pages(model, tokens, fields)
        found = {"pages": paged}
        if own_cache is not None:
            found["mlx-lm"] = losses(model, tokens, own_cache())
        full = found["mlx-lm"] if full is None else full
        row[name] = {"bytes a token": size}
        for engine, values in found.items():
            more = values - full
            row[name][engine] = {
                "loss": float(values.sum()),
                "more": float(more.sum()),
                "more squared": float((more**2).sum()),
            }
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexities over all contexts, and the relative difference to full precision with its standard error."""
    count = sum(row["predicted"] for row in rows)
    table: dict[str, Any] = {"tokens predicted": count}
    for name in FORMATS:
        table[name] = {"bytes a token": rows[0][name]["bytes a token"]}
        for engine in ("pages", "mlx-lm"):
            if engine not in rows[0][name]:
                continue
            sums = {key: sum(row[name][engine][key] for row in rows) for key in rows[0][name][engine]}
            more = sums["more"] / count
            variance = max(0.0, sums["more squared"] / count - more**2)
            table[name][engine] = {
                "perplexity": math.exp(sums["loss"] / count),
                "change": math.expm1(more),
                "standard error": math.sqrt(variance / count),
            }
        if "mlx-lm" in table[name]:
            apart = [(row[name]["pages"]["loss"] - row[name]["mlx-lm"]["loss"]) / row["predicted"] for row in rows]
            spread = float(np.std(apart, ddof=1)) if len(apart) > 1 else 0.0
            table[name]["pages against mlx-lm"] = {
                "change": math.expm1(float(np.mean(apart))),
                "standard error": spread / math.sqrt(len(apart)),
            }
    return table


def show(console: Console, table: dict[str, Any]) -> None:
    """Print a summary."""
    shown = Table("K/V", "bytes a token", "pages", "mlx-lm's cache", "pages against mlx-lm's cache")
    for name in FORMATS:
        cells = []
        for engine in ("pages", "mlx-lm"):
            found = table[name].get(engine)
            text = "cannot"
            if found:
                text = f"{found['perplexity']:.4f} ({found['change']:+.3%} ± {found['standard error']:.3%})"
            cells.append(text)
        apart = table[name].get("pages against mlx-lm")
        cells.append(f"{apart['change']:+.3%} ± {apart['standard error']:.3%}" if apart else "")
        shown.add_row(name, str(table[name]["bytes a token"]), *cells)
    console.print(shown)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model in mlx-lm's format")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=2048)
    arguments = parse(parser, argv, tokens=128, context=64)
    folder = model_folder(arguments, dtype="float32")
    check_attention()
    model, tokenizer = load(folder)
    tokens = mx.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: arguments.tokens])
    contexts = [tokens[start : start + arguments.context] for start in range(0, tokens.size, arguments.context)]
    settings = {"model": Path(folder).name, "context": arguments.context, "chunk": CHUNK, "of": tokens.size}
    results: dict[str, Any] = {**settings, "contexts": []}
    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text(encoding="utf-8"))
        if {key: before.get(key) for key in settings} != settings:
            parser.error(f"{arguments.json} holds other measurements: choose another file, or delete it")
        results = before
    console = Console(width=120)
    console.print(f"{tokens.size} tokens in {len(contexts)} contexts; BLAS {BLAS.name}")
    first = apart(model, tokens[:512])
    console.print(f"512 tokens, 8 bits: losses with mlx-lm's cache and with pages read by gather are {first:.1g} apart")
    rows = results["contexts"]
    for context in contexts[len(rows) :]:
        start = time.perf_counter()
        rows.append(measure(model, context))
        results["summary"] = summary(rows)
        console.print(f"context {len(rows)} of {len(contexts)}: {time.perf_counter() - start:.0f} s")
        save(arguments, results)
    show(console, results["summary"])


if __name__ == "__main__":
    main()
