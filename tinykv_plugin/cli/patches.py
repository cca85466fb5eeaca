"""Temporary changes of the process, each undone at the end of its ``with`` block."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """``owner.name`` is ``value``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def arguments(argv: Sequence[str], *, first_path: str | None = None) -> Iterator[None]:
    """``sys.argv`` is ``argv``, and ``sys.path[0]`` is ``first_path`` if one is given."""
    old_argv, old_path = sys.argv, list(sys.path)
    sys.argv = list(argv)
    if first_path is not None:
        sys.path[0:1] = [first_path]
    try:
        yield
    finally:
        sys.argv = old_argv
        sys.path[:] = old_path
