"""One budget for the pools of several cache groups: none may keep from another what it doesn't use."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
from bookkeeping import Faults, held, make_session, tensor
from mlx_lm.models.cache import make_prompt_cache
from models import greedy, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError, OutOfPagesError

TOKEN_BYTES = 2 * 2 * 16 * 4  # a layer's K and V of one token: heads, head_dim, float32


def test_a_budget_serves_both_kinds_of_layers_up_to_its_last_page() -> None:
    """A pool that grows ahead must not take what another one needs, nor keep it."""
    model = shared("gemma3_text", num_hidden_layers=2)
    page = 4 * TOKEN_BYTES  # one layer in each group
    for pages in (7, 30, 61):
        with tinykv.attach(model, page_size=4, memory=pages * page, rewind=0) as kv:
            cache = make_prompt_cache(model)

            def fill(cache: list[Any] = cache) -> None:
                for token in itertools.cycle(prompt(97)):
                    logits(model, [token], cache)

            with pytest.raises(OutOfPagesError):
                fill()
            # A window of 8 takes at most 4 pages of 4 tokens; all the others are for full attention.
            assert pages - 1 <= kv.stats().pages_used <= pages
            assert kv.stats().growths < 20, "what is left is shared out in halves, not page by page"
            kv.check()


def test_pages_go_from_one_kind_of_layers_to_the_other() -> None:
    model = shared("gemma3_text", num_hidden_layers=2)
    page = 4 * TOKEN_BYTES
    expected = greedy(model, prompt(20), 8)
    with tinykv.attach(model, page_size=4, memory=60 * page, rewind=0) as kv:
        full, window = sorted(kv.session.pools, key=lambda pool: pool.name)
        # A long request makes the pool of full attention large.
        cache = make_prompt_cache(model)
        for token in prompt(200):
            logits(model, [token], cache)
        large = full.allocator.capacity
        assert large > 45
        del cache
        # Many short ones need as many pages of both.
        caches = [make_prompt_cache(model) for _ in range(14)]
        for cache in caches:
            logits(model, prompt(8), cache)
        assert window.allocator.used == full.allocator.used == 28
        assert full.allocator.capacity < large
        kv.check()
        with pytest.raises(OutOfPagesError) as caught:
            logits(model, prompt(16), make_prompt_cache(model))
        assert f"--kv-memory {(2 * 28 + 2 * 4) * page} " in str(caught.value)
        before = kv.stats()
        with pytest.raises(OutOfPagesError):
            logits(model, prompt(16), make_prompt_cache(model))
        assert kv.stats() == before, "a request that can't fit moves nothing"
        del caches[2:], cache
        assert greedy(model, prompt(20), 8) == expected
        kv.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_in_a_tight_budget_keep_their_tokens(seed: int) -> None:
    rng = random.Random(seed)
    # Two layers of full attention, 64 bytes a page, and one with a window, 32 bytes a page.
    session = make_session(Faults(), max_pages=1000, memory=1700)
    live: list[tuple[list[Any], list[int]]] = []
    refused = shrunk = 0
    ids = itertools.count()
    for _ in range(1200):
        kind = rng.random()
        capacities = [pool.allocator.capacity for pool in session.pools]
        if kind < 0.2 or not live:
            live.append((session.make_cache(), []))
        elif kind < 0.35:
            live.pop(rng.randrange(len(live)))
        elif kind < 0.37:
            live.clear()
        elif kind < 0.45:
            caches, tokens = rng.choice(live)
            live.append((copy.deepcopy(caches), list(tokens)))
        elif kind < 0.55:
            caches, tokens = rng.choice(live)
            count = rng.randrange(4)
            try:
                for cache in caches:
                    cache.trim(count)
            except CacheStateError:
                continue
            del tokens[max(0, len(tokens) - count) :]
        else:
            caches, tokens = rng.choice(live)
            new = list(itertools.islice(ids, rng.choice([1, 1, 2, 5, 11, 30])))
            used = [pool.allocator.used for pool in session.pools]
            try:
                for cache in caches:
                    cache.update_and_fetch(tensor([new]), tensor([new]))
                tokens += new
            except OutOfPagesError:
                refused += 1
                session.collect()
                assert [pool.allocator.used for pool in session.pools] <= used
        session.check()
        shrunk += any(pool.allocator.capacity < old for pool, old in zip(session.pools, capacities, strict=True))
        for caches, tokens in live:
            for cache in caches:
                assert cache.offset == len(tokens)
                retention = cache._row.tables[cache._layer.group].retention
                for position in range(retention.first_needed(len(tokens)), len(tokens)):
                    assert held(cache, position) == tokens[position]
    assert refused > 20
    assert shrunk
    live.clear()
    caches = cache = None
    session.check()
    assert session.stats().pages_used == 0
