"""The map of pages: states, holders, and its size."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import tinykv_plugin as tinykv
from tinykv_plugin.page_map import CACHED, FREE, OTHERS, SHARED, USED, PoolMap, page_maps
from tinykv_plugin.stats import collect

Make = Callable[..., Any]


def write(model: Any, cache: list[Any], tokens: int) -> Any:
    mx.eval(model(mx.array([[1] * tokens]), cache=cache))
    return cache[0]._row


def states(pool: PoolMap) -> list[int]:
    """The state of each page of a map that has a cell for each."""
    assert pool.per_cell == 1
    return [int(state) for state in pool.counts.argmax(axis=0)]


def test_every_page_has_its_state_and_its_holders(tiny_llama: Make) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4, max_pages=64) as kv:
        chat, other, kept = (make_prompt_cache(model) for _ in range(3))
        first = write(model, chat, 10)
        write(model, other, 4)
        stored = write(model, kept, 8)
        fork = copy.deepcopy(chat)
        second = write(model, fork, 1)
        named = {7: weakref.ref(first), 8: weakref.ref(second)}
        kv.prefix_cache.insert([1] * 8, kept)
        cached = stored.tables[0].pages[:]
        del kept, stored
        (pool,) = page_maps(kv.session, 1000, named)
        expected = dict.fromkeys(
            [*first.tables[0].pages, *second.tables[0].pages, *other[0]._row.tables[0].pages], USED
        )
        expected |= dict.fromkeys(set(first.tables[0].pages) & set(second.tables[0].pages), SHARED)
        expected |= dict.fromkeys(cached, CACHED)
        assert states(pool) == [expected.get(page, FREE) for page in range(pool.pages)]
        assert list(expected.values()).count(SHARED) == 2
        assert {key: set(np.flatnonzero(mask)) for key, mask in pool.masks.items()} == {
            7: set(first.tables[0].pages),
            8: set(second.tables[0].pages),
            OTHERS: set(other[0]._row.tables[0].pages),
        }
        assert pool.pages_of == {7: 3, 8: 3, OTHERS: 1}
        assert pool.counts.sum() == pool.pages
        stats = kv.stats()
        used = stats.pages_used
        assert pool.counts[USED:].sum() == used + stats.pages_cached
        assert pool.counts[SHARED].sum() == stats.pages_shared
        assert pool.counts[CACHED].sum() == stats.pages_cached == 2
        kv.prefix_cache.clear()


def test_a_page_of_the_prefix_cache_is_cached_until_it_is_used(tiny_llama: Make) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        pages = write(model, cache, 8).tables[0].pages[:]
        kv.prefix_cache.insert([1] * 8, cache)
        (pool,) = page_maps(kv.session, 1000, {})
        assert [states(pool)[page] for page in pages] == [USED, USED]
        del cache
        (pool,) = page_maps(kv.session, 1000, {})
        assert [states(pool)[page] for page in pages] == [CACHED, CACHED]
        again = kv.prefix_cache.fetch([1] * 9)[0]
        (pool,) = page_maps(kv.session, 1000, {5: weakref.ref(again[0]._row)})
        assert [states(pool)[page] for page in pages] == [USED, USED]
        assert pool.pages_of == {5: 2}
        kv.prefix_cache.clear()


def test_what_was_dropped_is_free(tiny_llama: Make) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        reference = weakref.ref(write(model, cache, 9))
        del cache
        (pool,) = page_maps(kv.session, 1000, {1: reference})
        assert pool.counts[FREE].sum() == pool.pages
        assert pool.masks == {}


def test_windows_have_a_map_of_their_own(tiny_llama: Make) -> None:
    model = tiny_llama(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8)
    with tinykv.attach(model, page_size=4, rewind=0) as kv:
        cache = make_prompt_cache(model)
        for _ in range(10):
            row = write(model, cache, 4)
        full, window = page_maps(kv.session, 1000, {1: weakref.ref(row)})
        assert (full.group, window.group) == ("full", "window 8")
        assert (full.layers, full.page_size, full.storage, full.quantized) == (2, 4, "float32", False)
        assert (full.pages_of, window.pages_of) == ({1: 10}, {1: len(row.tables[1].live_pages())})
        assert window.pages_of[1] < 10


def test_quantized_pages_say_so(tiny_llama: Make) -> None:
    model = tiny_llama(head_dim=32)
    with tinykv.attach(model, page_size=4, bits=8) as kv:
        cache = make_prompt_cache(model)
        write(model, cache, 5)
        (pool,) = page_maps(kv.session, 1000, {})
        assert pool.quantized
        assert "8" in pool.storage
        assert pool.page_bytes == kv.groups[0].page_bytes


def test_many_pages_are_drawn_in_few_cells(tiny_llama: Make) -> None:
    model = tiny_llama(num_hidden_layers=1)
    with tinykv.attach(model, page_size=1) as kv:
        cache = make_prompt_cache(model)
        row = write(model, cache, 1000)
        (pool,) = page_maps(kv.session, 16, {3: weakref.ref(row)})
        assert pool.counts.shape == (4, 16)
        assert pool.counts.sum() == pool.pages
        assert pool.counts[USED].sum() == 1000
        held = np.repeat(pool.masks[3], pool.per_cell)
        assert held[np.array(row.tables[0].pages)].all()


def test_a_million_pages_are_looked_at_in_bounded_time(tiny_llama: Make) -> None:
    """The books are copied under the lock, at memory speed; no limit that a slow machine would miss."""
    model = tiny_llama(num_hidden_layers=1)
    with tinykv.attach(model, page_size=1) as kv:
        caches = [make_prompt_cache(model) for _ in range(10)]
        rows = [write(model, cache, 1) for cache in caches]
        session: Any = kv.session
        pool = session.pools[0]
        pool.allocator.resize(1_000_000)
        for row in rows:
            row.own(0).append(pool.allocator.allocate(90_000))
        try:
            start = time.perf_counter()
            (drawn,) = page_maps(session, 2048, {index: weakref.ref(row) for index, row in enumerate(rows)})
            assert collect(session).pages_used == 900_010
            assert time.perf_counter() - start < 2
            assert drawn.counts.shape[1] <= 2048
            assert drawn.counts[USED].sum() == 900_010
        finally:
            for row in rows:
                row.truncate(1)


def test_a_map_is_drawn_while_the_model_runs(tiny_llama: Make) -> None:
    model = tiny_llama()
    trouble: list[BaseException] = []
    stop = threading.Event()
    with tinykv.attach(model, page_size=4) as kv:
        session: Any = kv.session

        def watch() -> None:
            try:
                while not stop.is_set():
                    (pool,) = page_maps(session, 64, {})
                    assert pool.counts.sum() == pool.pages
            except BaseException as error:
                trouble.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for round_ in range(10):
            caches = [make_prompt_cache(model) for _ in range(3)]
            for _ in range(5):
                for cache in caches:
                    write(model, cache, 1 + round_)
            del caches, cache
        stop.set()
        watcher.join()
        assert trouble == []
