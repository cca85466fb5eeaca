"""Ticket: one request between the thread of its client and the thread that generates."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlx_lm.server import GenerationContext

from ..errors import QueueFullError, RequestTooLargeError, TinyKVError
from .failures import InvalidRequestError, without_traceback

if TYPE_CHECKING:
    from .line import WaitingLine

log = logging.getLogger("tinykv")

# How often a client that waits is looked after.
LOOK_SECONDS = 0.25


class ClientGoneError(ConnectionError):
    """The client closed its connection before its answer was complete."""


class Ticket:
    """A request that was accepted; for mlx-lm's code it is the queue of its responses.

    The generation thread calls :meth:`put` with what mlx-lm's server puts there: a GenerationContext, progress tuples,
    Responses, and at the end None or an exception. The client's thread calls :meth:`open` and :meth:`cancel`. It
    *starts* when its first token is run (``started``) and ends once, in one of the outcomes of the metrics. ``number``
    counts the requests of a server; ``meter`` knows how far this one is.
    """

    def __init__(self, line: WaitingLine, number: int, request: Any, args: Any) -> None:
        self.number = number
        self.request = request
        self.args = args
        self.started = False
        self.outcome: str | None = None
        self._line = line
        self._context: Any = None
        self._context_sent = False
        self._cancelled = False
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.meter = line.metrics.meter()
        self._next_look = 0.0

    @property
    def prompt_tokens(self) -> int | None:
        """How long its prompt is; None while that isn't known."""
        return len(self._context.prompt) if self._context is not None else None

    # The generation thread ------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether nothing more needs to be computed: it ended, or its client doesn't want it any more."""
        return self.outcome is not None or self._cancelled or (self._context is not None and self._context._should_stop)

    def accept(self, context: Any) -> None:
        """The request can be served: ``context`` is given to the client when it starts."""
        self._context = context
        if self._cancelled:
            context.stop()

    def start(self) -> None:
        """Its turn has come."""
        if not self.started:
            self.started = True
            self._line.started(self)
        if self._context is not None and not self._context_sent:
            self._context_sent = True
            self._items.put(self._context)

    def put(self, item: Any) -> None:
        """What mlx-lm's server would tell the client. Nothing is told after the end."""
        if isinstance(item, GenerationContext):
            self.accept(item)
            self.start()
        elif self.over:
            self.end("cancelled")
        elif item is None:
            self.end("finished")
        elif isinstance(item, Exception):
            self.fail(item)
        else:
            self._count(item)
            self.start()
            self._items.put(item)

    def fail(self, error: Exception, *, logged: bool = False) -> None:
        """End with an error, which the client is told."""
        if self.over:
            self.end("cancelled")
            return
        text = without_traceback(error)
        if isinstance(error, TinyKVError):
            log.info("request %d ends with an error: %s", self.number, str(error))
        elif not logged:
            log.error("a request failed: %s", text)
        refused = isinstance(error, (InvalidRequestError, QueueFullError, RequestTooLargeError))
        self.end("refused" if refused else "failed", error)

    def end(self, outcome: str, last: Exception | None = None) -> None:
        """End in ``outcome``; ``last`` is what the client is told. Later calls do nothing."""
        if self._line.ended(self, outcome):
            self._items.put(last)

    def _count(self, item: Any) -> None:
        prompt = self.prompt_tokens or 0
        if isinstance(item, tuple):
            done, total = item
            self.meter.progress(done, total, prompt)
            if not self._context_sent and self._context is not None:
                # What was promised from the prompt cache may have been given up while it waited.
                self._context.prompt_cache_count = prompt - total
        else:
            self.meter.token(prompt, max(0, self._context.prompt_cache_count) if self._context is not None else 0)

    # The client's thread --------------------------------------------------------------------------------------------

    def open(
        self, progress: Callable[[int, int], None] | None = None, is_gone: Callable[[], bool] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """Wait until the request starts; returns its context and the iterator over its Responses.

        ``progress`` is called with the prompt's progress. ``is_gone`` is asked from time to time; once it says yes, the
        request is cancelled and ClientGoneError raised. Raises what ended the request, here or from the iterator.
        """
        context = self._receive(is_gone)
        if context is None:
            raise ClientGoneError("the request was cancelled")
        return context, self._responses(progress, is_gone)

    def cancel(self) -> None:
        """The client doesn't want it any more. Nothing happens to a request that has ended."""
        self._cancelled = True
        if self._context is not None:
            self._context.stop()
        self._line.withdraw(self)

    def _responses(
        self, progress: Callable[[int, int], None] | None, is_gone: Callable[[], bool] | None
    ) -> Iterator[Any]:
        while (item := self._receive(is_gone)) is not None:
            if not isinstance(item, tuple):
                yield item
            elif progress is not None:
                progress(*item)

    def _receive(self, is_gone: Callable[[], bool] | None) -> Any:
        while True:
            now = time.monotonic()
            if is_gone is not None and now >= self._next_look:
                self._next_look = now + LOOK_SECONDS
                if is_gone():
                    self.cancel()
                    raise ClientGoneError("the client has closed its connection")
            try:
                item = self._items.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if not self._line.is_served():
                    raise RuntimeError("the generation thread died") from None
                continue
            if isinstance(item, Exception):
                raise item
            return item
