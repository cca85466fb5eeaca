"""PromptingGenerator: which waiting requests are admitted, and how their prompts are processed."""

from __future__ import annotations

import functools
import time
from typing import Any

from mlx_lm.generate import PromptProcessingBatch

from ..batch_cache import rows_of
from .preempting import PreemptingGenerator, row_of


class PromptingGenerator(PreemptingGenerator):
    """A batch generator that admits requests as far as pages allow, and processes their prompts in common chunks."""

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
            if request[0] not in self._brought:
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
            if uid not in self._unknown
        }
        return self._sharing.must_wait(request, self._limit_of(request), running)

    def _with_stored_prompt(self, request: Any) -> Any:
        if request[0] in self._brought or request[4]:
            return request
        # What is on disk needs as much room as if it were run.
        may_load = lambda: self._admission.has_room(self._need(request), self._promised())  # noqa: E731
        return self._sharing.begin(request, self._limit_of(request), may_load)

    def _limit_of(self, request: Any) -> int | None:
        row = row_of(request[3])
        return row.max_kv_size if row is not None else None

    def _finish_prompts(self, out: list[Any]) -> list[Any]:
        """Start generating for the rows that have only the last prompt token left."""
        self._drop_refused(out)
        ready = self._ready()
        if not ready:
            return []
        if not self._ensure_room(lambda: self._prompt_batch, lambda: [1] * len(self._ready()), out, self._ready):
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
        """Process a chunk of every prompt in the batch; together at most one step's tokens."""
        if not self._ensure_room(lambda: self._prompt_batch, self._chunks, out) or not len(self._prompt_batch):
            return []
        chunks, responses, counts = [], [], self._chunks()
        for uid, state, count in zip(self._prompt_batch.uids, self._currently_processing, counts, strict=True):
            segments = state[0]
            chunks.append(segments[0][:count])
            segments[0] = segments[0][count:]
            finished = not segments[0]
            if finished:
                segments.pop(0)
            state[1] += count
            if uid not in self._resumed:
                responses.append(PromptProcessingBatch.Response(uid, (state[1], state[2]), finished, False))
        self._counters.prompt_tokens += sum(counts)
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

    def _ready(self) -> list[int]:
        """Rows of the prompt batch that have one token left, the one generation starts with."""
        return [
            i for i, (segments, *_) in enumerate(self._currently_processing) if len(segments) == 1 == len(segments[0])
        ]

    def _chunks(self) -> list[int]:
        """Tokens of each row in the next prompt step.

        Rows of unlike length are padded to one while at least two thirds of what is computed are tokens: fewer steps
        are worth that. Where layers without pages would run the padding, all get as many as the shortest. Rows with a
        size limit are cut as they would be alone: what a token reads of the first ones depends on where its step began.
        """
        rows = self._currently_processing
        paged = rows_of(self._prompt_batch.prompt_cache)
        if paged and paged[0].max_kv_size and not self._session.stateful:
            return [min(int(self.prefill_step_size), len(segments[0])) for segments, *_ in rows]
        most = max(1, int(self.prefill_step_size) // len(rows))
        lengths = [min(most, len(segments[0])) for segments, *_ in rows]
        for row, (uid, tokens) in enumerate(zip(self._prompt_batch.uids, self._prompt_batch.tokens, strict=True)):
            stop = self._sharing.until_stop(uid, len(tokens))
            if stop is not None:
                lengths[row] = min(lengths[row], stop)
        width = shortest = min(lengths)
        if not self._session.stateful:
            full = [
                count for count in lengths if 3 * sum(min(count, row) for row in lengths) >= 2 * count * len(lengths)
            ]
            width = max(full, default=shortest)
        return [min(width, length) for length in lengths]
