"""Batches of unlike requests, stock mlx-lm and paged side by side in one process.

    python benchmarks/serving.py [--model PATH] [--attention auto] [--scenario a b c d] [--quick] [--json FILE]

a: prompts of 3,000, 500 and 10 tokens together. b: 16 requests of 64 tokens decode, one of 2,048 joins.
c: 32 requests in the K/V bytes that stock needs for a few of them. d: 8 clients with a common 1,000-token prefix.
Without --model the demo model SmolLM2-135M is fetched. Every answer is compared with stock's.
"""

from __future__ import annotations

import argparse
import json

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

from mlx_lm import load  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tinykv_plugin.bench.batches import compare, scenarios  # noqa: E402
from tinykv_plugin.bench.ways import vocabulary  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--scenario", nargs="+", default=["a", "b", "c", "d"], choices=["a", "b", "c", "d"])
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.model is None:
        from tinykv_plugin.demo.fetch import fetch_model

        arguments.model = str(fetch_model())
    model = load(arguments.model)[0]
    console = Console()
    console.print(f"model {arguments.model}, BLAS {BLAS.name}")
    results = {}
    for name, requests in scenarios(4 if arguments.quick else 1, vocabulary(model)).items():
        if name not in arguments.scenario:
            continue
        found = compare(model, name, requests, arguments.attention)
        results[name] = found.rows
        table = Table(title=f"scenario {name}: {found.equal} of {len(requests)} answers equal stock's")
        table.add_column("")
        for column in next(iter(found.rows.values())):
            table.add_column(column, justify="right")
        for label, numbers in found.rows.items():
            table.add_row(label, *(f"{value:,.2f}" for value in numbers.values()))
        console.print(table)
        console.print(f"paged loses on: {', '.join(found.losing) or 'nothing'}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
