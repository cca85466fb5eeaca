"""What fits a machine: weights, K/V of so many requests, by page size and by how K/V are stored. Arithmetic only."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ..units import format_bytes, parse_bytes
from .capacity import GroupSize, longest_request, request_bytes, requests_that_fit, stock_request_bytes

PAGE_SIZES = (16, 32, 64, 128)

# What macOS lets a GPU use of a Mac's memory, as mlx reports it (max_recommended_working_set_size): about two thirds,
# and three quarters of 36 GiB and more.
LARGE_MAC = 36 << 30
SMALL_SHARE, LARGE_SHARE = 2 / 3, 3 / 4

# Kept free beside weights and K/V for what a forward pass computes.
FORWARD_SHARE = 0.05


@dataclass(frozen=True)
class Machine:
    """Memory of a machine in bytes, and how much of it a model may use."""

    memory: int
    usable: int

    @classmethod
    def mac(cls, memory: int) -> Machine:
        """A Mac with so many bytes of memory."""
        return cls(memory, int(memory * (LARGE_SHARE if memory >= LARGE_MAC else SMALL_SHARE)))

    def left_for_kv(self, weights: int) -> int:
        """Bytes for K/V beside ``weights`` bytes of weights; not below 0."""
        return max(0, int(self.usable * (1 - FORWARD_SHARE)) - weights)


@dataclass(frozen=True)
class Wish:
    """So many requests of so many tokens at once."""

    context: int
    concurrency: int


@dataclass(frozen=True)
class Stored:
    """How K/V are stored: a name such as "float16", the model's cache groups stored so, and the flags that do it."""

    name: str
    groups: Sequence[GroupSize]
    flags: str = ""

    def with_page_size(self, page_size: int) -> list[GroupSize]:
        """The groups with other pages; a limit on the number of pages is left out."""
        return [
            dataclasses.replace(
                group,
                page_size=page_size,
                page_bytes=group.page_bytes * page_size // group.page_size,
                page_limit=2**62,
            )
            for group in self.groups
        ]


def fit_table(stored: Sequence[Stored], wish: Wish, left: int) -> Table:
    """One row for each way to store K/V and each page size; ``left`` bytes are there for K/V."""
    table = Table(title=f"{_requests(wish)}, {format_bytes(left)} for K/V", title_justify="left")
    for name in ("K/V", "page", "a token", "a request", "all", "fits", "requests that fit", "longest context"):
        table.add_column(name, justify="left" if name in ("K/V", "fits") else "right")
    for way in stored:
        for number, page_size in enumerate(PAGE_SIZES):
            groups = way.with_page_size(page_size)
            one = request_bytes(groups, wish.context)
            table.add_row(
                "" if number else way.name,
                str(page_size),
                format_bytes(sum(group.token_bytes for group in groups)),
                format_bytes(one),
                format_bytes(one * wish.concurrency),
                "yes" if one * wish.concurrency <= left else "no",
                f"{requests_that_fit(groups, left, wish.context):,}",
                _tokens(longest_request(groups, left // wish.concurrency)),
            )
        table.add_section()
    groups = list(stored[0].groups)
    one = stock_request_bytes(groups, wish.context)
    table.add_row(
        "mlx-lm's own",
        "",
        format_bytes(sum(group.token_bytes for group in groups)),
        format_bytes(one),
        format_bytes(one * wish.concurrency),
        "yes" if one * wish.concurrency <= left else "no",
        f"{left // one:,}" if one else "",
        "",
    )
    return table


def machine_line(machine: Machine, weights: int, left: int) -> str:
    """Where the memory goes, in words."""
    return (
        f"{format_bytes(machine.memory)} of memory, of which a model may use {format_bytes(machine.usable)}: "
        f"{format_bytes(weights)} of weights, {FORWARD_SHARE:.0%} for a forward pass, {format_bytes(left)} for K/V"
    )


def advice(stored: Sequence[Stored], wish: Wish, left: int, page_size: int) -> str:
    """The flags to use, or what to give up."""
    for way in stored:
        need = request_bytes(way.with_page_size(page_size), wish.context) * wish.concurrency
        if need <= left:
            flags = f"--kv-memory {_mebibytes(need)}MiB --kv-page-size {page_size} {way.flags}"
            return f"{_requests(wish)} {'fits' if wish.concurrency == 1 else 'fit'} with {flags.rstrip()}"
    if not left:
        return "the weights alone don't fit: use a smaller model, or one with fewer bits"
    smallest = stored[-1]
    longest = longest_request(smallest.with_page_size(page_size), left // wish.concurrency)
    most = [f"{wish.concurrency:,} of {_tokens(longest)} tokens"]
    if wish.concurrency > 1:
        fewer = requests_that_fit(smallest.with_page_size(page_size), left, wish.context)
        most.insert(0, f"at most {fewer:,} of them, or" if fewer else "not one does;")
    how = f" with {smallest.flags}" if smallest.flags else ""
    verb = "doesn't" if wish.concurrency == 1 else "don't"
    return f"{_requests(wish)} {verb} fit: {' '.join(most)}{how}"


def tokens(text: str) -> int:
    """``"32k"``, ``"1M"`` or ``"4096"`` tokens; for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:[,_]\d{3})*)\s*([km]?)\s*", text, re.IGNORECASE)
    count = int(re.sub(r"[,_]", "", match[1])) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens such as 4096 or 32k")
    return count


def memory(text: str) -> int:
    """``"36GiB"`` in bytes; for argparse. A bare number such as 36 is taken for a mistake."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 2**30:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a machine has; write it like 36GiB")
    return size


def _requests(wish: Wish) -> str:
    return f"{wish.concurrency:,} request{'s' if wish.concurrency > 1 else ''} of {wish.context:,} tokens"


def _tokens(count: int | None) -> str:
    return "no limit" if count is None else f"{count:,}"


def _mebibytes(count: int) -> int:
    return -(-count // 2**20)
