"""Attached: what a prefix cache gives a new request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attached:
    """A new request's caches, which hold the first ``count`` tokens of its prompt; ``rest`` are to be run.

    ``refused`` more tokens were stored but could not be used, for this ``reason``.
    """

    caches: list[Any]
    rest: list[int]
    count: int
    refused: int
    reason: str
