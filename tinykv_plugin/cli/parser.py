"""command_parser(): the argument parser of a command of ours."""

from __future__ import annotations

import argparse
import textwrap

from .flags import flags_help

WIDTH = 100


def command_parser(name: str, description: str, *, kv_flags: bool = True) -> argparse.ArgumentParser:
    """For ``tinykv name``; the flags of the cache are in its help if it takes them."""
    return argparse.ArgumentParser(
        prog=f"tinykv {name}",
        description=textwrap.fill(description, WIDTH),
        epilog=flags_help() if kv_flags else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """A whole number above 0; for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)
