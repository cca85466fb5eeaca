"""A state machine over requests: append, fork, trim, batch, store, continue, evict, drop, broken-off passes.

Faults are injected at every allocation, growth and copy. In a second machine pages are so short that they are moved.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any, ClassVar

import hypothesis.strategies as st
from bookkeeping import Fault, Faults, WriteFault, held, make_session, tensor
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tinykv_plugin.batch_cache import BatchPagedKVCache
from tinykv_plugin.compaction import SPARE, compact
from tinykv_plugin.errors import CacheStateError, OutOfPagesError, PoolGrowthError

FAILURES = (Fault, OutOfPagesError, PoolGrowthError)


class Request:
    """A request's caches and, as the model to compare with, the plain list of its tokens."""

    def __init__(self, caches: list[Any], tokens: list[int]) -> None:
        self.caches = caches
        self.tokens = tokens

    def verify(self) -> None:
        """Every layer has the tokens, and finds each one that it may still read in its place."""
        for cache in self.caches:
            assert cache.offset == len(self.tokens)
            retention = cache._row.tables[cache._layer.group].retention
            first = retention.first_needed(len(self.tokens))
            for position, token in enumerate(self.tokens):
                if position >= first or position < retention.keep:
                    assert held(cache, position) == token


class RequestsMachine(RuleBasedStateMachine):
    requests = Bundle("requests")
    limits: ClassVar[dict[str, Any]] = {"max_pages": 24}

    def __init__(self) -> None:
        super().__init__()
        self.faults = Faults()
        self.session = make_session(self.faults, **self.limits)
        self.ids = itertools.count()
        self.live: list[Request] = []

    def tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self.ids, count))

    def snapshot(self) -> Any:
        """What a failed call must leave as it was: who holds which pages, and the order of the free lists."""
        for row in list(self.session.sequences):
            row.heal()
        free_lists = [
            (pool.allocator._recycled[:], pool.allocator._fresh, pool.allocator._ref_counts[: pool.allocator._fresh])
            for pool in self.session.pools
        ]
        return [[table.pages[:] for table in request.caches[0]._row.tables] for request in self.live], free_lists

    def reordered(self) -> Any:
        """What changes where room was made for a call: it may fail all the same, and leave only tokens as they were."""
        sizes = [(pool.moves, pool.allocator.capacity) for pool in self.session.pools]
        return sizes, self.session.prefix.index.evicted

    @rule(target=requests, limit=st.sampled_from([None, None, 8, 9]))
    def new(self, limit: int | None) -> Request:
        request = Request(self.session.make_cache(limit), [])
        self.live.append(request)
        return request

    @rule(request=requests, count=st.integers(1, 13), fault=st.none() | st.integers(0, 6))
    def append(self, request: Request, count: int, fault: int | None) -> None:
        new = self.tokens(count)
        self.session.collect_abandoned()
        before, order = self.snapshot(), self.reordered()
        self.faults.at = fault
        done = 0
        try:
            for cache in request.caches:
                cache.update_and_fetch(tensor([new]), tensor([new]))
                done += 1
        except FAILURES as failure:
            self.faults.at = None
            if not done and not isinstance(failure, WriteFault) and self.reordered() == order:
                assert self.snapshot() == before
            request.caches[0].make_mask(1)  # a new pass begins: what broke off is taken back
        else:
            self.faults.at = None
            request.tokens += new

    @rule(request=requests, count=st.integers(1, 9), layers=st.integers(1, 2))
    def append_broken_off(self, request: Request, count: int, layers: int) -> None:
        new = self.tokens(count)
        try:
            for cache in request.caches[:layers]:
                cache.update_and_fetch(tensor([new]), tensor([new]))
        except FAILURES:
            pass
        request.caches[0].make_mask(1)

    @rule(target=requests, request=requests, each=st.booleans())
    def fork(self, request: Request, each: bool) -> Request:
        caches = [copy.deepcopy(cache) for cache in request.caches] if each else copy.deepcopy(request.caches)
        assert len({id(cache._row) for cache in caches}) == 1
        fork = Request(caches, list(request.tokens))
        self.live.append(fork)
        return fork

    @rule(request=requests, count=st.integers(0, 20))
    def trim(self, request: Request, count: int) -> None:
        before = [cache.offset for cache in request.caches]
        try:
            trimmed = {cache.trim(count) for cache in request.caches}
        except CacheStateError:
            assert [cache.offset for cache in request.caches] == before
            return
        assert trimmed == {min(count, len(request.tokens))}
        if count:
            del request.tokens[-count:]

    @rule(request=requests, count=st.integers(1, 3))
    def trim_one_layer(self, request: Request, count: int) -> None:
        try:
            request.caches[1].trim(count)
        except CacheStateError:
            return
        request.caches[0].make_mask(1)
        del request.tokens[max(0, len(request.tokens) - count) :]

    @rule(
        target=requests,
        group=st.lists(requests, min_size=1, max_size=4),
        counts=st.lists(st.integers(0, 7), min_size=4, max_size=4),
        keep=st.lists(st.booleans(), min_size=4, max_size=4),
        fault=st.none() | st.integers(0, 5),
    )
    def batch(self, group: list[Request], counts: list[int], keep: list[bool], fault: int | None) -> Any:
        """Merge, append a right-padded prompt and one token each, keep some rows, extract them."""
        try:
            batch = [
                caches[0].merge(list(caches)) for caches in zip(*(request.caches for request in group), strict=True)
            ]
        except CacheStateError:
            assert len({cache.window for cache in (request.caches[0] for request in group)}) > 1
            return multiple()
        lengths = [max(1, counts[0]), *counts[1 : len(group)]]
        new = [self.tokens(length) for length in lengths]
        width = max(lengths)
        self.faults.at = fault
        try:
            for cache in batch:
                cache.prepare(lengths=lengths, right_padding=[width - length for length in lengths])
            padded = [row + [-3] * (width - len(row)) for row in new]
            for cache in batch:
                cache.update_and_fetch(tensor(padded), tensor(padded))
            for cache in batch:
                cache.finalize()
            last = [self.tokens(1) for _ in group]
            for cache in batch:
                cache.update_and_fetch(tensor(last), tensor(last))
        except FAILURES:
            self.faults.at = None
            return multiple()
        self.faults.at = None
        kept = [index for index in range(len(group)) if keep[index]]
        for cache in batch:
            assert isinstance(cache, BatchPagedKVCache)
            cache.filter(kept)
        results = []
        for position, index in enumerate(kept):
            caches = [cache.extract(position) for cache in batch]
            results.append(Request(caches, group[index].tokens + new[index] + last[index]))
        self.live += results
        return multiple(*results)

    @rule(request=requests, short=st.integers(0, 6))
    def store(self, request: Request, short: int) -> None:
        self.session.prefix.insert(request.tokens[: len(request.tokens) - short], request.caches)

    @rule(target=requests, request=requests, keep=st.integers(0, 40), more=st.integers(0, 5))
    def continue_stored(self, request: Request, keep: int, more: int) -> Any:
        tokens = request.tokens[:keep] + self.tokens(more)
        if not tokens:
            return multiple()
        caches, rest = self.session.prefix.fetch(tokens, request.caches[0]._row.max_kv_size)
        assert len(rest) >= 1
        reused = tokens[: len(tokens) - len(rest)]
        assert reused + rest == tokens
        fetched = Request(caches, reused)
        self.live.append(fetched)
        return fetched

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        cached = self.session.stats().pages_cached
        freed = self.session.prefix.eviction.evict(count)
        # A page's whole node goes, in every group.
        assert min(cached, count) <= freed <= cached
        assert self.session.stats().pages_cached == cached - freed

    @rule()
    def clear_stored(self) -> None:
        self.session.prefix.clear()
        assert (self.session.stats().pages_cached, self.session.prefix.nbytes) == (0, 0)

    @rule(request=consumes(requests))
    def drop(self, request: Request) -> None:
        self.live.remove(request)
        request.caches = []

    @invariant()
    def holds(self) -> None:
        self.session.check()
        for request in self.live:
            request.verify()
        if not self.live:
            assert self.session.stats().pages_used == 0

    def teardown(self) -> None:
        for request in self.live:
            request.caches = []
        self.session.prefix.clear()
        self.session.check()
        # No garbage collection is needed: nothing in a request is a reference cycle.
        assert self.session.stats().pages_used == 0


