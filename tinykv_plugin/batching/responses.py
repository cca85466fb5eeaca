"""What PagedBatchGenerator returns beyond mlx-lm's plain responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import GenerationBatch

from ..errors import CacheStateError


@dataclass
class FailedResponse(GenerationBatch.Response):  # type: ignore[misc]
    """The last response of a request that failed: ``finish_reason`` is "error", ``error`` says why, no token."""

    error: Exception | None = None


class FinishedResponse(GenerationBatch.Response):  # type: ignore[misc]
    """The last response of a request. Its ``prompt_cache`` is there for the taking until the generator's next step.

    After that its pages go back, unless it was read: a caller's loop variable must not keep pages from the requests
    that still run. ``offer`` is emptied by the generator then.
    """

    def __init__(self, response: Any, offer: list[Any]) -> None:
        self._offer = offer
        self._taken: list[Any] | None = None
        super().__init__(
            response.uid, response.token, response.logprobs, response.finish_reason, None, response.all_tokens
        )

    @property
    def prompt_cache(self) -> list[Any]:
        """The request's caches. Raises CacheStateError if it is read for the first time after the next step."""
        if self._taken is None:
            if not self._offer:
                raise CacheStateError("prompt_cache must be read before the generator's next step")
            self._taken = self._offer[0]
        return self._taken

    @prompt_cache.setter
    def prompt_cache(self, value: object) -> None:
        assert value is None  # set by the dataclass; the offer is what counts

    def __repr__(self) -> str:
        return f"<FinishedResponse uid={self.uid} token={self.token} finish_reason={self.finish_reason!r}>"


class Offers:
    """The finished caches that the last step offered."""

    def __init__(self) -> None:
        self._open: list[list[Any]] = []

    @property
    def open(self) -> bool:
        """Whether this step has offered a cache; its pages may be back at the next one."""
        return bool(self._open)

    def withdraw(self) -> None:
        """The step is over: what was not taken goes back."""
        for offer in self._open:
            offer.clear()
        self._open = []

    def finished(self, response: Any) -> FinishedResponse:
        """``response`` with its cache on offer until :meth:`withdraw`."""
        offer = [response.prompt_cache]
        self._open.append(offer)
        return FinishedResponse(response, offer)
