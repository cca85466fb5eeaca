"""PromptSharing: requests of a batch that begin alike run their common beginning once."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..prefix_cache import PrefixCache
from ..sequence import PagedSequence
from ..session import PagedSession

log = logging.getLogger("tinykv")

TokenArray = npt.NDArray[np.int64]


class PromptSharing:
    """What a batch generator does with the prefix cache of its model.

    A request that is admitted begins with the stored pages of its prompt. One whose prompt begins like that of a
    request that is just being processed waits until that one has come to where they part. Prompts are stored as they
    are processed, answers when they are complete.
    """

    def __init__(self, session: PagedSession) -> None:
        self._session = session
        self._prefix: PrefixCache = session.prefix
        self._interval = session.prefix_interval
        self._prompts: dict[int, TokenArray] = {}
        # Places where others will part from a prompt that is being processed, by uid.
        self._stops: dict[int, set[int]] = {}
        # What was stored of waiting requests' prompts and can't be used, and why.
        self._refused: dict[int, tuple[int, str]] = {}

    def forget(self, uids: Iterable[int]) -> None:
        """These requests are no longer in their prompt."""
        for uid in uids:
            self._prompts.pop(uid, None)
            self._stops.pop(uid, None)
            self._refused.pop(uid, None)

    def begin(self, request: tuple[Any, ...], max_kv_size: int | None, may_load: Callable[[], bool]) -> tuple[Any, ...]:
        """A waiting request with what is stored of its prompt in its cache; as it is if nothing is.

        From disk only if it ``may_load``.
        """
        uid, segments, limit, _, _, *options = request
        if not self._prefix.enabled:
            return request
        tokens = [token for segment in segments for token in segment]
        found = self._prefix.attach(tokens, max_kv_size, counted=False, may_load=may_load)
        self._refused[uid] = found.refused, found.reason
        if not found.count:
            return request
        return uid, _after(segments, found.count), limit, found.caches, tokens[: found.count], *options

    def admitted(self, request: tuple[Any, ...]) -> None:
        """A request, as :meth:`begin` gave it, is run from now on."""
        uid, segments, _, _, known, *_ = request
        self._prefix.count(len(known), sum(map(len, segments)), *self._refused.pop(uid, ()))

    def must_wait(
        self, request: tuple[Any, ...], max_kv_size: int | None, running: Mapping[int, tuple[Sequence[int], Any]]
    ) -> bool:
        """Whether a waiting request will find more stored when one of ``running`` has gone on.

        Those are the requests in their prompt, by uid: the tokens run so far and the segments to come.
        """
        if not running or not self._prefix.enabled:
            return False
        uid, segments, *_ = request
        mine = self._tokens(uid, [], segments)
        best, leader = 0, -1
        for other, (done, to_come) in running.items():
            theirs = self._tokens(other, done, to_come)
            common = _common(mine[:-1], theirs)
            if not self._prefix.needs_cuts:
                common -= common % self._session.page_size
            if len(done) < common and common > best:
                best, leader = common, other
        if best < self._session.page_size:
            return False
        if best - self._prefix.matched(mine.tolist(), max_kv_size) < self._session.page_size:
            return False
        self._stops.setdefault(leader, set()).add(best)
        return True

    def until_stop(self, uid: int, done: int) -> int | None:
        """Most tokens that a prompt of which ``done`` were run may go on by, so that it can be stored there."""
        if not self._prefix.needs_cuts or not self._prefix.enabled:
            return None
        stops = [stop for stop in self._stops.get(uid, ()) if stop > done]
        return min([self._interval - done % self._interval, *(stop - done for stop in stops)])

    def store_prompt(
        self, tokens: Sequence[int], row: PagedSequence | None, cache: Callable[[], Sequence[Any]]
    ) -> None:
        """Store a prompt as far as it was run. ``row`` holds its pages, ``cache()`` is what holds the rest too.

        Only full pages are stored: a page that is shared has to be copied when it is written next. But layers without
        pages can only be stored as they are now.
        """
        if row is None or self._session.stateful:
            self.store(tokens, cache())
            return
        try:
            with self._session.lock:
                self._prefix.keep(tokens, row, {}, tail=False)
        except Exception as error:
            _report(error)

    def store(self, tokens: Sequence[int], cache: Sequence[Any]) -> None:
        """Store a request's cache, which holds ``tokens`` and will not be written for now."""
        if not self._prefix.enabled:
            return
        try:
            self._prefix.insert(tokens, cache)
        except Exception as error:
            _report(error)

    def _tokens(self, uid: int, done: Sequence[int], segments: Any) -> TokenArray:
        found = self._prompts.get(uid)
        if found is None:
            tokens = [*done, *(token for segment in segments for token in segment)]
            found = self._prompts[uid] = np.asarray(tokens, dtype=np.int64)
        return found


def _report(error: Exception) -> None:
    """Log that a prompt could not be stored; its answer doesn't depend on it."""
    # As text: the traceback's frames hold the request's pages for as long as a log record is kept.
    log.error("a prompt could not be stored: %s", "".join(traceback.format_exception(error)))
    error.__traceback__ = None


def _after(segments: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What is left of the segments after the first ``count`` tokens."""
    left = []
    for segment in segments:
        if count < len(segment):
            left.append(list(segment[count:]))
        count = max(0, count - len(segment))
    return left


def _common(first: TokenArray, second: TokenArray) -> int:
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if different.size else count
