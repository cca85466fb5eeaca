"""``tinykv plugins``: what is installed, what it provides, and why something is disabled."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ..manager import ENTRY_POINT_GROUP, PluginInfo, default_manager
from .console import console
from .parser import command_parser


def plugins(argv: Sequence[str]) -> int:
    """Print the table of plugins; broken ones are no failure of this command."""
    description = f"List the plugins found in the entry-point group {ENTRY_POINT_GROUP}."
    command_parser("plugins", description, kv_flags=False).parse_args(argv)
    found = default_manager().plugins
    if found:
        console().print(plugins_table(found))
    else:
        console().print(f"no distribution offers anything in the entry-point group {ENTRY_POINT_GROUP}")
    return 0


def plugins_table(found: Sequence[PluginInfo]) -> Table:
    """One row for each plugin."""
    table = Table("plugin", "provides", "version", "distribution", "disabled because")
    for info in found:
        cells = (info.name, "\n".join(info.provides), info.version, info.distribution, info.problem)
        table.add_row(*map(escape, cells))
    return table
