"""PagedBatchGenerator: mlx-lm's BatchGenerator within the page budget."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from ..attachment import attachment_of
from ..batch_cache import rows_of
from ..errors import CacheStateError, OutOfPagesError, PoolGrowthError, TinyKVError
from ..layout import leaves
from ..persistence import adopt
from ..sequence import PagedSequence
from ..session import PagedSession
from .admission import Admission, Footprint
from .guard import guard_processors, guard_sampler
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


class PagedBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """Continuous batching for an attached model; takes the place of mlx-lm's class, with the same interface.

    - A request that can never fit is refused by :meth:`insert` before any computing.
    - Others wait in order of arrival until the pages of their prompt are free.
    - When running rows outgrow the budget, the youngest is preempted and computed again later (setting ``on_full``).
    - An exception of a request's sampler or logits processor, or of a forward pass, ends the requests concerned with a
      :class:`FailedResponse`; the others go on.
    - Prompts are processed in chunks of equal length, so nothing is padded: no compute is spent on padding, and
      recurrent layers never see it.

    - Prompts and answers are stored in the model's prefix cache, and requests begin with what it has of their prompt;
      of requests that begin alike the first one runs the common part. Stored prompts give way when pages are short.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._offers = Offers()
        self._old_wired_limit = None  # for mlx-lm's __del__, should this raise
        kv = attachment_of(model)
        session = kv.session if kv is not None else None
        if kv is None or not isinstance(session, PagedSession):
            raise CacheStateError(
                "PagedBatchGenerator needs a model with paged caches: tinykv_plugin.attach(model) first"
            )
        alone = {type(leaf).__name__ for leaf in leaves(kv.make_cache()) if not hasattr(leaf, "merge")}
        if alone:
            raise CacheStateError(
                f"this model can't be batched: it keeps its context in {', '.join(sorted(alone))}, which mlx-lm can't "
                f"merge; generate one request at a time"
            )
        session.agree()
        super().__init__(model, **options)
        self.counts = BatchCounts()
        self._kv = kv
        self._session = session
        self._on_full = kv.config.on_full
        self._sharing = PromptSharing(session)
        self._admission = Admission(session, self.prefill_step_size)
        # Preempted rows: their place in the stop automaton and the number of tokens they have returned.
        self._resumed: dict[int, tuple[Any, int]] = {}
        # Caches given without saying which tokens are in them: a preempted row starts again from there.
        self._given: dict[int, list[Any]] = {}
        # Requests that came with a cache of their own: the prefix cache is not asked. Of some of them it isn't known
        # which tokens are in it: they are not stored.
        self._brought: set[int] = set()
        self._unknown: set[int] = set()
        self._reported: dict[int, Exception] = {}

    # mlx-lm's own state, typed here: waiting requests as tuples; [segments, done, total] of those in the prompt batch.
    _unprocessed_sequences: deque[Any]
    _currently_processing: list[list[Any]]

    # What callers use -------------------------------------------------------------------------------------------

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[Any] | None = None,
        all_tokens: list[list[int]] | None = None,
        *options: Any,
        **named_options: Any,
    ) -> list[int]:
        """As mlx-lm's. Raises RequestTooLargeError, with no request inserted, if one of them can never fit."""
        limits = max_tokens or [self.max_tokens] * len(segments)
        before = all_tokens or [[] for _ in segments]
        for prompt, known, limit in zip(segments, before, limits, strict=False):
            total = sum(map(len, prompt)) + len(known) + limit
            try:
                self._admission.require_possible(total, self.max_kv_size or self._kv.config.max_kv_size)
            except Exception:
                self.counts.refused += 1
                raise
        caches = [self._own_pages(cache) for cache in caches] if caches else None
        brought = [cache is not None for cache in caches or ()]
        uids: list[int] = super().insert_segments(segments, max_tokens, caches, all_tokens, *options, **named_options)
        self._brought.update(itertools.compress(uids, brought))
        new = [self._unprocessed_sequences.pop() for _ in uids]
        for uid, _, _, cache, known, *_ in new:
            row = _row(cache)
            if row is not None and row.tokens > len(known):
                self._given[uid] = copy.deepcopy(cache)
            if uid in self._brought and (row is None or row.tokens != len(known)):
                self._unknown.add(uid)
        for uid, *middle, sampler, processors, stop in reversed(new):
            guarded = guard_sampler(uid, sampler, self._report), guard_processors(uid, processors, self._report)
            self._unprocessed_sequences.append((uid, *middle, *guarded, stop))
        return uids

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Forget requests wherever they are; unknown ones are ignored."""
        for uid in uids:
            self._resumed.pop(uid, None)
            self._given.pop(uid, None)
            self._reported.pop(uid, None)
        self._brought.difference_update(uids)
        self._unknown.difference_update(uids)
        self._sharing.forget(uids)
        removed: dict[int, Any] = super().remove(uids, return_prompt_caches)
        return removed

    def next_generated(self) -> list[Any]:
        """The next responses of any request; an empty list when none is left."""
        with mx.stream(self._stream):
            while self.busy:
                _, generated = self._next()
                if generated:
                    return generated
        self._offers.withdraw()
        return []

    def close(self) -> None:
        """Give up the caches on offer; as mlx-lm's otherwise."""
        self._offers.withdraw()
        super().close()

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._unprocessed_sequences or len(self._prompt_batch) or len(self._generation_batch))

    @property
    def waiting(self) -> int:
        """Requests not admitted yet, preempted ones included."""
        return len(self._unprocessed_sequences)

    @property
    def running(self) -> int:
        """Requests whose prompt is being processed or whose answer is being generated."""
        return len(self._prompt_batch) + len(self._generation_batch)

    def sequences(self) -> dict[int, PagedSequence]:
        """The page tables of the requests that run, by uid, as they are between two steps."""
        found: dict[int, PagedSequence] = {}
        for batch in (self._prompt_batch, self._generation_batch):
            found |= zip(batch.uids, rows_of(batch.prompt_cache) or [], strict=False)
        return found

    # One step -----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[list[Any], list[Any]]:
        self._offers.withdraw()
        generated = self._decode()
        self._admit()
        prompted = self._finish_prompts(generated)
        prompted += self._process_prompts(generated)
        return prompted, generated

    def _decode(self) -> list[Any]:
        """One token for every row that has its prompt behind it."""
        out: list[Any] = []
        if not self._ensure_room(lambda: self._generation_batch, lambda: 1, out) or not len(self._generation_batch):
            return out
        rows = list(self._generation_batch.uids)
        start = time.perf_counter()
        try:
            responses = self._generation_batch.next()
        except Exception as error:
            self._fail(rows, error, out)
            return out
        self._counters.decode_time += time.perf_counter() - start
        self._counters.generation_tokens += len(responses)
        self._counters.generation_steps += 1
        failed = self._take_reported()
        out += [
            response if response.finish_reason is None else self._finished(response)
            for response in responses
            if response.uid not in failed
        ]
        for uid, failure in failed.items():
            self._fail([uid], failure, out)
        return out

    def _admit(self) -> None:
        """Move waiting requests, in order, into the prompt batch while their prompts fit.

        Those that wait for a common beginning let others pass; that one is being processed, so they won't starve.
        """
        slots = min(
            self.prefill_batch_size - len(self._prompt_batch),
            self.completion_batch_size - len(self._generation_batch) - len(self._prompt_batch),
        )
        queue = self._unprocessed_sequences
        index = 0
        while slots > 0 and index < len(queue):
            if self._waits_for_another(queue[index]):
                index += 1
                continue
            request = self._with_stored_prompt(queue[index])
            need = self._need(request)
            # Alone it fits by require_possible; what its footprint exceeds the free pages by is estimate.
            alone = not (self.running or self._offers.open)
            if not alone and not self._admission.has_room(need, self._promised()):
                if not self._offers.open and self._on_full == "error":
                    self._reported[request[0]] = self._admission.no_room(need)
                return
            del queue[index]
            queue.appendleft(request)
            self._prompt_batch.extend(self._make_batch(1))
            self._sharing.admitted(request)
            slots -= 1

    def _waits_for_another(self, request: Any) -> bool:
        """Whether a request in the prompt batch is computing what this one begins with."""
        if request[0] in self._brought or request[4]:
            return False
        batch = self._prompt_batch
        running = {
            uid: (tokens, state[0])
            for uid, tokens, state in zip(batch.uids, batch.tokens, self._currently_processing, strict=True)
        }
        return self._sharing.must_wait(request, self._limit_of(request), running)

    def _with_stored_prompt(self, request: Any) -> Any:
        if request[0] in self._brought or request[4]:
            return request
        return self._sharing.begin(request, self._limit_of(request))

    def _limit_of(self, request: Any) -> int | None:
        row = _row(request[3])
        return row.max_kv_size if row is not None else None

    def _finish_prompts(self, out: list[Any]) -> list[Any]:
        """Start generating for the rows that have only the last prompt token left."""
        self._drop_refused(out)
        ready = self._ready()
        if not ready:
            return []
        if not self._ensure_room(lambda: self._prompt_batch, lambda: 1, out, self._ready):
            return []
        ready = self._ready()
        if not ready:
            return []
        inputs = [self._currently_processing[i][0][0] for i in ready]
        totals = [self._currently_processing[i][2] for i in ready]
        uids = [self._prompt_batch.uids[i] for i in ready]
        self._currently_processing = [x for i, x in enumerate(self._currently_processing) if i not in ready]
        starting = self._prompt_batch.split(ready)
        self._sharing.forget(uids)
        try:
            batch = starting.generate(inputs)
        except Exception as error:
            self._fail(uids, error, out)
            return []
        responses = []
        for i, (uid, total) in enumerate(zip(uids, totals, strict=True)):
            if uid in self._resumed:
                batch._matchers[i], batch._num_tokens[i] = self._resumed.pop(uid)
            else:
                responses.append(PromptProcessingBatch.Response(uid, (total, total), True, True))
        self._generation_batch.extend(batch)
        for uid, failure in self._take_reported().items():
            self._fail([uid], failure, out)
        return responses

    def _process_prompts(self, out: list[Any]) -> list[Any]:
        """Process a chunk of equal length of every prompt in the batch; together at most one step's tokens."""
        if not self._ensure_room(lambda: self._prompt_batch, self._chunk, out) or not len(self._prompt_batch):
            return []
        count = self._chunk()
        chunks, responses = [], []
        for uid, state in zip(self._prompt_batch.uids, self._currently_processing, strict=True):
            segments = state[0]
            chunks.append(segments[0][:count])
            segments[0] = segments[0][count:]
            finished = not segments[0]
            if finished:
                segments.pop(0)
            state[1] += count
            if uid not in self._resumed:
                responses.append(PromptProcessingBatch.Response(uid, (state[1], state[2]), finished, False))
        self._counters.prompt_tokens += count * len(chunks)
        uids = list(self._prompt_batch.uids)
        start = time.perf_counter()
        try:
            self._prompt_batch.prompt(chunks)
        except Exception as error:
            self._fail(uids, error, out)
            return []
        self._counters.prompt_time += time.perf_counter() - start
        self._store_prompts()
        return responses

    def _store_prompts(self) -> None:
        """Others may begin like the prompts that are being processed."""
        batch = self._prompt_batch
        rows = rows_of(batch.prompt_cache)
        for index, (uid, tokens) in enumerate(zip(batch.uids, batch.tokens, strict=True)):
            if uid in self._unknown:
                continue
            self._sharing.store_prompt(
                tokens, rows[index] if rows else None, functools.partial(batch.extract_cache, index)
            )

    # Room ---------------------------------------------------------------------------------------------------------

    def _ensure_room(
        self,
        batch: Callable[[], Any],
        count: Callable[[], int],
        out: list[Any],
        which: Callable[[], list[int]] | None = None,
    ) -> bool:
        """Make sure that rows of a batch can take ``count`` more tokens each, at the expense of the youngest request.

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
                self._session.check_room(rows, [count()] * len(rows))
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
            row = _row(cache)
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
        log.info("request %d gives its pages up, to be computed again: %s", youngest, error)
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
            self._requeue(batch, index, [tokens, [token]])
        batch.filter([i for i in range(len(batch)) if i != index])

    def _preempt_prompting(self, index: int) -> None:
        batch = self._prompt_batch
        segments = [list(segment) for segment in self._currently_processing[index][0]]
        done = list(batch.tokens[index])
        # Boundaries that were reported are not reported again: what was done is joined to the segment under way.
        segments = [done + segments[0], *segments[1:]] if len(segments) > 1 else [done, *segments]
        self._requeue(batch, index, [segment for segment in segments if segment])
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
            self._brought.discard(uid)
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
        return self._offers.finished(response)

    def _need(self, request: Any) -> Footprint:
        """Pages a waiting request needs to be admitted, beyond those its cache holds already."""
        _, segments, max_tokens, cache, known, *_ = request
        row = _row(cache)
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

    # Failures -----------------------------------------------------------------------------------------------------

    def _report(self, uid: int, error: Exception) -> None:
        self._reported.setdefault(uid, error)

    def _take_reported(self) -> dict[int, Exception]:
        reported, self._reported = self._reported, {}
        return reported

    def _drop_refused(self, out: list[Any]) -> None:
        for uid, error in self._take_reported().items():
            self._fail([uid], error, out)

    def _fail(self, uids: Sequence[int], error: Exception, out: list[Any]) -> None:
        """End requests with an error; their pages go back."""
        if not isinstance(error, TinyKVError):
            log.error("requests %s failed: %s", list(uids), "".join(traceback.format_exception(error)))
        # The traceback's frames hold the batch, and with it the pages, for as long as somebody keeps the error.
        error.__traceback__ = error.__context__ = None
        self.counts.failed += len(uids)
        self.remove(uids)
        out += [FailedResponse(uid, -1, None, "error", None, None, error) for uid in uids]

    # Odds and ends ------------------------------------------------------------------------------------------------

    def _ready(self) -> list[int]:
        """Rows of the prompt batch that have one token left, the one generation starts with."""
        return [
            i for i, (segments, *_) in enumerate(self._currently_processing) if len(segments) == 1 == len(segments[0])
        ]

    def _chunk(self) -> int:
        """Tokens of each row in the next prompt step."""
        rows = self._currently_processing
        most = [int(self.prefill_step_size) // len(rows), *(len(segments[0]) for segments, *_ in rows)]
        for uid, tokens in zip(self._prompt_batch.uids, self._prompt_batch.tokens, strict=True):
            stop = self._sharing.until_stop(uid, len(tokens))
            if stop is not None:
                most.append(stop)
        return max(1, min(most))

    def _own_pages(self, cache: list[Any] | None) -> list[Any] | None:
        """``cache`` in pages of this model: mlx-lm's own caches are copied into pages, others' are refused."""
        if cache is None:
            return None
        row = _row(cache)
        if row is None:
            cache = list(cache)
            adopt(cache, self._kv)
        elif row.session is not self._session:
            raise CacheStateError(
                "a prompt cache belongs to another model or attachment; make it with this model's make_prompt_cache"
            )
        return cache


def _row(cache: Sequence[Any]) -> PagedSequence | None:
    return next((leaf._row for leaf in leaves(cache) if hasattr(leaf, "_row")), None)
