"""Perplexity of a model with K/V in full precision and quantized: pages, and mlx-lm's own quantized cache.

    python benchmarks/quality.py [--model PATH] [--tokens 20480] [--context 2048] [--json FILE]

The text is the First Book of Samuel (benchmarks/texts). It is cut into contexts that are processed in chunks of 256
tokens, each reading the chunks before it from the cache. Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402

TEXT = Path(__file__).parent / "texts" / "samuel.txt"
CHUNK = 256
FORMATS: dict[str, dict[str, int]] = {
    "8 bits": {"bits": 8},
    "6 bits": {"bits": 6},
    "4 bits": {"bits": 4},
    "K8V4": {"key_bits": 8, "value_bits": 4},
}


def perplexity(model: Any, contexts: list[mx.array], make_cache: Callable[[], Any]) -> tuple[float, float]:
    """Of every token but the first of each context; and the standard error of its logarithm."""
    losses = []
    for tokens in contexts:
        cache = make_cache()
        for start in range(0, tokens.size - 1, CHUNK):
            stop = min(start + CHUNK, tokens.size - 1)
            logits = model(tokens[None, start:stop], cache=cache)[0].astype(mx.float32)
            target = tokens[start + 1 : stop + 1]
            chosen = mx.take_along_axis(logits, target[:, None], axis=1)[:, 0]
            loss = mx.logsumexp(logits, axis=1) - chosen
            mx.eval(loss)
            losses.append(loss)
    every = mx.concatenate(losses)
    return math.exp(float(every.mean())), float(mx.std(every)) / math.sqrt(every.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model in mlx-lm's format")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.model is None:
        from tinykv_plugin.demo.fetch import fetch_model

        arguments.model = str(fetch_model(dtype="float32"))
    model, tokenizer = load(arguments.model)
    tokens = mx.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: arguments.tokens])
    contexts = [tokens[start : start + arguments.context] for start in range(0, tokens.size, arguments.context)]
    console = Console(width=120)
    console.print(f"{tokens.size} tokens in {len(contexts)} contexts; BLAS {BLAS.name}")
    table = Table("K/V", "bytes a token", "pages", "mlx-lm's cache")
    results: dict[str, Any] = {"tokens": tokens.size, "context": arguments.context}

    def ours(fields: dict[str, int]) -> tuple[float, int]:
        with tinykv.attach(model, **fields) as kv:
            found, _ = perplexity(model, contexts, lambda: make_prompt_cache(model))
            # The arrays themselves, for those who don't believe the statistics.
            stats = kv.stats()
            held = sum(
                array.nbytes
                for pool in kv.session.pools
                for pages in pool.layers.values()
                for array in pages.state()[:2]
            )
            slots = stats.bytes_reserved // stats.bytes_per_token
            assert held == stats.bytes_reserved, (held, stats.bytes_reserved)
            return found, held // slots

    full, error = perplexity(model, contexts, lambda: make_prompt_cache(model))
    paged, size = ours({})
    results["full"] = {"pages": paged, "mlx-lm": full, "bytes": size, "standard error of the logarithm": error}
    console.print(f"full: {paged:.4f} (pages), {full:.4f} (mlx-lm)")
    table.add_row("full precision", str(size), f"{paged:.4f}", f"{full:.4f}")
    for name, fields in FORMATS.items():
        paged, size = ours(fields)
        bits = fields.get("bits")
        own = None
        if bits is not None:
            own, _ = perplexity(model, contexts, lambda b=bits: [QuantizedKVCache(64, b) for _ in model.layers])
        results[name] = {"pages": paged, "mlx-lm": own, "bytes": size}
        cells = [f"{value:.4f} ({value / full - 1:+.3%})" if value else "cannot" for value in (paged, own)]
        console.print(name, *cells)
        table.add_row(name, str(size), *cells)
    console.print(table)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
