"""The command reference as Markdown, from what ``--help`` prints. ``python docs/commands.py`` renews commands.md."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

PAGE = Path(__file__).parent / "commands.md"

INTRODUCTION = """\
# Commands

<!-- Made by docs/commands.py from what --help prints. -->

`tinykv` puts paged caches under mlx-lm's commands and has a few of its own. `tinykv --help` lists all of them;
`tinykv COMMAND --help` tells what one takes. For mlx-lm's commands that is mlx-lm's own text, followed by the flags
below.
"""


def command_reference() -> str:
    """The page."""
    os.environ["COLUMNS"] = "100"
    from tinykv_plugin.cli.flags import flags_help
    from tinykv_plugin.cli.main import OWN_COMMANDS, main

    parts = [INTRODUCTION]
    for name, about in OWN_COMMANDS.items():
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main([name, "--help"]) == 0
        text = printed.getvalue().replace(flags_help(), "").rstrip()
        parts.append(f"## tinykv {name}\n\n{about[0].upper()}{about[1:]}.\n\n```text\n{text}\n```\n")
    parts.append(
        "## The flags of the paged KV cache\n\nEvery command that runs a model takes them; {doc}`configuration` says "
        f"where else they can be set.\n\n```text\n{flags_help().strip()}\n```\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(command_reference(), encoding="utf-8")
