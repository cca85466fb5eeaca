"""PagedAPIHandler: mlx-lm's HTTP handler, with errors that say what is wrong, and what the server is doing."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from mlx_lm.server import APIHandler
from prometheus_client import CONTENT_TYPE_LATEST

from .client import Client, RequestFailed
from .failures import InvalidRequestError, failure_of
from .live_page import live_page
from .response_generator import PagedResponseGenerator

log = logging.getLogger("tinykv")

MOST_BODY = 64 << 20
"""Bytes of a request: long contexts and some pictures fit. A request is read into memory before it is looked at."""

# Fields of a request that may have a fraction, and so be NaN.
NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("xtc_probability", "xtc_threshold"),
)

# A client that was refused gets so many seconds to send the rest, and a silent one fewer.
LINGER_SECONDS = 10.0
SILENT_SECONDS = 2.0


@dataclasses.dataclass
class _Refusal:
    """An answer of mlx-lm's that is not sent: its status, where it would have gone, and what it says."""

    status: int
    client: Any
    written: io.BytesIO = dataclasses.field(default_factory=io.BytesIO)


class PagedAPIHandler(APIHandler):  # type: ignore[misc]
    """Serves one connection. Every request gets an answer, and what its client doesn't wait for is cancelled.

    Beside mlx-lm's paths there are ``GET /metrics``, for Prometheus, ``GET /kv/stats``, the same as JSON, and ``GET
    /kv``, a page that shows it live, from the server-sent events of ``GET /kv/events``.
    """

    stream_options: Any  # of the request, as mlx-lm reads it

    def __init__(self, response_generator: PagedResponseGenerator, *args: Any, **options: Any) -> None:
        self.stream = False
        self._headers_sent = False
        self._told: _Refusal | None = None
        self._unread = 0  # bytes that a refused client may still send
        self._client = Client(response_generator, lambda: self.connection)
        # Handles the connection, to its end.
        super().__init__(self._client, *args, **options)

    def do_POST(self) -> None:  # noqa: N802 - the base class's name
        """Answer a request for a completion."""
        self._answer(self._complete)

    def validate_model_parameters(self) -> None:
        """As mlx-lm's; and what it lets in, and fails with once the answer has begun. Raises ValueError."""
        super().validate_model_parameters()
        if not isinstance(self.stream_options, dict | None):
            raise ValueError("stream_options must be of type dict")
        if self.stream_options is not None:  # mlx-lm takes the field for granted
            self.stream_options = {"include_usage": False, **self.stream_options}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        numbers |= {f"logit_bias of token {token}": bias for token, bias in (self.logit_bias or {}).items()}
        for name, number in numbers.items():
            if math.isnan(number):
                raise ValueError(f"{name} must be a number, not NaN")

    def do_GET(self) -> None:  # noqa: N802
        """Answer a question about the server."""
        ours = {
            "/metrics": self._send_metrics,
            "/kv": self._send_page,
            "/kv/events": self._send_events,
            "/kv/stats": self._send_stats,
        }
        theirs: Any = super().do_GET
        self._answer(ours.get(self.path.partition("?")[0], theirs))

    def _complete(self) -> None:
        self._require_length()
        self.body = None
        try:
            super().do_POST()
        except (ValueError, RecursionError) as error:
            if self.body is not None:
                raise
            self._refuse(f"the request is no JSON text in UTF-8: {error}")
        finally:
            told, self._told = self._told, None
            if told is not None:
                self.wfile = told.client
        if told is not None:
            self._headers_sent = False
            self._refuse(_message(told.written.getvalue()), told.status)

    def _require_length(self) -> None:
        """Refuse a body before it is read, if it is too long or mlx-lm would read until the client goes."""
        with contextlib.suppress(ValueError):  # mlx-lm says what is wrong with it
            length = int(self.headers.get("Content-Length", ""))
            if length < 0:
                self._refuse("Content-Length: it can't be negative")
            if length > MOST_BODY:
                self._unread = length
                self._refuse(f"the request has {length:,} bytes; at most {MOST_BODY:,} are taken", 413)

    def _refuse(self, message: str, status: int = 400) -> None:
        self._client.generator.metrics.ended("refused")
        raise RequestFailed(InvalidRequestError(message, status), started=False)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """Begin mlx-lm's answer. What it refuses is kept back, to be told in the same way as our own refusals."""
        if status_code >= 400 and self.command == "POST":
            self._told = _Refusal(status_code, self.wfile)
            self.wfile = self._told.written
        super()._set_completion_headers(status_code)

    def flush_headers(self) -> None:
        """Send the headers collected so far."""
        self._headers_sent = True
        super().flush_headers()

    def _answer(self, answer: Callable[[], object]) -> None:
        self._headers_sent = False
        self.stream = False
        try:
            answer()
        except RequestFailed as failed:
            self._send_failure(failed.error, failed.started)
        except Exception as error:
            if not self._client.is_gone():
                log.exception("%s %s failed", self.command, self.path)
            self._send_failure(error, started=True)
        finally:
            self._client.close()
            self._discard()

    def _discard(self) -> None:
        """Read what a refused client still sends: if it were hung up on before, it would never see the answer."""
        end = time.monotonic() + LINGER_SECONDS
        with contextlib.suppress(OSError):
            if self._unread:
                self.connection.settimeout(SILENT_SECONDS)
            while self._unread > 0 and time.monotonic() < end and (piece := self.rfile.read1(1 << 16)):
                self._unread -= len(piece)

    def _send_failure(self, error: Exception, started: bool) -> None:
        """Tell the client, in whichever way is still possible."""
        if self._client.is_gone():
            log.debug("a client has gone: %s", error)
            return
        failure = failure_of(error, started=started)
        body = json.dumps(failure.body).encode()
        try:
            if not self._headers_sent:
                # Those of the answer that was under way are dropped.
                self._headers_buffer: list[bytes] = []
                self._send(body, "application/json", failure.status, failure.headers)
            elif self.stream:
                self.wfile.write(b"data: " + body + b"\n\n")
                self.wfile.flush()
        except OSError as gone:
            log.debug("a client has gone: %s", gone)

    def _send_metrics(self) -> None:
        self._send(self._client.generator.metrics.text(), CONTENT_TYPE_LATEST)

    def _send_stats(self) -> None:
        generator = self._client.generator
        state = generator.state()
        pools = {name: {**dataclasses.asdict(pool), "waste": pool.waste} for name, pool in state.pools.items()}
        told = {**dataclasses.asdict(state), "pools": pools, **generator.metrics.counts()}
        self._send(json.dumps(told).encode(), "application/json")

    def _send_page(self) -> None:
        page = live_page()
        self._send(page.body, "text/html; charset=utf-8", headers=page.headers, shared=False)

    def _send_events(self) -> None:
        with self._client.generator.live.watch() as pictures:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            for picture in pictures:
                if self._client.is_gone():
                    return
                if picture:
                    self.wfile.write(b"data: " + picture + b"\n\n")
                    self.wfile.flush()

    def _send(
        self,
        body: bytes,
        kind: str,
        status: int = 200,
        headers: dict[str, str] | None = None,
        shared: bool = True,
    ) -> None:
        """Answer with ``body``; pages of other sites may read it if it is ``shared`` and mlx-lm's flags allow them."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if shared:
            self._set_cors_headers()
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _message(answer: bytes) -> str:
    """What mlx-lm says in an answer that refuses a request."""
    text = answer.partition(b"\r\n\r\n")[2].decode()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"])
    return text
