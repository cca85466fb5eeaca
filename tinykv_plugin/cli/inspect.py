"""``tinykv inspect``: how a model's layers are served, and what fits the budget. Reads no weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import KVCacheConfig
from ..errors import ConfigError
from ..labels import model_label
from ..protocols import LayerPlan
from ..units import format_bytes
from .capacity import GroupSize, longest_request, request_bytes, requests_that_fit, stock_request_bytes
from .console import console, log_to_stderr
from .fit import Machine, Stored, Wish, advice, fit_table, machine_line, memory, tokens
from .flags import take_kv_flags
from .forward import check_plugins
from .model_files import LazyModel, load_lazily
from .parser import command_parser, positive

if TYPE_CHECKING:
    from ..attachment import Attachment

CHAT_TOKENS = 4096


def inspect(argv: Sequence[str]) -> int:
    """Print the plan of a model and its sizes, and what would fit a machine."""
    fields, rest = take_kv_flags(argv)
    options = _parser().parse_args(rest)
    config = KVCacheConfig(**fields)
    share = config.memory if isinstance(config.memory, float) else None
    if options.memory is not None:  # the budget is that of the Mac in question
        budget = config.memory_bytes(Machine.mac(options.memory).usable)
        config = KVCacheConfig(**{**config.model_dump(), "memory": budget})
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        from ..attachment import attach

        lazy = load_lazily(options.model, options.trust_remote_code)
        out = console()
        with attach(lazy.model, config) as kv:
            out.print(plan_table(kv.plan, f"{_label(options.model)}: {lazy.kind}"))
            groups = group_sizes(kv)
            if not groups:
                out.print(f"no layer of this model is kept in pages of ours (cache: {escape(config.cache)})")
                return 0
            out.print(size_table(groups, kv.stats().bytes_total, share))
        if any(value is not None for value in (options.memory, options.context, options.concurrency)):
            wish = Wish(options.context or CHAT_TOKENS, options.concurrency or 1)
            stored, problem = ways_to_store(lazy, config)
            print_fit(out, lazy, stored, wish, options.memory, config.page_size)
            if problem:
                out.print(f"fewer bits are not in the table: {escape(problem)}", soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "inspect",
        "Show how each layer of a model is served, what fits the page budget, and what would fit a Mac. "
        "Reads no weights.",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model's folder, or its config.json alone")
    parser.add_argument("--trust-remote-code", action="store_true", help="run a model file that the folder brings")
    wish = parser.add_argument_group("what would fit", "Any of these shows a table over page sizes.")
    wish.add_argument("--memory", metavar="SIZE", type=memory, help="memory of a Mac, such as 36GiB (this machine's)")
    wish.add_argument(
        "--context", metavar="TOKENS", type=tokens, help=f"tokens of a request, such as 32k ({CHAT_TOKENS})"
    )
    wish.add_argument("--concurrency", metavar="N", type=positive, help="requests at once (1)")
    return parser


def print_fit(
    out: Console, lazy: LazyModel, stored: Sequence[Stored], wish: Wish, memory: int | None, page_size: int
) -> None:
    """What of ``wish`` fits a Mac with ``memory`` bytes, or this machine."""
    machine = Machine.mac(memory) if memory is not None else _this_machine()
    left = machine.left_for_kv(lazy.weights)
    out.print(machine_line(machine, lazy.weights, left))
    out.print(fit_table(stored, wish, left))
    out.print(advice(stored, wish, left, page_size), soft_wrap=True)
    if lazy.context is not None and wish.context > lazy.context:
        out.print(f"the model was made for contexts of {lazy.context:,} tokens")


def ways_to_store(lazy: LazyModel, config: KVCacheConfig) -> tuple[list[Stored], str]:
    """The model's own dtype, then fewer bits, where its heads can be stored so; or just as the settings ask.

    Also why its heads can't be stored in fewer bits; empty if they can.
    """
    from ..attachment import attach

    settings = config.model_dump()
    asked = [settings[name] for name in ("bits", "key_bits", "value_bits")]
    ways, problem = [], ""
    for bits in [None, 8, 4] if not any(asked) else [config.bits]:
        try:
            with attach(lazy.model, KVCacheConfig(**{**settings, "bits": bits})) as kv:
                stored = dict.fromkeys(line.storage for line in kv.plan if line.kind != "dense")
                flags = f"--kv-bits {bits}" if bits is not None and not any(asked) else ""
                ways.append(Stored(", ".join(stored), group_sizes(kv), flags))
        except ConfigError as error:
            if any(asked):
                raise
            problem = str(error)
    return ways, problem


def _this_machine() -> Machine:
    from ..device import device_memory, physical_memory

    return Machine(physical_memory(), device_memory())


def _label(path: Path) -> str:
    """A folder's name; of a configuration alone its path, as it may lie anywhere."""
    return model_label(Path(os.path.abspath(path))) if path.is_dir() else str(path)


def plan_table(plan: Sequence[LayerPlan], label: str) -> Table:
    """The plan, neighbouring layers that are served alike in one row."""
    columns = ("layers", "kind", "window", "attention", "backend", "stored as", "reason")
    table = Table(*columns, title=label, title_justify="left")
    alike = groupby(
        plan, key=lambda line: (line.kind, line.window, line.storage, line.attention, line.backend, line.reason)
    )
    for (kind, window, storage, attention, backend, reason), lines in alike:
        numbers = [line.layer for line in lines]
        layers = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        cells = (layers, kind, "" if window is None else f"{window:,}", attention, backend, storage, reason)
        table.add_row(*map(escape, cells))
    return table


def group_sizes(kv: Attachment) -> list[GroupSize]:
    """The groups of an attachment as the arithmetic needs them."""
    config = kv.config
    sizes = []
    for group in kv.groups:
        held = None
        if group.open:
            held = config.rewind + config.quantized_start  # beside the page in which it starts
        elif group.window is not None:
            held = group.window + config.rewind
        elif config.max_kv_size is not None:
            # The first tokens, which stay, take a page of their own.
            held = config.max_kv_size + config.rewind + group.page_size
        sizes.append(
            GroupSize(
                group.window,
                held,
                group.page_size,
                group.page_bytes,
                group.page_limit,
                group.model_token_bytes,
                group.open,
            )
        )
    return sizes


def size_table(groups: Sequence[GroupSize], budget: int, share: float | None = None) -> Table:
    """Bytes of a token and a page, what the budget holds, and what mlx-lm's own caches would take.

    ``share`` is the setting ``memory``, if that is a part of what there is.
    """
    page, opened = (sum(group.page_bytes for group in groups if group.open == which) for which in (False, True))
    chat, stock = request_bytes(groups, CHAT_TOKENS), stock_request_bytes(groups, CHAT_TOKENS)
    longest = longest_request(groups, budget)
    table = Table("size", "value", title="K/V of all layers in pages", title_justify="left")
    table.add_row("a token", format_bytes(sum(group.token_bytes for group in groups)))
    table.add_row(f"a page of {groups[0].page_size} tokens", format_bytes(page))
    if opened:
        table.add_row("the page being filled, besides", format_bytes(opened))
    table.add_row("the budget" if share is None else f"the budget (memory = {share:g})", format_bytes(budget))
    table.add_row(
        "longest request", "no limit: all layers keep a bounded number" if longest is None else f"{longest:,} tokens"
    )
    table.add_row(f"chats of {CHAT_TOKENS:,} tokens", f"{requests_that_fit(groups, budget, CHAT_TOKENS):,}")
    table.add_row("such a chat in pages", format_bytes(chat))
    table.add_row("such a chat in mlx-lm's own caches", format_bytes(stock))
    return table
