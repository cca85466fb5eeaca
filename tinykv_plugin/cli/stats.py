"""The table that ``--kv-stats`` prints after a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..protocols import LayerPlan
from ..units import format_bytes
from .models import ModelReport


def print_reports(console: Console, reports: Sequence[ModelReport]) -> None:
    """One table for each model, or a line saying that no cache was used."""
    if not reports:
        console.print("tinykv: no paged cache was used")
    for report in reports:
        console.print(stats_table(report))


def stats_table(report: ModelReport) -> Table:
    """The numbers of one model's page pools."""
    stats = report.stats
    table = Table(title=f"KV pages of {report.label}", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value")
    table.add_row("pages", f"{stats.pages_used} used of {stats.pages_total} (peak {stats.peak_pages_used})")
    table.add_row("bytes", f"{format_bytes(stats.bytes_reserved)} reserved, {format_bytes(stats.bytes_used)} used")
    table.add_row("a token", f"{format_bytes(stats.bytes_per_token)} ({describe_storage(report.plan)})")
    table.add_row(
        "waste", f"{stats.waste:.1%} of the slots in {'used' if stats.slots_used else 'freed'} pages held no token"
    )
    table.add_row("growths", str(stats.growths))
    table.add_row("copy-on-write copies", str(stats.cow_copies))
    table.add_row("page moves", str(stats.page_moves))
    asked = stats.prefix_hit_tokens + stats.prefix_missed_tokens
    if asked:
        table.add_row("prefix cache", f"{stats.prefix_hit_tokens} of {asked} prompt tokens were stored")
    table.add_row("layers", describe_layers(report.plan))
    return table


def describe_layers(plan: Sequence[LayerPlan]) -> str:
    """How many layers there are of each kind, e.g. ``"24 full (direct, cpu), 4 window (gather)"``."""
    kinds = Counter((layer.kind, _reader(layer)) for layer in plan)
    return ", ".join(f"{count} {kind} ({reader})" for (kind, reader), count in kinds.items())


def describe_storage(plan: Sequence[LayerPlan]) -> str:
    """How K and V are stored, e.g. ``"8 bits in groups of 64"``."""
    return "; ".join(sorted({layer.storage for layer in plan if layer.storage})) or "no pages"


def _reader(layer: LayerPlan) -> str:
    return layer.attention if layer.backend in ("", layer.attention) else f"{layer.attention}, {layer.backend}"
