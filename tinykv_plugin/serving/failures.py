"""How a failed request is told to its client: status, headers and body, as OpenAI's API does it."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, DraftError, OutOfPagesError, QueueFullError, RequestTooLargeError, TinyKVError


class TooManyWatchersError(TinyKVError):
    """As many watch the server's live view as it allows."""


class InvalidRequestError(TinyKVError, ValueError):
    """A request can't be understood: its client has to change it. ``status`` is that of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ModelNotFoundError(InvalidRequestError):
    """A request names a model, or an adapter, that can't be had."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 404)


def without_traceback(error: Exception) -> str:
    """The traceback of ``error`` as text, for the log; the error keeps none.

    Its frames would hold a request's caches, and with them pages, for as long as a client or a log keeps the error.
    """
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__context__ = None
    return text


@dataclass(frozen=True)
class Failure:
    """An HTTP status with the JSON that goes with it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def failure_of(error: Exception, *, started: bool) -> Failure:
    """What to answer to a request that ended with ``error``; ``started`` says whether it had begun to run."""
    if isinstance(error, QueueFullError):
        return Failure(429, _body(error, "rate_limit_error"), {"Retry-After": str(error.retry_after)})
    if isinstance(error, TooManyWatchersError):
        return Failure(503, _body(error, "server_error"))
    if isinstance(error, InvalidRequestError):
        return Failure(error.status, _body(error, "invalid_request_error"))
    too_large = isinstance(error, RequestTooLargeError) or (isinstance(error, OutOfPagesError) and not started)
    # ConfigError and DraftError: the server's settings and models don't allow what was asked for, and won't later.
    if too_large or isinstance(error, ConfigError | DraftError):
        return Failure(400, _body(error, "invalid_request_error"))
    return Failure(500, _body(error, "server_error"))


def _body(error: Exception, kind: str) -> dict[str, Any]:
    code = "internal_error"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, TinyKVError):
        code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()
        message = str(error)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
