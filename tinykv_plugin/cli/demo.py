"""``tinykv demo``: a small model, dense and paged, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..config import KVCacheConfig
from ..labels import model_label
from ..units import format_bytes
from .console import console, log_to_stderr
from .failures import FAILED, CommandError
from .flags import take_kv_flags
from .forward import check_plugins
from .parser import command_parser, positive

if TYPE_CHECKING:
    from ..demo.run import Comparison

MAX_TOKENS = 48


def demo(argv: Sequence[str]) -> int:
    """Run the demonstration; 1 if a token differs between dense and paged."""
    fields, rest = take_kv_flags(argv)
    parser = command_parser(
        "demo",
        "Run a small model with mlx-lm's own caches and with paged ones, and compare. Fetches the model "
        "(93 MB) the first time.",
    )
    parser.add_argument("--model", metavar="PATH", type=Path, help="use this local folder; nothing is fetched")
    parser.add_argument("--max-tokens", type=positive, default=MAX_TOKENS, help="tokens per prompt (%(default)s)")
    options = parser.parse_args(rest)
    config = KVCacheConfig(**fields)
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        from ..demo.fetch import fetch_model
        from ..demo.run import compare, tokens_to_do

        folder = fetch_model() if options.model is None else options.model
        model, tokenizer = load_model(folder)
        with progress_bar() as progress:
            task = progress.add_task("generating", total=tokens_to_do(options.max_tokens))
            comparisons = compare(
                model, tokenizer, config, options.max_tokens, lambda count: progress.advance(task, count)
            )
        out = console()
        out.print(f"{model_label(folder)}, greedy, at most {options.max_tokens} tokens a prompt\n")
        for comparison in comparisons:
            print_texts(out, comparison)
        out.print(figures_table(comparisons))
        return print_verdict(out, comparisons)


def progress_bar() -> Progress:
    """A bar on standard error while it is a terminal; it disappears at its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    target = console(stderr=True)
    return Progress(*columns, console=target, transient=True, disable=not target.is_terminal)


def print_texts(out: Console, comparison: Comparison) -> None:
    """What was generated for each prompt: once if both ways agree, else both."""
    table = Table("prompt", "generated", "tokens", title=comparison.title, title_justify="left", show_lines=True)
    dense, paged = comparison.dense, comparison.paged
    for position, prompt in enumerate(comparison.prompts):
        text, verdict = escape(dense.texts[position]), "equal"
        if dense.tokens[position] != paged.tokens[position]:
            text, verdict = f"dense: {text}\npaged: {escape(paged.texts[position])}", "differ"
        table.add_row(escape(prompt), text, verdict)
    out.print(table)


def figures_table(comparisons: Sequence[Comparison]) -> Table:
    """Bytes, waste and speed of both ways."""
    table = Table(
        "",
        "",
        "dense (mlx-lm)",
        "paged",
        title="K/V held (a batch: when it held most), and speed",
        title_justify="left",
    )
    for comparison in comparisons:
        rows = (
            ("K/V bytes held", format_bytes(comparison.dense.bytes_held), format_bytes(comparison.paged.bytes_held)),
            ("  of them in use", format_bytes(comparison.dense.bytes_used), format_bytes(comparison.paged.bytes_used)),
            ("waste in these", f"{comparison.dense.waste:.1%}", f"{comparison.paged.waste:.1%}"),
            ("prompt tokens/s", *_speeds(comparison, "prompt_tokens_per_second")),
            ("generated tokens/s", *_speeds(comparison, "tokens_per_second")),
        )
        for number, row in enumerate(rows):
            table.add_row("" if number else comparison.title, *row, end_section=number == len(rows) - 1)
    return table


def print_verdict(out: Console, comparisons: Sequence[Comparison]) -> int:
    """Say whether all tokens are equal, and return the exit code that says it."""
    count = sum(len(comparison.prompts) for comparison in comparisons)
    if all(comparison.equal for comparison in comparisons):
        out.print(f"the tokens of all {count} prompts are equal, dense and paged")
        return 0
    out.print("the tokens differ between dense and paged: this is a bug, please report it with tinykv --version")
    return FAILED


def _speeds(comparison: Comparison, name: str) -> tuple[str, str]:
    return f"{getattr(comparison.dense, name):.1f}", f"{getattr(comparison.paged, name):.1f}"


def load_model(folder: Path) -> tuple[Any, Any]:
    """A model and its tokenizer. Raises CommandError if they can't be loaded."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder; --model takes the folder of a model in mlx-lm's format")
    from mlx_lm import load

    try:
        loaded = load(str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"the model in {folder} can't be loaded: {type(error).__name__}: {error}") from error
    return loaded[0], loaded[1]
