"""``tinykv inspect``: how a model's layers are served, and what fits the budget. Reads no weights."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ..config import KVCacheConfig
from ..protocols import LayerPlan
from ..units import format_bytes
from .capacity import GroupSize, longest_request, request_bytes, requests_that_fit, stock_request_bytes
from .console import console, log_to_stderr
from .failures import CommandError
from .flags import flags_help, take_kv_flags
from .forward import check_plugins
from .models import model_label

if TYPE_CHECKING:
    from ..attachment import Attachment

CHAT_TOKENS = 4096


def inspect(argv: Sequence[str]) -> int:
    """Print the plan of a model in a local folder and its sizes."""
    fields, rest = take_kv_flags(argv)
    parser = argparse.ArgumentParser(
        prog="tinykv inspect",
        description="Show how each layer of a model is served, and what fits the page budget. Reads no weights.",
        epilog=flags_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("--trust-remote-code", action="store_true", help="run a model file that the folder brings")
    options = parser.parse_args(rest)
    config = KVCacheConfig(**fields)
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        from ..attachment import attach

        with attach(load_lazily(options.model, options.trust_remote_code), config) as kv:
            out = console()
            out.print(plan_table(kv.plan, model_label(options.model)))
            groups = group_sizes(kv)
            if groups:
                out.print(size_table(groups, kv.stats().bytes_total))
            else:
                out.print(f"no layer of this model is kept in pages of ours (cache: {escape(config.cache)})")
    return 0


def load_lazily(folder: Path, trust_remote_code: bool) -> Any:
    """The model in ``folder``, its weights not read from the disk. Raises CommandError if it can't be built."""
    if not folder.is_dir():
        raise CommandError(f"{folder} is no folder; inspect takes the folder of a model in mlx-lm's format")
    utils: Any = importlib.import_module("mlx_lm.utils")
    try:
        return utils.load_model(folder, lazy=True, trust_remote_code=trust_remote_code)[0]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"the model in {folder} can't be loaded: {type(error).__name__}: {error}") from error


def plan_table(plan: Sequence[LayerPlan], label: str) -> Table:
    """The plan, neighbouring layers that are served alike in one row."""
    columns = ("layers", "kind", "window", "stored as", "attention", "backend", "reason")
    table = Table(*columns, title=label, title_justify="left")
    alike = groupby(
        plan, key=lambda line: (line.kind, line.window, line.storage, line.attention, line.backend, line.reason)
    )
    for (kind, window, storage, attention, backend, reason), lines in alike:
        numbers = [line.layer for line in lines]
        layers = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        cells = (layers, kind, "" if window is None else f"{window:,}", storage, attention, backend, reason)
        table.add_row(*map(escape, cells))
    return table


def group_sizes(kv: Attachment) -> list[GroupSize]:
    """The groups of an attachment as the arithmetic needs them."""
    config = kv.config
    sizes = []
    for group in kv.groups:
        held = None
        if group.window is not None:
            held = group.window + config.rewind
        elif config.max_kv_size is not None:
            # The first tokens, which stay, take a page of their own.
            held = config.max_kv_size + config.rewind + group.page_size
        sizes.append(
            GroupSize(group.window, held, group.page_size, group.page_bytes, group.page_limit, group.model_token_bytes)
        )
    return sizes


def size_table(groups: Sequence[GroupSize], budget: int) -> Table:
    """Bytes of a token and a page, what the budget holds, and what mlx-lm's own caches would take."""
    page = sum(group.page_bytes for group in groups)
    chat, stock = request_bytes(groups, CHAT_TOKENS), stock_request_bytes(groups, CHAT_TOKENS)
    longest = longest_request(groups, budget)
    table = Table("size", "value", title="K/V of all layers in pages", title_justify="left")
    table.add_row("a token", format_bytes(sum(group.token_bytes for group in groups)))
    table.add_row(f"a page of {groups[0].page_size} tokens", format_bytes(page))
    table.add_row("the budget", format_bytes(budget))
    table.add_row(
        "longest request", "no limit: all layers keep a bounded number" if longest is None else f"{longest:,} tokens"
    )
    table.add_row(f"chats of {CHAT_TOKENS:,} tokens", f"{requests_that_fit(groups, budget, CHAT_TOKENS):,}")
    table.add_row("such a chat in pages", format_bytes(chat))
    table.add_row("such a chat in mlx-lm's own caches", format_bytes(stock))
    return table
