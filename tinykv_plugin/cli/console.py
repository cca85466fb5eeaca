"""Where tables and messages go: rich consoles, and the plugin's log on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from ..errors import TinyKVError

WIDTH_WITHOUT_TERMINAL = 140


def console(*, stderr: bool = False) -> Console:
    """A console for standard output or error; wide when it isn't a terminal, so that tables stay greppable."""
    stream = sys.stderr if stderr else sys.stdout
    width = None
    if not stream.isatty() and not os.environ.get("COLUMNS", "").isdecimal():
        width = WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def log_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Show what the logger ``tinykv`` says, warnings only unless ``verbose``; its old settings come back at the end.

    Verbose also shows the traceback of an error that would end as one line.
    """
    log = logging.getLogger("tinykv")
    before = log.level, log.propagate
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("tinykv: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.propagate = False  # mlx-lm's server configures the root logger: each line would come twice
    try:
        yield
    except TinyKVError:
        log.info("where it happened:", exc_info=True)
        raise
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
