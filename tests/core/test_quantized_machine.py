"""Requests over quantized pages do what plain lists of tokens do: append, fork, trim, batch, drop."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any, ClassVar

import hypothesis.strategies as st
import mlx.core as mx
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from models import shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError, OutOfPagesError
from tinykv_plugin.reading import open_tokens

HEADS, DIM, PAGE_SIZE = 2, 32, 4


def rows(tokens: list[list[int]]) -> mx.array:
    """K or V ``(rows, heads, width, dim)`` that quantization doesn't change: all elements of a token are its number."""
    flat = mx.array(tokens, dtype=mx.float32)[:, None, :, None]
    return mx.broadcast_to(flat, (len(tokens), HEADS, len(tokens[0]), DIM))


class Request:
    """A request's caches and the tokens that are in them."""

    def __init__(self, caches: list[Any], tokens: list[int]) -> None:
        self.caches = caches
        self.tokens = tokens

    def append(self, new: list[int]) -> None:
        for cache in self.caches:
            cache.update_and_fetch(rows([new]), rows([[-token for token in new]]))
        self.tokens += new

    def verify(self) -> None:
        for cache in self.caches:
            assert cache.offset == len(self.tokens)
            keys, values = cache.keys_and_values()
            held = keys[0, 0, :, 0].tolist()
            window = cache.window or len(self.tokens)
            assert held[-window:] == self.tokens[-window:], (held, self.tokens)
            assert mx.array_equal(keys, -values)
            assert mx.array_equal(keys, mx.broadcast_to(keys[:, :1, :, :1], keys.shape))
            opened = open_tokens(cache._session, cache._layer, cache._row)
            if opened is not None:
                count = opened[0].shape[2]
                assert count == len(self.tokens) % PAGE_SIZE or len(self.tokens) < cache._session.kv_format.start
                window = min(count, window)  # older tokens a window may have dropped before a trim
                assert opened[0][0, 0, -window:, 0].tolist() == self.tokens[-window:]
                assert mx.array_equal(opened[0][:, :, -window:], -opened[1][:, :, -window:])


class QuantizedMachine(RuleBasedStateMachine):
    requests = Bundle("requests")
    fields: ClassVar = {"bits": 4, "value_bits": 8}

    def __init__(self) -> None:
        super().__init__()
        model = shared("gemma3_text", head_dim=DIM, num_hidden_layers=2)
        self.kv = tinykv.attach(model, page_size=PAGE_SIZE, max_pages=30, rewind=3, **self.fields)
        self.ids = itertools.count(1)
        self.live: list[Request] = []

    def tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self.ids, count))

    @rule(target=requests, count=st.integers(1, 13))
    def new(self, count: int) -> Request:
        request = Request(self.kv.make_cache(), [])
        with contextlib.suppress(OutOfPagesError):
            request.append(self.tokens(count))
        self.live.append(request)
        return request

    @rule(request=requests, count=st.integers(1, 9))
    def append(self, request: Request, count: int) -> None:
        with contextlib.suppress(OutOfPagesError):
            request.append(self.tokens(count))

    @rule(request=requests, count=st.integers(1, 9))
    def break_off(self, request: Request, count: int) -> None:
        """A pass ends after its first layer."""
        with contextlib.suppress(OutOfPagesError):
            new = self.tokens(count)
            request.caches[0].update_and_fetch(rows([new]), rows([[-token for token in new]]))
        for cache in request.caches:
            cache.make_mask(1)

    @rule(target=requests, request=requests)
    def fork(self, request: Request) -> Request:
        fork = Request(copy.deepcopy(request.caches), list(request.tokens))
        self.live.append(fork)
        return fork

    @rule(request=requests, count=st.integers(1, 6))
    def trim(self, request: Request, count: int) -> None:
        try:
            for cache in request.caches:
                cache.trim(count)
        except CacheStateError:
            return
        del request.tokens[-count:]

    @rule(group=st.lists(requests, min_size=2, max_size=3, unique_by=id))
    def batch(self, group: list[Request]) -> None:
        """Some requests take a token together."""
        new = [self.tokens(1) for _ in group]
        batch = [caches[0].merge(list(caches)) for caches in zip(*(one.caches for one in group), strict=True)]
        try:
            for cache in batch:
                cache.update_and_fetch(rows(new), rows([[-token for token in row] for row in new]))
        except OutOfPagesError:
            return
        for index, request in enumerate(group):
            request.caches = [cache.extract(index) for cache in batch]
            request.tokens += new[index]

    @rule(request=consumes(requests))
    def drop(self, request: Request) -> None:
        self.live.remove(request)
        request.caches = []

    @invariant()
    def holds(self) -> None:
        self.kv.check()
        for request in self.live:
            if request.tokens:
                request.verify()

    def teardown(self) -> None:
        for request in self.live:
            request.caches = []
        self.kv.check()
        assert self.kv.stats().pages_used == 0
        self.kv.detach()


class LateMachine(QuantizedMachine):
    """Full precision at first."""

    fields: ClassVar = {"bits": 8, "quantized_start": 14}


TestQuantized = QuantizedMachine.TestCase
TestLate = LateMachine.TestCase
TestQuantized.settings = TestLate.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
