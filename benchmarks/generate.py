"""One request on a real model: stock mlx-lm, paged with gather, paged with the best backend, in one process.

    python benchmarks/generate.py [--model PATH] [--prompt 64 2000 4000] [--decode-at 8000] [--tokens 128] [--json FILE]

Prints the time to the first token and decode tokens/s. Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402


def measure(model: Any, length: int, tokens: int) -> tuple[float, float, list[int]]:
    """Seconds to the first token, decode tokens/s (from the median step), and the tokens."""
    gc.collect()
    mx.clear_cache()
    rng = random.Random(length)
    prompt = mx.array([rng.randrange(100, 40_000) for _ in range(length)])
    start = time.perf_counter()
    times, found = [], []
    for token, _ in generate_step(prompt, model, max_tokens=tokens, prefill_step_size=512):
        times.append(time.perf_counter())
        found.append(int(token))
    steps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - start, 1 / statistics.median(steps), found


def decode_at(model: Any, context: int, tokens: int, attach: dict[str, Any] | None) -> float:
    """Decode tokens/s after ``context`` tokens whose K/V are random: what matters here is how many there are."""

    def run() -> float:
        cache = make_prompt_cache(model)
        for layer in cache:
            config = model.args
            size = (1, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
            layer.update_and_fetch(mx.random.normal(size), mx.random.normal(size))
            mx.eval(layer.state)
        steps = generate_step(mx.array([7]), model, max_tokens=tokens, prompt_cache=cache)
        times = [time.perf_counter() for _ in steps]
        return 1 / statistics.median(b - a for a, b in itertools.pairwise(times[2:]))

    if attach is None:
        return run()
    with tinykv.attach(model, **attach):
        return run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--prompt", nargs="+", type=int, default=[64, 2000, 4000])
    parser.add_argument("--decode-at", nargs="*", type=int, default=[8000])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.model is None:
        from tinykv_plugin.demo.fetch import fetch_model

        arguments.model = str(fetch_model())
    model, _ = load(arguments.model)
    page = {} if arguments.page_size is None else {"page_size": arguments.page_size}
    ways: dict[str, dict[str, Any] | None] = {"stock": None, "gather": {"attention": "gather"} | page}
    with tinykv.attach(model) as kv:
        backend = kv.plan[0].backend
    if backend != "gather":
        ways[backend] = {"attention": backend} | page
    console = Console()
    console.print(f"model {arguments.model}, BLAS {BLAS.name}, {arguments.tokens} tokens")
    table = Table()
    for column in ("prompt", "way", "first token s", "x stock", "decode tokens/s", "x stock", "same tokens"):
        table.add_column(column, justify="right")
    results: dict[str, Any] = {}
    losing = []
    measure(model, 16, 4)
    for length in arguments.prompt:
        base: tuple[float, float, list[int]] | None = None
        for way, settings in ways.items():
            if settings is None:
                got = measure(model, length, arguments.tokens)
                base = got
            else:
                with tinykv.attach(model, **settings):
                    got = measure(model, length, arguments.tokens)
            assert base is not None
            first, decode = base[0] / got[0], got[1] / base[1]
            losing += [
                f"{way} {what} at {length}: x{x:.2f}"
                for what, x in (("first token", first), ("decode", decode))
                if x < 1
            ]
            results[f"{length} {way}"] = {"first token s": got[0], "decode tokens/s": got[1], "same": got[2] == base[2]}
            table.add_row(
                str(length),
                way,
                f"{got[0]:.2f}",
                f"{first:.2f}",
                f"{got[1]:.1f}",
                f"{decode:.2f}",
                str(got[2] == base[2]),
            )
    for context in arguments.decode_at:
        stock = 0.0
        for way, settings in ways.items():
            speed = decode_at(model, context, min(32, arguments.tokens), settings)
            stock = stock or speed
            results[f"decode at {context} {way}"] = speed
            losing += [f"{way} decode at {context}: x{speed / stock:.2f}"] if speed < stock else []
            table.add_row(f"decode at {context}", way, "", "", f"{speed:.1f}", f"{speed / stock:.2f}", "")
    console.print(table)
    console.print("Slower than stock:", *(losing or ["nothing"]), sep="\n  ")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