class ShortOfPages(RequestsMachine):
    """Three cache groups share a budget that is full from the start: pages move from one to the other, and together."""

    limits: ClassVar[dict[str, Any]] = {"max_pages": 1000, "memory": 36 * 32, "windows": (None, 6, 10)}

    @initialize(
        target=RequestsMachine.requests,
        lengths=st.lists(st.integers(5, 24), min_size=6, max_size=9),
        stored=st.lists(st.sampled_from([False, False, True]), min_size=9, max_size=9),
        kept=st.lists(st.booleans(), min_size=9, max_size=9),
    )
    def crowd(self, lengths: list[int], stored: list[bool], kept: list[bool]) -> Any:
        requests = []
        for length, store in zip(lengths, stored, strict=False):
            request = Request(self.session.make_cache(), [])
            requests.append(request)
            for start in range(0, length, 3):
                new = self.tokens(min(3, length - start))
                try:
                    for cache in request.caches:
                        cache.update_and_fetch(tensor([new]), tensor([new]))
                except OutOfPagesError:
                    break
                request.tokens += new
            if store:
                self.store(request, 0)
        self.live += [request for request, keep in zip(requests, kept, strict=False) if keep]
        return multiple(*self.live)

    @rule(group=st.integers(0, 2), fault=st.none() | st.integers(0, 12))
    def move_together(self, group: int, fault: int | None) -> None:
        """One pool wants nearly all that is free, and no stored prompt has to go for it."""
        budget, pools = self.session.budget, self.session.pools
        free = budget.total * (1 - SPARE) - sum(pool.allocator.used * pool.page_bytes for pool in pools)
        self.faults.at = fault
        with contextlib.suppress(*FAILURES):
            compact(budget, {pools[group]: max(0, int(free) // pools[group].page_bytes)})
        self.faults.at = None


TestShortOfPages = ShortOfPages.TestCase
TestShortOfPages.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)

TestRequests = RequestsMachine.TestCase
TestRequests.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
