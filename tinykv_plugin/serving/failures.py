"""How a failed request is told to its client: status, headers and body, as OpenAI's API does it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import OutOfPagesError, QueueFullError, RequestTooLargeError, TinyKVError


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
    if isinstance(error, RequestTooLargeError) or (isinstance(error, OutOfPagesError) and not started):
        return Failure(400, _body(error, "invalid_request_error"))
    return Failure(500, _body(error, "server_error"))


def _body(error: Exception, kind: str) -> dict[str, Any]:
    code = "internal_error"
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, TinyKVError):
        code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()
        message = str(error)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
