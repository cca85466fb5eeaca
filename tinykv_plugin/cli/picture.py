"""draw(): a picture of a server, as its live view sends it, for a terminal."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..units import format_bytes

STATES = ("free", "used", "shared", "cached")
COLOURS = ("bright_black", "blue", "yellow", "green")
# Letters as well as colours: they stay where there are none.
LETTERS = (".", "U", "S", "C")
MAP_ROWS = 8


def draw(picture: dict[str, Any], width: int) -> RenderableType:
    """The whole picture, ``width`` characters wide."""
    parts: list[RenderableType] = [Text(_headline(picture))]
    for label, pool in picture["pools"].items():
        parts.append(memory_bar(label if len(picture["pools"]) > 1 else "memory", pool, width))
        for group in pool["groups"]:
            parts += [Text(""), Text(_caption(label, group)), page_map(group, width)]
    if picture["pools"]:
        parts.append(legend(picture))
    else:
        parts.append(Text("no model with pages is loaded"))
    parts.append(Text(""))
    parts.append(requests_table(picture) if picture["requests"] else Text("no request is running or waiting"))
    return Group(*parts)


def memory_bar(label: str, pool: dict[str, Any], width: int) -> Text:
    """Used and reserved memory of a budget."""
    words = (
        f" {format_bytes(pool['bytes_used'])} used, {format_bytes(pool['bytes_reserved'])} reserved of "
        f"{format_bytes(pool['bytes_total'])}, {pool['waste']:.0%} of the used slots empty"
    )
    room = max(10, width - len(label) - len(words) - 3)
    used = min(room, -(-room * pool["bytes_used"] // pool["bytes_total"]))
    reserved = min(room, max(used, -(-room * pool["bytes_reserved"] // pool["bytes_total"])))
    bar = Text(f"{label} ")
    bar.append("█" * used, COLOURS[1])
    bar.append("▒" * (reserved - used), COLOURS[1])
    bar.append("·" * (room - reserved), COLOURS[0])
    return bar.append(words)


def page_map(group: dict[str, Any], width: int) -> Text:
    """The pages of a cache group, at most :data:`MAP_ROWS` lines: each character is what most of its pages are."""
    raw = base64.b64decode(group["cells"])
    cells = [(255 - sum(raw[at : at + 3]), *raw[at : at + 3]) for at in range(0, len(raw), 3)]
    merged = -(-len(cells) // (width * MAP_ROWS)) or 1
    drawn = Text()
    for number, start in enumerate(range(0, len(cells), merged)):
        if number and number % width == 0:
            drawn.append("\n")
        state = _most(cells[start : start + merged])
        drawn.append(LETTERS[state], COLOURS[state])
    return drawn


def _most(cells: Sequence[Sequence[int]]) -> int:
    """The state that most of some cells' pages are in; a page in use shows among as many free ones."""
    totals = [sum(shares) for shares in zip(*cells, strict=True)]
    return max(range(len(totals)), key=lambda state: (totals[state], state))


def legend(picture: dict[str, Any]) -> Text:
    """What the letters mean, and how many pages there are of each."""
    totals = [0] * len(STATES)
    for pool in picture["pools"].values():
        for group in pool["groups"]:
            totals = [total + count for total, count in zip(totals, group["states"], strict=True)]
    line = Text()
    for state, name in enumerate(STATES):
        line.append(f"{LETTERS[state]} {name} {totals[state]:,}   ", COLOURS[state])
    return line


def requests_table(picture: dict[str, Any]) -> Table:
    """The requests that run and wait."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("request", "state", "prompt", "reused", "generated", "tokens/s", "pages", "bytes", "seconds"):
        table.add_column(column, justify="left" if column in ("request", "state") else "right", no_wrap=True)
    for told in picture["requests"]:
        speed, prompt = told["tokens_per_second"], told["prompt_tokens"]
        table.add_row(
            str(told["id"]),
            told["state"],
            "-" if prompt is None else f"{told['computed'] + told['reused']:,}/{prompt:,}",
            f"{told['reused']:,}",
            f"{told['generated']:,}",
            "-" if speed is None else f"{speed:.1f}",
            f"{told['pages']:,}",
            format_bytes(told["bytes"]),
            f"{told['seconds']:.1f}",
        )
    if picture["more_requests"]:
        table.add_row("…", escape(f"{picture['more_requests']} more"))
    return table


def _headline(picture: dict[str, Any]) -> str:
    speed, hits = picture["tokens_per_second"], picture["hit_rate"]
    parts = [
        picture["model"] or "no model loaded",
        f"{picture['running']} running",
        f"{picture['waiting']} waiting",
        f"{'-' if speed is None else format(speed, '.1f')} tokens/s",
        f"{'-' if hits is None else format(hits, '.0%')} of prompt tokens reused",
        f"{picture['evictions']:,} pages evicted",
        f"{picture['work']['preemptions']} preemptions",
    ]
    return " · ".join(parts)


def _caption(label: str, group: dict[str, Any]) -> str:
    per_cell = f", {group['per_cell']:,} to a cell" if group["per_cell"] > 1 else ""
    owner = "" if label == "main" else f"{label}: "
    return (
        f"{owner}{group['name']}, {group['layers']} layers, {group['pages']:,} pages of {group['page_size']} tokens "
        f"({format_bytes(group['page_bytes'])}, {group['storage']}){per_cell}"
    )
