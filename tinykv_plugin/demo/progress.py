"""The progress bar of a job of several steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class ProgressBar:
    """One line on standard error for each step, with its share done; nothing where that is no terminal.

    To be used as a context manager: the lines disappear at its end.
    """

    def __init__(self, show: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not (show and console.is_terminal))

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, text: str) -> Callable[[float], None]:
        """Begins a step; returns what its work calls with the share done, 0 to 1. Until then the bar only pulses."""
        task = self._progress.add_task(text, total=None)
        return lambda done: self._progress.update(task, total=1.0, completed=min(done, 1.0))
