"""Client: the other end of one connection, for which requests are made and cancelled."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from .response_generator import PagedResponseGenerator
from .ticket import Ticket


class RequestFailed(BaseException):
    """Carries a request's exception out of mlx-lm's handler, which would turn any Exception into "404 Not Found".

    ``started`` says whether the request had started.
    """

    def __init__(self, error: Exception, started: bool) -> None:
        super().__init__(error)
        self.error = error
        self.started = started


class Client:
    """What a handler of mlx-lm's sees as its response generator: requests made here go when the client goes."""

    def __init__(self, generator: PagedResponseGenerator, connection: Callable[[], socket.socket]) -> None:
        self.generator = generator
        self._connection = connection
        self._tickets: list[Ticket] = []

    @property
    def cli_args(self) -> Any:
        """The server's command line."""
        return self.generator.cli_args

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served."""
        return self.generator.is_healthy

    def generate(
        self, request: Any, generation_args: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """As the response generator's, but what goes wrong is raised as :class:`RequestFailed`."""
        try:
            ticket = self.generator.submit(request, generation_args)
            self._tickets.append(ticket)
            context, responses = ticket.open(progress_callback, self.is_gone)
        except Exception as error:
            raise RequestFailed(error, started=False) from None
        return context, _signalling(responses)

    def is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        try:
            return self._connection().recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """The handler is done: what hasn't ended is cancelled."""
        for ticket in self._tickets:
            ticket.cancel()
        self._tickets.clear()


def _signalling(responses: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from responses
    except Exception as error:
        raise RequestFailed(error, started=True) from None
