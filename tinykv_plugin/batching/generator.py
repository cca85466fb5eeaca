"""PagedBatchGenerator: mlx-lm's BatchGenerator within the page budget."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..attachment import attachment_of
from ..batch_cache import rows_of
from ..errors import CacheStateError
from ..persistence import adopt
from ..sequence import PagedSequence
from ..session import PagedSession
from .admission import Admission
from .guard import guard_processors, guard_sampler
from .preempting import BatchCounts, row_of
from .prompting import PromptingGenerator
from .responses import Offers
from .sharing import PromptSharing

log = logging.getLogger("tinykv")


class PagedBatchGenerator(PromptingGenerator):
    """Continuous batching for an attached model; takes the place of mlx-lm's class, with the same interface.

    - A request that can never fit is refused by :meth:`insert` before any computing.
    - Others wait in order of arrival until the pages of their prompt are free.
    - When running rows outgrow the budget, the youngest is preempted and computed again later (setting ``on_full``).
    - An exception of a request's sampler or logits processor, or of a forward pass, ends the requests concerned with a
      :class:`FailedResponse`; the others go on.
    - Prompts are processed in chunks that need little padding, and none where recurrent layers would see it.
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
        # What is computed in which steps, of requests with a size limit: their result depends on it.
        self._steps: dict[int, list[list[int]]] = {}
        self._reported: dict[int, Exception] = {}

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
        all_tokens = [list(known) for known in all_tokens] if all_tokens else None  # mlx-lm appends to these lists
        brought = [cache is not None for cache in caches or ()]
        uids: list[int] = super().insert_segments(segments, max_tokens, caches, all_tokens, *options, **named_options)
        self._brought.update(itertools.compress(uids, brought))
        new = [self._unprocessed_sequences.pop() for _ in uids]
        for uid, steps, _, cache, known, *_ in new:
            row = row_of(cache)
            if row is not None and row.max_kv_size and uid not in self._brought:
                self._steps[uid] = [list(step) for step in steps]
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
            self._steps.pop(uid, None)
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
        if not self._ensure_room(lambda: self._generation_batch, self._one_each, out) or not len(
            self._generation_batch
        ):
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

    def _one_each(self) -> list[int]:
        return [1] * len(self._generation_batch)

    def _own_pages(self, cache: list[Any] | None) -> list[Any] | None:
        """``cache`` in pages of this model: mlx-lm's own caches are copied into pages, others' are refused."""
        if cache is None:
            return None
        row = row_of(cache)
        if row is None:
            cache = list(cache)
            adopt(cache, self._kv)
        elif row.session is not self._session:
            raise CacheStateError(
                "a prompt cache belongs to another model or attachment; make it with this model's make_prompt_cache"
            )
        return cache
