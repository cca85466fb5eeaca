"""Journal: what it takes to undo a transaction's bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Journal:
    """Undo steps of the open transaction, newest last. Costs O(changes), never a copy of the state.

    Only bookkeeping is undone. Page contents are not: a page that goes back to the free list may hold anything.
    """

    __slots__ = ("_open", "_steps")

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._open = 0

    @property
    def is_open(self) -> bool:
        """Whether a transaction is under way."""
        return self._open > 0

    def record(self, undo: Callable[..., Any], *args: Any) -> None:
        """Note that ``undo(*args)`` takes back the change just made; outside a transaction it is final."""
        if self._open:
            self._steps.append((undo, args))

    def savepoint(self) -> int:
        """Open a (nested) transaction; pass the result to :meth:`commit` or :meth:`rollback`."""
        self._open += 1
        return len(self._steps)

    def commit(self, savepoint: int) -> None:
        """Close the innermost transaction; what it changed stays unless an outer one is rolled back."""
        assert self._open, "commit without a savepoint"
        self._open -= 1
        if not self._open:
            self._steps.clear()

    def rollback(self, savepoint: int) -> None:
        """Take back every change since ``savepoint``, newest first, and close that transaction."""
        assert self._open, "rollback without a savepoint"
        steps, self._steps = self._steps[savepoint:], self._steps[:savepoint]
        opened, self._open = self._open, 0  # the undo functions must not be journaled themselves
        for undo, args in reversed(steps):
            undo(*args)
        self._open = opened - 1
