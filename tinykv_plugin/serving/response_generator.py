"""PagedResponseGenerator: the thread of mlx-lm's server that generates, within the page budget and without dying."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm import server as mlx_server

from .alone import AloneResponses
from .batch import ServedBatch
from .failures import InvalidRequestError, without_traceback
from .line import WaitingLine
from .live import LiveView
from .loaded_model import LoadedModel
from .metrics import ServerMetrics, ServerState
from .prompt import make_prompt, require_usable, tokenize
from .prompt_cache import UNLIMITED, PagedPromptCache
from .ticket import Ticket

log = logging.getLogger("tinykv")

# How long the thread waits for a request before it looks whether it has to stop.
IDLE_SECONDS = 0.1


class PagedResponseGenerator(mlx_server.ResponseGenerator):  # type: ignore[misc]
    """Serves requests as mlx-lm's class does, with a loop of its own.

    Requests are answered together by a :class:`ServedBatch` or, where mlx-lm does so (a seed, a draft model, images),
    one at a time. A request that fails gets its exception, and the others don't notice. At most ``max_queue`` requests
    wait. If the model's caches are not paged, mlx-lm's own loop runs.
    """

    def __init__(self, model_provider: Any, prompt_cache: PagedPromptCache, *, max_queue: int | None = None) -> None:
        self.metrics = ServerMetrics(self.state)
        self._line = WaitingLine(max_queue, self.metrics, self.generation_available)
        self._model = LoadedModel(model_provider)
        self._stored = prompt_cache
        self._limit: int | None = model_provider.cli_args.prompt_cache_bytes
        self.live = LiveView(self.state, self.metrics.counts, self._line.tickets, lambda: self._model.sessions)
        self._stored.max_bytes = UNLIMITED if self._limit is None else self._limit
        self._stream: Any = None
        self._batch: ServedBatch | None = None
        # The request whose turn is next but that can't join the batch, and the one that is served alone.
        self._next: tuple[Any, Any, Any] | None = None
        self._alone: Ticket | None = None
        # Starts the thread.
        super().__init__(model_provider, prompt_cache)

    # Any thread -----------------------------------------------------------------------------------------------------

    def submit(self, request: Any, args: Any) -> Ticket:
        """Take a request in. Raises InvalidRequestError, QueueFullError; RuntimeError if the server is stopping."""
        if not self.generation_available():
            raise RuntimeError("the generation thread died")
        # In the client's thread: others go on while a model is looked for.
        try:
            names = self._model.require(args.model)
        except InvalidRequestError:
            self.metrics.ended("refused")
            raise
        return self._line.join(request, dataclasses.replace(args, model=names))

    def generate(
        self, request: Any, generation_args: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        """As mlx-lm's: the context of a request that has started, and its responses."""
        return self.submit(request, generation_args).open(progress_callback)

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served: the thread lives, and the model it was started with could be loaded."""
        return bool(self.generation_available()) and not self._model.failed

    def state(self) -> ServerState:
        """What the server is doing right now."""
        batch, alive = self._batch, self._line.alive
        running = (batch.running if batch is not None else 0) + (self._alone is not None)
        if not self._model.paged:
            running = alive  # mlx-lm's loop doesn't tell
        return ServerState(
            model=self._model.name,
            running=min(running, alive),
            waiting=max(0, alive - running),
            pools={label: session.stats() for label, session in self._model.sessions.items()},
            stored_prompts=len(self._stored),
            stored_bytes=self._stored.nbytes,
            evicted_prompts=self._stored.evictions,
        )

    def stop_and_join(self) -> None:
        """End the thread; requests that wait or run are cancelled."""
        self._stop = True
        self.live.close()
        self._line.close()
        super().stop_and_join()

    # The loop -------------------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        self._stream = mx.default_stream(mx.default_device())
        if self._is_distributed:
            # All ranks have to draw the same samples.
            state: Any = mx.random.state
            seed: Any = mx.distributed.all_sum(state[0]).view(mx.uint64).item()
            mx.random.seed(seed)
        self._model.load_default()
        self._stored.use(self._model.prefixes, self._model.max_kv_size)
        while not self._stop:
            try:
                if self._model.paged:
                    self._turn()
                else:
                    super()._generate()
            except Exception as error:
                log.error("the requests under way failed: %s", without_traceback(error))
                self._drop_batch()
                self._line.fail_taken(error)
        self._forget_model()
        self._line.fail_taken(RuntimeError("the server is stopping"))
        # In this thread, whose stream their arrays belong to.
        self.model_provider.reset()
        gc.collect()

    def _turn(self) -> None:
        """Let those go that nobody waits for, take requests in, and have those under way make a step."""
        if self._batch:
            self._batch.remove(self._share_object(self._batch.unwanted()))
        self._take_requests()
        if self._batch:
            # Ranks have to agree on what to do next, which takes time: not after every step.
            for _ in self._time_budget if self._is_distributed else (None,):
                if not self._batch:
                    break
                self._batch.step()
            if self.live.watched:
                self.live.note(self._batch.sequences() if self._batch is not None else {})
            self._keep_limit()
        self._line.publish(self._room)

    def _take_requests(self) -> None:
        while self._model.paged and not self._stop:
            if not self._batch:
                self._line.publish(self._room)
            if self._next is None and self._room:
                self._next = self._next_request(None if self._batch else IDLE_SECONDS)
            if self._next is None:
                return
            ticket, request, args = self._next
            try:
                if ticket.over and not self._is_distributed:
                    ticket.end("cancelled")
                elif self._batch and not (self._model.is_named(args.model) and self._is_batched(request, args)):
                    return  # when the batch is done
                else:
                    self._serve(ticket, request, args)
            except Exception as error:
                ticket.fail(error)
            self._next = None

    def _next_request(self, timeout: float | None = None) -> tuple[Any, Any, Any] | None:
        ticket = self._line.take(timeout) if self._rank == 0 else None
        shared = self._share_request((ticket, ticket.request, ticket.args) if ticket is not None else None)
        if shared is None:
            return None
        first, request, args = shared
        return (first if isinstance(first, Ticket) else self._line.adopt(request, args)), request, args

    @property
    def _room(self) -> int:
        """Requests that can start with the next step."""
        if self._next is not None:
            return 0
        return self._batch.room if self._batch is not None else int(self.cli_args.prompt_concurrency)

    def _is_batched(self, request: Any, args: Any) -> bool:
        """Whether the loaded model can answer a request together with others."""
        return self._is_batchable(args) and not any(mlx_server._image_parts(request.messages))

    def _serve(self, ticket: Ticket, request: Any, args: Any) -> None:
        if not self._model.is_named(args.model):
            self._forget_model()
            self._model.load(args.model)
            self._stored.use(self._model.prefixes, self._model.max_kv_size)
        if not self._model.paged:
            self._line.give_back(ticket)
            return
        require_usable(args, self._model.vocabulary)
        if self._is_batched(request, args):
            self._add_to_batch(ticket, request, args)
        else:
            self._serve_alone(ticket, request, args)

    def _add_to_batch(self, ticket: Ticket, request: Any, args: Any) -> None:
        prompt = make_prompt(self, request, args)
        if self._batch is None:
            self._batch = ServedBatch(
                self.model_provider,
                self.metrics,
                completion_batch_size=self.cli_args.decode_concurrency,
                prefill_batch_size=self.cli_args.prompt_concurrency,
                prefill_step_size=self.cli_args.prefill_step_size,
                stream=self._stream,
            )
        self._log_cache_stats()
        self._batch.add(ticket, prompt)
        self._keep_limit()

    # One request at a time ------------------------------------------------------------------------------------------

    def _serve_alone(self, ticket: Ticket, request: Any, args: Any) -> None:
        ticket.start()
        self._alone = ticket
        self._line.publish(0)
        try:
            responses = AloneResponses(ticket, self._keep_limit, may_stop=not self._is_distributed)
            self._serve_single((responses, request, args), self._stream)
        finally:
            self._alone = None
        self._keep_limit()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        tokenized = tokenize(super()._tokenize, tokenizer, request, args)
        if self._alone is not None:
            tokens = len(tokenized[0]) + args.max_tokens
            chunk = self.cli_args.prefill_step_size
            self._model.make_room(tokens, args.num_draft_tokens, chunk)
            self._stored.expect(list(itertools.accumulate(map(len, tokenized[1]))))
        return tokenized

    # Letting go -----------------------------------------------------------------------------------------------------

    def _log_cache_stats(self) -> None:
        if logging.getLogger().isEnabledFor(logging.INFO):
            super()._log_cache_stats()

    def _keep_limit(self) -> None:
        """Keep to ``--prompt-cache-size`` and ``--prompt-cache-bytes``.

        Within the latter stored prompts and requests together, as far as the former can help.
        """
        self._stored.trim_to(n_sequences=self._stored.max_size)
        if self._limit is not None:
            while self._model.held_bytes() > self._limit and self._stored.reclaim():
                pass

    def _forget_model(self) -> None:
        """Drop what keeps the loaded model alive: stored prompts are in its pages."""
        self._drop_batch()
        self._model.finish()
        self._stored.clear()
        self._model.forget()

    def _drop_batch(self) -> None:
        batch, self._batch = self._batch, None
        try:
            if batch is not None:
                batch.close()
        except Exception:
            log.exception("the batch could not be closed")
