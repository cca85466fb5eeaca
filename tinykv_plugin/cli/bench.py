"""``tinykv bench``: the benchmark suite on this machine, or a comparison of two runs of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import KVCacheConfig
from ..labels import model_label
from ..whole_file import write_whole
from .console import console, log_to_stderr
from .demo import load_model, progress_bar
from .failures import FAILED, CommandError
from .flags import take_kv_flags
from .forward import check_plugins
from .parser import command_parser

OUTPUT = "tinykv-bench"

# Settings with which answers may differ from stock's.
LOSSY = {"bits", "key_bits", "value_bits", "max_kv_size"}


def bench(argv: Sequence[str]) -> int:
    """Measure and write the results; 1 if an answer differs from stock's."""
    fields, rest = take_kv_flags(argv)
    parser = command_parser(
        "bench",
        "Measure stock mlx-lm and paged caches side by side: one request by context, batches, memory over "
        "time. Takes at most about 12 minutes, and names what it leaves out to stay within them. Writes a JSON file "
        "and an HTML report after each measurement: ctrl-C loses nothing. Fetches a small model (93 MB) if none is "
        "given.",
    )
    parser.add_argument("--model", metavar="PATH", type=Path, help="use this local folder; nothing is fetched")
    parser.add_argument(
        "--quick", action="store_true", help="a fraction of the tokens: a minute or so, at most about 3"
    )
    parser.add_argument(
        "--output", metavar="NAME", type=Path, default=Path(OUTPUT), help="write NAME.json and NAME.html (%(default)s)"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), type=Path, help="measure nothing: B beside A"
    )
    options = parser.parse_args(rest)
    if options.compare:
        return compare(*options.compare)
    config = KVCacheConfig(**fields)
    folder = options.output.parent
    if not folder.is_dir():
        raise CommandError(f"--output {options.output}: there is no folder {folder}")
    files = _Files(options.output)
    try:
        with log_to_stderr(verbose=config.verbose):
            check_plugins(config)
            results = measure(options.model, options.quick, dict(fields), files.save)
    except BaseException:
        if files.saved:
            print(f"tinykv: ended early; the figures so far are in {files}", file=sys.stderr)
        raise
    out = console()
    code = print_results(out, results)
    out.print(f"written: {files}", soft_wrap=True)
    return code


def _write(text: str, name: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


class _Files:
    """The two files that a run leaves, brought up to date by each :meth:`save`."""

    def __init__(self, output: Path) -> None:
        self._json, self._html = (output.with_name(f"{output.name}.{kind}") for kind in ("json", "html"))
        self.saved = False

    def save(self, results: dict[str, Any]) -> None:
        from ..bench.report import report

        for path, text in ((self._json, json.dumps(results, indent=1) + "\n"), (self._html, report(results))):
            write_whole(path, partial(_write, text))
        self.saved = True

    def __str__(self) -> str:
        return f"{self._json}, {self._html}"


def measure(
    path: Path | None, quick: bool, settings: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the suite with a bar that shows how far it is; ``save`` gets the results whenever there are more."""
    from ..bench.suite import FULL, QUICK, case_names, run_suite
    from ..demo.fetch import fetch_model

    folder = fetch_model() if path is None else path
    model, _ = load_model(folder)
    plan = QUICK if quick else FULL
    with progress_bar() as progress:
        names = case_names(plan)
        task = progress.add_task(f"warming up ({len(names)} to come)", total=len(names) + 1)

        def advance(name: str) -> None:
            if progress.disable:  # no terminal: lines in a log
                print(f"tinykv: {names.index(name) + 1} of {len(names)}: {name}", file=sys.stderr, flush=True)
            progress.update(task, advance=1, description=f"{name} ({len(names) - names.index(name) - 1} to come)")

        settings.pop("attention", None)  # each way has its own
        return run_suite(model, model_label(folder), plan, advance, settings, save)


def print_results(out: Console, results: dict[str, Any]) -> int:
    """Every figure beside stock's, what loses, and whether the answers are equal."""
    from ..bench.results import against_stock, differing, losing, not_run, shown

    table = Table("case", "quantity", "way", title=escape(f"{results['model']}, paged beside stock"))
    for column in ("stock", "paged", "ratio"):
        table.add_column(column, justify="right")
    for figure, base, factor in against_stock(results):
        table.add_row(figure.case, figure.quantity, figure.way, shown(base), shown(figure.value), f"x{factor:.2f}")
    out.print(table)
    worse = losing(results)
    out.print("worse than stock (ratios below 1):" if worse else "nothing is worse than stock", soft_wrap=True)
    for line in worse:
        out.print(f"  {escape(line)}", soft_wrap=True)
    for line in not_run(results):
        out.print(f"not run: {escape(line)}", soft_wrap=True)
    wrong = differing(results)
    if wrong:
        out.print(f"answers differ from stock's: {'; '.join(wrong)}", soft_wrap=True)
        lossy = sorted(LOSSY & set(results["settings"]))
        if lossy:
            out.print(f"as they may with {', '.join(lossy)}")
        return 0 if lossy else FAILED
    out.print("every answer is the one of stock mlx-lm")
    return 0


def compare(first: Path, second: Path) -> int:
    """Print the figures of two results side by side."""
    from ..bench.results import compare, differences, read, shown

    old, new = read(first), read(second)
    table = Table("case", "quantity", "way", title=escape(f"{second} beside {first}"))
    for column in ("A", "B", "ratio"):
        table.add_column(column, justify="right")
    for figure, base, factor in compare(old, new):
        table.add_row(figure.case, figure.quantity, figure.way, shown(base), shown(figure.value), f"x{factor:.2f}")
    out = console()
    if table.row_count:
        out.print(table)
        out.print("ratios above 1: B is better")
    else:
        out.print("the two have no case in common")
    for line in differences(old, new):
        out.print(f"not the same: {escape(line)}", soft_wrap=True)
    return 0
