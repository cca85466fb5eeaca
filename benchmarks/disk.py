"""Decode steps while stored prompts that had to give way are written to disk, beside the same without a folder.

    python benchmarks/disk.py [--model PATH] [--prompts 6] [--length 1000] [--steps 60] [--rounds 3] [--json FILE]

The budget holds two and a half prompts: each one that is stored drives an older one out, whose pages are written to a
temporary folder in the background (setting ``prefix_dir``) while the next is decoded. Rounds with and without take
turns. Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.bench.ways import random_prompt, vocabulary  # noqa: E402

# Prompts that fit; those after them drive others out.
FITTING = 2


def measure(
    model: Any, prompts: list[list[int]], steps: int, memory: int, folder: str | None
) -> tuple[list[float], list[float], int]:
    """Milliseconds of each decode step and of each prompt, and the tokens that gave way meanwhile."""
    decode, first = [], []
    with tinykv.attach(model, memory=memory, prefix_dir=folder) as kv:
        for number, prompt in enumerate(prompts):
            cache, rest = kv.prefix_cache.fetch(prompt)
            start = time.perf_counter()
            logits = model(mx.array([rest]), cache=cache)
            mx.eval(logits)
            if number >= FITTING:
                first.append((time.perf_counter() - start) * 1e3)
            for token in prompt[:steps]:
                start = time.perf_counter()
                mx.eval(model(mx.array([[token]]), cache=cache))
                if number >= FITTING:
                    decode.append((time.perf_counter() - start) * 1e3)
            kv.prefix_cache.insert([*prompt, *prompt[:steps]], cache)
            del cache
        return decode, first, kv.stats().prefix_evicted_tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, argv, prompts=4, length=64, steps=4, rounds=1)
    model, _ = load(model_folder(arguments, dtype="float32"))
    with tinykv.attach(model) as kv:
        token_bytes = sum(group.token_bytes for group in kv.groups)
    memory = int((FITTING + 0.5) * (arguments.length + arguments.steps) * token_bytes)
    known = vocabulary(model)
    prompts = [random_prompt(arguments.length, seed, known) for seed in range(arguments.prompts)]

    found: dict[str, tuple[list[float], list[float]]] = {"memory only": ([], []), "to disk": ([], [])}
    written = evicted = 0
    for _ in range(arguments.rounds):
        for way, (decode, first) in found.items():
            with tempfile.TemporaryDirectory() as folder:
                on_disk = way == "to disk"
                steps, prompt_times, evicted = measure(
                    model, prompts, arguments.steps, memory, folder if on_disk else None
                )
                decode += steps
                first += prompt_times
                if on_disk:
                    written = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))

    console = Console(width=120)
    table = Table("", "decode step ms, p50", "p95", "prompt ms, p50")
    results: dict[str, Any] = {"tokens evicted": evicted, "bytes on disk": written}
    for way, (decode, first) in found.items():
        ordered = sorted(decode)
        figures = statistics.median(ordered), ordered[int(0.95 * len(ordered))], statistics.median(first)
        table.add_row(way, *(f"{figure:.2f}" for figure in figures))
        results[way] = dict(zip(("decode p50 ms", "decode p95 ms", "prompt p50 ms"), figures, strict=True))
    console.print(f"BLAS {BLAS.name}; {evicted} tokens gave way in a round, {written / 1e6:.1f} MB on disk")
    console.print(table)
    ratio = results["to disk"]["decode p50 ms"] / results["memory only"]["decode p50 ms"]
    console.print(f"a decode step takes x{ratio:.2f} while pages are written")
    results["ratio"] = ratio
    save(arguments, results)


if __name__ == "__main__":
    main()
