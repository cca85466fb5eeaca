"""One request on a real model: stock mlx-lm, paged with gather, paged with the best backend, in one process.

    python benchmarks/generate.py [--model PATH] [--prompt 64 2000 4000] [--decode-at 8000] [--tokens 128] [--json FILE]

Prints the time to the first token and decode tokens/s. Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

from mlx_lm import load  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

from tinykv_plugin.bench.single import compare, decode_at, generate  # noqa: E402
from tinykv_plugin.bench.ways import STOCK, vocabulary, ways  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--prompt", nargs="+", type=int, default=[64, 2000, 4000])
    parser.add_argument("--decode-at", nargs="*", type=int, default=[8000])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=None)
    arguments = parse(parser, argv, prompt=[8], decode_at=[40], tokens=4)
    folder = model_folder(arguments)
    model = load(folder)[0]
    wanted = ways(model, **({} if arguments.page_size is None else {"page_size": arguments.page_size}))
    console = Console()
    console.print(f"model {folder}, BLAS {BLAS.name}, {arguments.tokens} tokens")
    table = Table()
    for column in ("prompt", "way", "first token s", "x stock", "decode tokens/s", "x stock", "same tokens"):
        table.add_column(column, justify="right")
    results: dict[str, Any] = {}
    losing = []
    known = vocabulary(model)
    generate(model, 16, 4, known)
    for length in arguments.prompt:
        found = compare(model, length, arguments.tokens, known, wanted, 1)
        base = found[STOCK]
        for way, got in found.items():
            first = base.first_token / got.first_token
            decode = got.tokens_per_second / base.tokens_per_second
            losing += [
                f"{way} {what} at {length}: x{x:.2f}"
                for what, x in (("first token", first), ("decode", decode))
                if x < 1
            ]
            results[f"{length} {way}"] = {
                "first token s": got.first_token,
                "decode tokens/s": got.tokens_per_second,
                "same": got.tokens == base.tokens,
            }
            table.add_row(
                str(length),
                way,
                f"{got.first_token:.2f}",
                f"{first:.2f}",
                f"{got.tokens_per_second:.1f}",
                f"{decode:.2f}",
                str(got.tokens == base.tokens),
            )
    for context in arguments.decode_at:
        stock = 0.0
        for way, settings in wanted.items():
            speed = decode_at(model, context, min(32, arguments.tokens), settings)
            stock = stock or speed
            results[f"decode at {context} {way}"] = speed
            losing += [f"{way} decode at {context}: x{speed / stock:.2f}"] if speed < stock else []
            table.add_row(f"decode at {context}", way, "", "", f"{speed:.1f}", f"{speed / stock:.2f}", "")
    console.print(table)
    console.print("Slower than stock:", *(losing or ["nothing"]), sep="\n  ")
    save(arguments, results)


if __name__ == "__main__":
    main()
