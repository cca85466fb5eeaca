"""WaitingLine: the requests of a server that have not started, and how many there may be."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import QueueFullError
from .metrics import ServerMetrics
from .ticket import Ticket

# Starts of requests that the estimate of the waiting time looks back on, and the longest time it promises.
REMEMBERED_STARTS = 32
LONGEST_RETRY = 600


class WaitingLine:
    """First come, first served; at most ``limit`` requests (None: any number) wait beside those that can start.

    ``room`` is how many can: the generation thread says so after each step (:meth:`publish`). Safe to use from any
    thread.
    """

    def __init__(self, limit: int | None, metrics: ServerMetrics, is_served: Callable[[], bool]) -> None:
        self.metrics = metrics
        self.is_served = is_served
        self._limit = limit
        self._room = 1
        self._changed = threading.Condition()
        # In the order of arrival: those that nobody has taken yet, and of all of those the ones that wait or run.
        self._untaken: deque[Ticket] = deque()
        self._waiting: dict[Ticket, None] = {}
        self._running: dict[Ticket, None] = {}
        self._starts: deque[float] = deque(maxlen=REMEMBERED_STARTS)
        self._closed = False
        self._numbers = itertools.count(1)

    @property
    def alive(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._running)

    def tickets(self) -> list[Ticket]:
        """The requests that have not ended: those that have started, then those that wait, each in order."""
        with self._changed:
            return [*self._running, *self._waiting]

    # Clients' threads -----------------------------------------------------------------------------------------------

    def join(self, request: Any, args: Any) -> Ticket:
        """A ticket for a request that arrives. Raises QueueFullError, and RuntimeError while the server stops."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the server is stopping")
            if self._limit is not None and len(self._waiting) >= self._limit + self._room:
                self.metrics.ended("refused")
                raise self._full(self._limit)
            ticket = self.adopt(request, args)
            self._untaken.append(ticket)
            self._changed.notify()
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """A request was cancelled; it ends here if nobody has taken it yet."""
        with self._changed:
            if ticket in self._untaken:
                self._untaken.remove(ticket)
                ticket.end("cancelled")

    # The generation thread ------------------------------------------------------------------------------------------

    def adopt(self, request: Any, args: Any) -> Ticket:
        """A ticket for a request that somebody else has let in."""
        with self._changed:
            ticket = Ticket(self, next(self._numbers), request, args)
            self._waiting[ticket] = None
            return ticket

    def take(self, timeout: float | None = None) -> Ticket | None:
        """The next request; None if there is none (within ``timeout`` seconds)."""
        with self._changed:
            if timeout is not None:
                self._changed.wait_for(lambda: self._untaken or self._closed, timeout)
            return self._untaken.popleft() if self._untaken else None

    def give_back(self, ticket: Ticket) -> None:
        """Undo :meth:`take`."""
        with self._changed:
            self._untaken.appendleft(ticket)

    def publish(self, room: int) -> None:
        """``room`` of the waiting requests can start with the next step. The youngest are refused if too many wait."""
        with self._changed:
            self._room = room
            if self._limit is None:
                return
            while len(self._waiting) > self._limit + room:
                youngest = next(reversed(self._waiting))
                if youngest in self._untaken:
                    self._untaken.remove(youngest)
                youngest.fail(self._full(self._limit))
                self._waiting.pop(youngest, None)

    def close(self) -> None:
        """No more requests; those that wait or run are cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for ticket in [*self._waiting, *self._running]:
                ticket.cancel()

    def fail_taken(self, error: Exception) -> None:
        """End with ``error`` every request that was taken."""
        with self._changed:
            for ticket in [*self._waiting, *self._running]:
                if ticket not in self._untaken:
                    ticket.fail(error, logged=True)

    # Tickets --------------------------------------------------------------------------------------------------------

    def started(self, ticket: Ticket) -> None:
        """A request's turn has come."""
        with self._changed:
            if ticket in self._waiting:
                del self._waiting[ticket]
                self._running[ticket] = None
                self._starts.append(time.monotonic())

    def ended(self, ticket: Ticket, outcome: str) -> bool:
        """A request has ended. False if it had before."""
        with self._changed:
            if ticket.outcome is not None:
                return False
            ticket.outcome = outcome
            self._waiting.pop(ticket, None)
            self._running.pop(ticket, None)
        self.metrics.ended(outcome)
        return True

    def _full(self, limit: int) -> QueueFullError:
        return QueueFullError(len(self._waiting), limit, self._retry_after())

    def _retry_after(self) -> int:
        """Seconds until a place in the line may be free: the time between starts, lately."""
        if not self._starts:
            return 1
        seconds = (time.monotonic() - self._starts[0]) / len(self._starts)
        return min(LONGEST_RETRY, max(1, math.ceil(seconds)))
