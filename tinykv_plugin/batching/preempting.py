"""PreemptingGenerator: how a batch finds room for the tokens to come, at whose expense."""

from __future__ import annotations

import copy
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import BatchGenerator, GenerationBatch

from ..batch_cache import rows_of
from ..errors import OutOfPagesError, PoolGrowthError, TinyKVError
from ..layout import leaves
from ..sequence import PagedSequence
from ..session import PagedSession
from .admission import Admission, Footprint
from .responses import FailedResponse, Offers
from .sharing import PromptSharing

log = logging.getLogger("tinykv")

FULL = (OutOfPagesError, PoolGrowthError)


@dataclass
class BatchCounts:
    """What happened to requests so far."""

    preempted: int = 0
    refused: int = 0
    failed: int = 0


class PreemptingGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's BatchGenerator with the means to take pages from the youngest request when older ones need them.

    What is preempted waits in the queue with its tokens, and is computed again.
    """

    counts: BatchCounts
    # mlx-lm's own state, typed here: waiting requests as tuples; [segments, done, total] of those in the prompt batch.
    _unprocessed_sequences: deque[Any]
    _currently_processing: list[list[Any]]
    _session: PagedSession
    _sharing: PromptSharing
    _offers: Offers
    _admission: Admission
    _on_full: str
    _resumed: dict[int, tuple[Any, int]]
    _given: dict[int, list[Any]]
    _brought: set[int]
    _unknown: set[int]
    _steps: dict[int, list[list[int]]]
    _reported: dict[int, Exception]

    def _fail(self, uids: Sequence[int], error: Exception, out: list[Any]) -> None:
        """End requests with an error; their pages go back."""
        if not isinstance(error, TinyKVError):
            log.error("requests %s failed: %s", list(uids), "".join(traceback.format_exception(error)))
        # The traceback's frames hold the batch, and with it the pages, for as long as somebody keeps the error.
        error.__traceback__ = error.__context__ = None
        self.counts.failed += len(uids)
        self.remove(uids)
        out += [FailedResponse(uid, -1, None, "error", None, None, error) for uid in uids]

    def _report(self, uid: int, error: Exception) -> None:
        self._reported.setdefault(uid, error)

    def _take_reported(self) -> dict[int, Exception]:
        reported, self._reported = self._reported, {}
        return reported

    def _drop_refused(self, out: list[Any]) -> None:
        for uid, error in self._take_reported().items():
            self._fail([uid], error, out)

    def _ensure_room(
        self,
        batch: Callable[[], Any],
        counts: Callable[[], list[int]],
        out: list[Any],
        which: Callable[[], list[int]] | None = None,
    ) -> bool:
        """Make sure that the rows of a batch can take ``counts`` more tokens, at the expense of the youngest request.

        False if that must wait for the pages of what has just finished. The batches change when a row leaves, so all
        arguments are asked again each time.
        """
        while len(batch()):
            rows = rows_of(batch().prompt_cache)
            if rows is not None and which is not None:
                rows = [rows[i] for i in which()]
            if not rows:
                return True
            try:
                self._session.check_room(rows, counts())
                return True
            except FULL as error:
                if self._offers.open:
                    return False
                if not self._release_waiting():
                    self._make_room(error, out)
        return True

    def _release_waiting(self) -> bool:
        """Have the youngest waiting request that brought pages along give them up, to be computed; False if none did.

        Only if it is known which tokens are in them.
        """
        queue = self._unprocessed_sequences
        for index in reversed(range(len(queue))):
            uid, segments, limit, cache, known, *options = queue[index]
            row = row_of(cache)
            if row is not None and row.tokens and row.tokens == len(known):
                segments = [known + segments[0], *segments[1:]] if len(segments) > 1 else [known, *segments]
                queue[index] = (uid, segments, limit, self._session.make_cache(row.max_kv_size), [], *options)
                return True
        return False

    def _make_room(self, error: Exception, out: list[Any]) -> None:
        uids = [*self._generation_batch.uids, *self._prompt_batch.uids]
        youngest = max(uids)
        if self._on_full == "error" or len(uids) == 1:
            self._fail([youngest], error, out)
            return
        self.counts.preempted += 1
        # As text: a log that keeps its records would keep the error's frames, and with them a row's pages.
        log.info("request %d gives its pages up, to be computed again: %s", youngest, str(error))
        if youngest in self._generation_batch.uids:
            self._preempt_generating(self._generation_batch.uids.index(youngest), out)
        else:
            self._preempt_prompting(self._prompt_batch.uids.index(youngest))

    def _preempt_generating(self, index: int, out: list[Any]) -> None:
        """Return the token the row has already computed, free its pages and queue it to be computed again."""
        batch = self._generation_batch
        uid, tokens, token = batch.uids[index], list(batch.tokens[index]), int(batch._next_tokens[index].item())
        count, matcher = batch._num_tokens[index] + 1, batch._matchers[index]
        finish = "length" if count >= batch.max_tokens[index] else None
        finish = "stop" if matcher.advance(token) else finish
        response = GenerationBatch.Response(uid, token, batch._next_logprobs[index], finish, None, None)
        if finish is not None:
            response.prompt_cache, response.all_tokens = batch.extract_cache(index), tokens
            response = self._finished(response)
        out.append(response)
        if finish is None:
            self._resumed[uid] = (matcher, count)
            steps = self._steps.get(uid)
            if steps is None:
                self._requeue(batch, index, [tokens, [token]])
            else:
                # As they were run: the tokens of the answer one by one.
                run = sum(map(len, steps))
                steps += [[one] for one in [*tokens[run:], token]]
                self._requeue(batch, index, [list(step) for step in steps])
        batch.filter([i for i in range(len(batch)) if i != index])

    def _preempt_prompting(self, index: int) -> None:
        batch = self._prompt_batch
        segments = [list(segment) for segment in self._currently_processing[index][0]]
        done = list(batch.tokens[index])
        # Boundaries that were reported are not reported again: what was done is joined to the segment under way.
        segments = [done + segments[0], *segments[1:]] if len(segments) > 1 else [done, *segments]
        steps = self._steps.get(batch.uids[index], segments)
        self._requeue(batch, index, [list(step) for step in steps if step])
        keep = [i for i in range(len(batch)) if i != index]
        self._currently_processing = [self._currently_processing[i] for i in keep]
        batch.filter(keep)

    def _requeue(self, batch: Any, index: int, segments: list[list[int]]) -> None:
        rows = rows_of(batch.prompt_cache)
        uid = batch.uids[index]
        # Unless its pages are all needed, less has to be computed again.
        if uid not in self._unknown:
            self._sharing.store(batch.tokens[index], batch.extract_cache(index))
        self._sharing.forget([uid])
        if uid in self._given:
            cache = copy.deepcopy(self._given[uid])
        else:
            cache = self._session.make_cache(rows[index].max_kv_size if rows else None)
            # With a size limit what is stored would have to end where one of its steps does: it isn't asked for.
            (self._brought.add if uid in self._steps else self._brought.discard)(uid)
        request: tuple[Any, ...] = (
            uid,
            segments,
            batch.max_tokens[index],
            cache,
            [],
            batch.samplers[index],
            batch.logits_processors[index],
            batch.stop_sequences[index],
        )
        # In order of arrival: older requests that were preempted before stay ahead of it.
        queue = deque(sorted([*self._unprocessed_sequences, request], key=lambda waiting: waiting[0]))
        self._unprocessed_sequences = queue

    def _finished(self, response: Any) -> Any:
        self._given.pop(response.uid, None)
        self._brought.discard(response.uid)
        if response.uid not in self._unknown:
            self._sharing.store(response.all_tokens, response.prompt_cache)
        self._unknown.discard(response.uid)
        self._steps.pop(response.uid, None)
        return self._offers.finished(response)

    def _need(self, request: Any) -> Footprint:
        """Pages a waiting request needs to be admitted, beyond those its cache holds already."""
        _, segments, max_tokens, cache, known, *_ = request
        row = row_of(cache)
        tokens = sum(map(len, segments)) + max(len(known), row.tokens if row is not None else 0)
        return self._admission.further(row, tokens + (max_tokens if self._on_full == "wait" else 1))

    def _promised(self) -> Footprint:
        """Pages that running rows are sure to ask for: the rest of their prompts, and one page each to grow into."""
        promised = self._admission.nothing()
        wait = self._on_full == "wait"
        rows = rows_of(self._prompt_batch.prompt_cache) or []
        for row, state, limit in zip(rows, self._currently_processing, self._prompt_batch.max_tokens, strict=False):
            left = sum(map(len, state[0])) + (limit if wait else 1)
            promised += self._admission.further(row, row.tokens + left)
        batch = self._generation_batch
        rows = rows_of(batch.prompt_cache) or []
        for row, limit, count in zip(rows, batch.max_tokens, batch._num_tokens, strict=False):
            left = limit - count if wait else self._admission.page_size
            promised += self._admission.further(row, row.tokens + left)
        return promised


def row_of(cache: Sequence[Any]) -> PagedSequence | None:
    """The request that one request's caches belong to; None if none of them is in pages."""
    return next((leaf._row for leaf in leaves(cache) if hasattr(leaf, "_row")), None)
