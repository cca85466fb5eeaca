"""ServerMetrics: what happens on a server, as counters and gauges for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..stats import PoolStats

OUTCOMES = ("finished", "cancelled", "refused", "failed")
SOURCES = ("computed", "recomputed", "reused")

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class ServerState:
    """A server at one moment. ``pools`` holds the numbers of the model's pages and, if there is one, the draft's."""

    model: str | None = None
    running: int = 0
    waiting: int = 0
    pools: dict[str, PoolStats] = field(default_factory=dict)
    stored_prompts: int = 0
    stored_bytes: int = 0
    evicted_prompts: int = 0


class ServerMetrics:
    """Counters of one server, in a registry of their own; gauges are read from ``state`` when somebody asks.

    A request is counted once in ``tinykv_requests``, when it ends. Prompt tokens are counted when they were run
    through the model (or need not be, as a stored prompt has them), not when they are promised.
    """

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("tinykv_requests", "Requests that ended, by how.", ["outcome"], registry=self.registry)
        self._prompt_tokens = Counter(
            "tinykv_prompt_tokens",
            "Prompt tokens run through the model, run again after a preemption, and taken from a stored prompt.",
            ["source"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for source in SOURCES:
            self._prompt_tokens.labels(source)
        self.preemptions = Counter(
            "tinykv_preemptions",
            "Times a request gave its pages up, to be computed again.",
            registry=self.registry,
        )
        self._generated = Counter("tinykv_generated_tokens", "Tokens generated.", registry=self.registry)
        self._first_token = Histogram(
            "tinykv_time_to_first_token_seconds",
            "From a request's arrival to its first token, the time in the queue included.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "tinykv_time_per_output_token_seconds",
            "Between two tokens of a request.",
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_StateCollector(state))

    def ended(self, outcome: str) -> None:
        """A request ended in one of :data:`OUTCOMES`."""
        self._requests.labels(outcome).inc()

    def recomputed(self, count: int) -> None:
        """Tokens of preempted requests were run again."""
        self._prompt_tokens.labels("recomputed").inc(count)

    def counts(self) -> dict[str, dict[str, int]]:
        """The counters, for people and scripts."""
        return {
            "requests": {outcome: self._value("tinykv_requests_total", outcome=outcome) for outcome in OUTCOMES},
            "prompt_tokens": {source: self._value("tinykv_prompt_tokens_total", source=source) for source in SOURCES},
            "work": {
                "preemptions": self._value("tinykv_preemptions_total"),
                "generated_tokens": self._value("tinykv_generated_tokens_total"),
            },
        }

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def meter(self) -> RequestMeter:
        """For a request that arrives now."""
        return RequestMeter(self)

    def _value(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(name, labels) or 0)


class RequestMeter:
    """Counts one request's tokens and times; any thread may read.

    ``arrived`` is a time of ``time.monotonic()``. ``computed`` prompt tokens were run, ``generated`` came out.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.arrived = time.monotonic()
        self.computed = 0
        self.generated = 0
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._reused: int | None = None

    @property
    def reused(self) -> int:
        """Prompt tokens that a stored prompt had."""
        return self._reused or 0

    @property
    def tokens_per_second(self) -> float | None:
        """How fast it has been generating since its first token; None before the second one."""
        first, last, generated = self._first_token, self._last_token, self.generated
        if first is None or last is None or generated < 2 or last == first:
            return None
        return (generated - 1) / (last - first)

    def progress(self, done: int, total: int, prompt: int) -> None:
        """``done`` of the ``total`` tokens that have to be run were; the whole prompt has ``prompt`` tokens."""
        if self._reused is None:
            self._reused = prompt - total
            self._metrics._prompt_tokens.labels("reused").inc(self._reused)
        if done > self.computed:
            self._metrics._prompt_tokens.labels("computed").inc(done - self.computed)
            self.computed = done

    def token(self, prompt: int, reused: int) -> None:
        """A token was generated; with the first one, all of the prompt but the ``reused`` tokens has been run."""
        now = time.monotonic()
        if self._last_token is None:
            todo = prompt - (reused if self._reused is None else self._reused)
            self.progress(todo, todo, prompt)
            self._metrics._first_token.observe(now - self.arrived)
            self._first_token = now
        else:
            self._metrics._per_token.observe(now - self._last_token)
        self._last_token = now
        self.generated += 1
        self._metrics._generated.inc()


class _StateCollector(Collector):
    """Turns a server's state into gauges at every scrape."""

    def __init__(self, state: Callable[[], ServerState]) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        # Otherwise the registry would collect once at registration, to learn the names.
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield GaugeMetricFamily("tinykv_requests_running", "Requests being computed.", value=state.running)
        yield GaugeMetricFamily(
            "tinykv_requests_waiting", "Requests in the queue, preempted ones included.", value=state.waiting
        )
        yield GaugeMetricFamily("tinykv_stored_prompts", "Prompts kept for later requests.", value=state.stored_prompts)
        yield GaugeMetricFamily("tinykv_stored_prompt_bytes", "Bytes of their K/V.", value=state.stored_bytes)
        yield CounterMetricFamily(
            "tinykv_stored_prompt_evictions", "Pages of stored prompts that gave way.", value=state.evicted_prompts
        )
        pages = GaugeMetricFamily("tinykv_pages", "Pages by state.", labels=["model", "state"])
        shared = GaugeMetricFamily("tinykv_pages_shared", "Used pages with several holders.", labels=["model"])
        memory = GaugeMetricFamily("tinykv_bytes", "Bytes allowed, reserved and used.", labels=["model", "kind"])
        waste = GaugeMetricFamily("tinykv_waste_ratio", "Share of used pages' slots without a token.", labels=["model"])
        tokens = GaugeMetricFamily("tinykv_tokens", "Tokens held for requests and stored prompts.", labels=["model"])
        growths = CounterMetricFamily("tinykv_pool_growths", "Times a page pool grew.", labels=["model"])
        copies = CounterMetricFamily("tinykv_cow_copies", "Shared pages copied on write.", labels=["model"])
        moves = CounterMetricFamily("tinykv_page_moves", "Pages moved together, to give memory away.", labels=["model"])
        evictions = CounterMetricFamily("tinykv_evictions", "Cached pages evicted.", labels=["model"])
        refused = CounterMetricFamily(
            "tinykv_prefix_refused_tokens",
            "Prompt tokens that were stored but could not be used.",
            labels=["model", "reason"],
        )
        gone = CounterMetricFamily("tinykv_prefix_evicted_tokens", "Stored tokens that gave way.", labels=["model"])
        for model, stats in state.pools.items():
            gone.add_metric([model], stats.prefix_evicted_tokens)
            for reason, count in stats.prefix_refused.items():
                refused.add_metric([model, reason], count)
            pages.add_metric([model, "used"], stats.pages_used)
            pages.add_metric([model, "free"], stats.pages_free)
            pages.add_metric([model, "cached"], stats.pages_cached)
            shared.add_metric([model], stats.pages_shared)
            memory.add_metric([model, "budget"], stats.bytes_total)
            memory.add_metric([model, "reserved"], stats.bytes_reserved)
            memory.add_metric([model, "used"], stats.bytes_used)
            waste.add_metric([model], stats.waste)
            tokens.add_metric([model], stats.tokens)
            growths.add_metric([model], stats.growths)
            copies.add_metric([model], stats.cow_copies)
            moves.add_metric([model], stats.page_moves)
            evictions.add_metric([model], stats.evictions)
        yield from (pages, shared, memory, waste, tokens, growths, copies, moves, evictions, gone, refused)
