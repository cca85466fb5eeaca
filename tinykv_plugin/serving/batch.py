"""ServedBatch: the requests of one model that are answered together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm import server as mlx_server

from ..batching.generator import PagedBatchGenerator
from .metrics import ServerMetrics
from .prompt import Prompt
from .ticket import Ticket

if TYPE_CHECKING:
    from ..sequence import PagedSequence

log = logging.getLogger("tinykv")


@dataclass
class _Row:
    """A request in the generator; ``done`` tokens of its prompt have been run."""

    ticket: Ticket
    detokenizer: Any
    done: int = 0
    prompting: bool = True


class ServedBatch:
    """Drives a PagedBatchGenerator and tells each request's ticket what it has generated.

    Whatever goes wrong with one request ends that request only. Used by the generation thread alone; other threads may
    read ``running``, the number of requests that have pages.
    """

    def __init__(self, provider: Any, metrics: ServerMetrics, **options: Any) -> None:
        self._tokenizer = provider.tokenizer
        self._metrics = metrics
        self._rows: dict[int, _Row] = {}
        self.running = 0
        self._generator = PagedBatchGenerator(provider.model, **options)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def room(self) -> int:
        """Requests that can start with the next step, as far as their number goes."""
        generator = self._generator
        if generator.waiting:
            return 0
        prompting = sum(row.prompting for row in self._rows.values())
        prompts: int = generator.prefill_batch_size - prompting
        rows: int = generator.completion_batch_size - len(self._rows)
        return max(0, min(prompts, rows))

    def add(self, ticket: Ticket, prompt: Prompt) -> None:
        """Queue a request. Raises RequestTooLargeError if it can never fit."""
        row = _Row(ticket, self._tokenizer.detokenizer)
        (uid,) = self._generator.insert_segments(
            [prompt.segments],
            [prompt.max_tokens],
            samplers=[prompt.sampler],
            logits_processors=[prompt.logits_processors],
            stop_sequences=[prompt.stop_sequences],
        )
        ticket.accept(prompt.context)
        self._rows[uid] = row

    def step(self) -> None:
        """Process a chunk of prompts and generate a token of each answer."""
        generator, preempted = self._generator, self._generator.counts.preempted
        run = generator._counters.prompt_tokens
        prompted, generated = generator.next()
        self._metrics.preemptions.inc(generator.counts.preempted - preempted)
        self._report(prompted, generator._counters.prompt_tokens - run)
        self._deliver(generated)
        # What was not stored is not wanted; there may be no next step to free its pages.
        generator._offers.withdraw()
        self.running = generator.running

    def sequences(self) -> dict[int, weakref.ref[PagedSequence]]:
        """The page tables of the requests that run, by the numbers of their tickets."""
        found = self._generator.sequences().items()
        return {self._rows[uid].ticket.number: weakref.ref(row) for uid, row in found if uid in self._rows}

    def unwanted(self) -> list[int]:
        """Requests that are over for their clients, but not here."""
        return [uid for uid, row in self._rows.items() if row.ticket.over]

    def remove(self, uids: Sequence[int]) -> None:
        """Forget requests, wherever they are."""
        self._generator.remove(uids)
        for uid in uids:
            row = self._rows.pop(uid, None)
            if row is not None:
                row.ticket.end("cancelled")
        self.running = self._generator.running

    def close(self) -> None:
        """Give everything back; requests that are left just go."""
        self._generator.remove(list(self._rows))
        self._rows.clear()
        self._generator.close()

    def _report(self, responses: Iterable[Any], run: int) -> None:
        """Tell how far the prompts are. ``run`` prompt tokens were run; those that nobody is told of were run again."""
        for response in responses:
            row = self._rows.get(response.uid)
            if row is None:
                continue
            row.ticket.put(response.progress)
            row.prompting = not response.end_of_prompt
            if row.prompting:
                done = response.progress[0]
                run -= max(0, done - row.done)
                row.done = max(row.done, done)
        if run > 0:
            self._metrics.recomputed(run)

    def _deliver(self, responses: Iterable[Any]) -> None:
        ours = [(self._rows[response.uid], response) for response in responses if response.uid in self._rows]
        for row, response in ours:
            if response.finish_reason == "error":
                del self._rows[response.uid]
                row.ticket.fail(response.error, logged=True)
        ours = [(row, response) for row, response in ours if response.finish_reason != "error"]
        if not ours:
            return
        # One evaluation for all rows.
        chosen: Any = mx.stack([response.logprobs[response.token] for _, response in ours]).tolist()
        for (row, response), logprob in zip(ours, chosen, strict=True):
            try:
                self._pass_on(row, response, logprob)
            except Exception as error:
                self._generator.remove([response.uid])
                self._rows.pop(response.uid, None)
                row.ticket.fail(error)

    def _pass_on(self, row: _Row, response: Any, logprob: float) -> None:
        finish = response.finish_reason
        # A stop token is no text.
        if finish != "stop":
            row.detokenizer.add_token(response.token)
        if finish is not None:
            row.detokenizer.finalize()
        row.ticket.put(
            mlx_server.Response(
                row.detokenizer.last_segment,
                response.token,
                logprob,
                finish,
                mlx_server._format_top_logprobs(response.logprobs, row.ticket.args.top_logprobs, self._tokenizer),
            )
        )
        if finish is not None:
            row.ticket.put(None)
            del self._rows[response.uid]
