"""Batches of unlike requests, stock mlx-lm and paged side by side in one process.

    python benchmarks/serving.py [--model PATH] [--attention auto] [--scenario a b c d] [--quick] [--json FILE]

a: prompts of 3,000, 500 and 10 tokens together. b: 16 requests of 64 tokens decode, one of 2,048 joins.
c: 32 requests in the K/V bytes that stock needs for a few of them. d: 8 clients with a common 1,000-token prefix.
Without --model the demo model SmolLM2-135M is fetched. Every answer is compared with stock's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

from mlx_lm import load  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

from tinykv_plugin.bench.batches import compare, scenarios  # noqa: E402
from tinykv_plugin.bench.ways import vocabulary  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--scenario", nargs="+", default=["a", "b", "c", "d"], choices=["a", "b", "c", "d"])
    parser.add_argument("--divide", type=int, default=1, help="divide the lengths of prompts and answers by this")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
    arguments = parse(parser, argv, divide=64)
    folder = model_folder(arguments)
    model = load(folder)[0]
    console = Console()
    console.print(f"model {folder}, BLAS {BLAS.name}")
    results = {}
    for name, requests in scenarios(4 if arguments.quick else arguments.divide, vocabulary(model)).items():
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
    save(arguments, results)


if __name__ == "__main__":
    main()
