"""What the command line says and returns when something is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import ConfigError, PluginError, TinyKVError

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class UsageError(TinyKVError):
    """The command line can't be understood."""


class CommandError(TinyKVError):
    """The command was understood but couldn't be carried out."""


def exit_code(error: TinyKVError) -> int:
    """The exit code for an error: 2 if what was asked for is wrong, 1 if it failed."""
    return BAD_USAGE if isinstance(error, (ConfigError, PluginError, UsageError)) else FAILED


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error message, empty if nothing in ``known`` is close to ``word``."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
