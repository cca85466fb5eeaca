"""AloneResponses: how mlx-lm's code for single requests reaches a request's ticket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ticket import Ticket


class AloneResponses:
    """Takes the place of the response queue that mlx-lm's code for single requests fills.

    ``after_each`` is called after everything put here. With ``may_stop``, a request whose client has gone while its
    prompt is processed is ended by an exception; in its answer mlx-lm looks by itself.
    """

    def __init__(self, ticket: Ticket, after_each: Callable[[], object], may_stop: bool) -> None:
        self._ticket = ticket
        self._after_each = after_each
        self._may_stop = may_stop

    def put(self, item: Any) -> None:
        """Tell the client."""
        self._ticket.put(item)
        self._after_each()
        if isinstance(item, tuple) and self._ticket.over and self._may_stop:
            raise RuntimeError("the request was cancelled")
