"""Writes happen inside the pool's arrays, growth takes one layer at a time, and a failed growth changes nothing."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from models import batched, greedy, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.attachment import Attachment
from tinykv_plugin.errors import OutOfPagesError, PoolGrowthError

LAYERS = 3
PAGES = 512


@pytest.fixture
def model() -> Any:
    """2 KiB of K, and of V, per token and layer: a pool of 512 pages is 6 arrays of 32 MiB."""
    return shared("llama", num_hidden_layers=LAYERS, head_dim=128, num_key_value_heads=4)


@pytest.fixture
def kv(model: Any) -> Iterator[Attachment]:
    """A pool large enough that a copy of one of its arrays can't be overlooked."""
    with tinykv.attach(model, page_size=32, attention="gather", memory="4GiB") as kv:
        pool = kv.session.pools[0]
        pool.allocator.release(pool.allocate(PAGES))
        assert pool.allocator.capacity == PAGES
        yield kv


def array_bytes(kv: Attachment) -> int:
    pages = kv.session.pools[0].layers[0]
    return pages.nbytes // 2


def extra(run: Callable[[], Any]) -> int:
    """Bytes that ``run`` needs beyond what is held before it."""
    gc.collect()  # what earlier tests left would be freed meanwhile, and hide as much
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    mx.synchronize()
    return mx.get_peak_memory() - before


def test_decode_steps_write_in_place(model: Any, kv: Attachment) -> None:
    cache = make_prompt_cache(model)
    logits(model, prompt(40), cache)
    for token in prompt(26):  # into the next page
        assert extra(lambda token=token: logits(model, [token], cache)) < array_bytes(kv) / 10
    assert kv.stats().growths == 1


def test_somebody_else_holding_the_array_would_show(model: Any, kv: Attachment) -> None:
    cache = make_prompt_cache(model)
    logits(model, prompt(40), cache)
    held = kv.session.pools[0].layers[1].keys[:1]  # a view, and so a holder of the whole buffer
    mx.eval(held)
    assert extra(lambda: logits(model, [5], cache)) > 0.9 * array_bytes(kv)
    del held
    assert extra(lambda: logits(model, [6], cache)) < array_bytes(kv) / 10


def test_keys_and_values_that_somebody_keeps_are_copies(model: Any, kv: Attachment) -> None:
    cache = make_prompt_cache(model)
    logits(model, prompt(20), cache)
    kept = [layer.keys_and_values() for layer in cache]
    assert extra(lambda: logits(model, [5], cache)) < array_bytes(kv) / 10
    assert {keys.shape[2] for keys, _ in kept} == {20}


def test_prefill_writes_in_place(model: Any, kv: Attachment) -> None:
    cache = make_prompt_cache(model)
    for size in (1, 70, 2, 33):
        assert extra(lambda size=size: logits(model, prompt(size), cache)) < array_bytes(kv) / 10, size


def test_batches_write_in_place(model: Any, kv: Attachment) -> None:
    prompts = [prompt(9), prompt(3), prompt(14)]
    assert extra(lambda: batched(model, prompts, 8)) < array_bytes(kv) / 10


def test_the_first_write_to_a_copy_copies_pages_and_not_the_pool(model: Any, kv: Attachment) -> None:
    cache = make_prompt_cache(model)
    logits(model, prompt(40), cache)
    fork = copy.deepcopy(cache)
    assert extra(lambda: logits(model, [5], fork)) < array_bytes(kv) / 10
    assert kv.stats().cow_copies == 1
    forks = [copy.deepcopy(fork) for _ in range(4)]
    assert extra(lambda: [logits(model, [5], one) for one in forks]) < array_bytes(kv) / 10
    assert kv.stats().cow_copies == 5


def test_trims_and_reused_pages_are_written_in_place(model: Any, kv: Attachment) -> None:
    for _ in range(3):
        cache = make_prompt_cache(model)
        logits(model, prompt(70), cache)
        for layer in cache:
            layer.trim(45)
        assert extra(lambda cache=cache: logits(model, prompt(30), cache)) < array_bytes(kv) / 10
        del cache


@pytest.mark.parametrize(
    ("attention", "fields"), [("gather", {"bits": 4}), ("auto", {"bits": 8, "quantized_start": 50})], ids=str
)
def test_open_pages_are_written_in_place(model: Any, fields: dict[str, int], attention: str) -> None:
    with tinykv.attach(model, page_size=32, attention=attention, memory="4GiB", **fields) as kv:
        for pool in kv.session.pools:
            pool.allocator.release(pool.allocate(PAGES))
        small = kv.session.pools[1].layers[0].nbytes // 20
        cache = make_prompt_cache(model)
        for size in (40, 2, 33):
            assert extra(lambda size=size: logits(model, prompt(size), cache)) < small, size
        for token in prompt(9):
            assert extra(lambda token=token: logits(model, [token], cache)) < small
        forks = [copy.deepcopy(cache) for _ in range(3)]
        assert extra(lambda: [logits(model, [5], one) for one in forks]) < small
        for count in (3, 50):  # the second leads farther back than open pages are kept
            trim_prompt_cache(cache, count)
            assert extra(lambda: logits(model, [6, 7], cache)) < small
        assert extra(lambda: batched(model, [prompt(9), prompt(3), prompt(14)], 8)) < small
        kv.check()


def test_growth_needs_one_array_at_a_time(model: Any, kv: Attachment) -> None:
    pool = kv.session.pools[0]
    before = pool.nbytes
    old, taken = array_bytes(kv), pool.allocate(PAGES)
    needed = extra(lambda: taken.extend(pool.allocate(1)))
    grown = pool.nbytes - before
    assert pool.allocator.capacity == PAGES * 3 // 2
    assert grown == before // 2
    assert needed < grown + 1.05 * old, "the old arrays of one side of one layer, next to the new ones"
    assert mx.get_cache_memory() < old, "freed buffers go back to the system"
    pool.allocator.release(taken)


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("[metal::malloc] Unable to allocate")])
@pytest.mark.parametrize("call", range(2 * LAYERS))
def test_a_growth_that_fails_at_any_array_changes_nothing(
    call: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared("llama", num_hidden_layers=LAYERS)
    expected = greedy(model, prompt(20), 8, cache=[KVCache() for _ in model.layers])
    with tinykv.attach(model, page_size=4, attention="gather") as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(200), cache)
        held = [side.tolist() for layer in cache for side in layer.keys_and_values()]
        before, free = kv.stats(), list(kv.session.pools[0].allocator._recycled)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "pad", failing(mx.pad, call, error))
            with pytest.raises(PoolGrowthError, match=r"from 64 to 96 pages .*: (no memory|\[metal::malloc\])"):
                logits(model, prompt(100), cache)
        kv.check()
        after = kv.stats()
        assert after == before
        assert after.bytes_reserved == before.bytes_reserved
        assert kv.session.pools[0].allocator._recycled == free
        assert {layer.offset for layer in cache} == {200}
        assert [side.tolist() for layer in cache for side in layer.keys_and_values()] == held
        # A smaller request still works, and so does the same one once there is memory.
        assert greedy(model, prompt(20), 8) == expected
        logits(model, prompt(100), cache)
        assert {layer.offset for layer in cache} == {300}
        assert kv.stats().growths == before.growths + 1


@pytest.mark.parametrize("call", range(2 * LAYERS))
def test_a_pool_that_can_not_even_start_stays_empty(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama", num_hidden_layers=LAYERS)
    with tinykv.attach(model, page_size=4, attention="gather") as kv:
        cache = make_prompt_cache(model)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "zeros", failing(mx.zeros, call, MemoryError("no memory")))
            with pytest.raises(PoolGrowthError, match=r"from 0 to 64 pages .*: no memory; lower --kv-memory"):
                logits(model, prompt(9), cache)
        kv.check()
        assert kv.stats().bytes_reserved == kv.stats().pages_used == 0
        assert {layer.offset for layer in cache} == {0}
        logits(model, prompt(9), cache)
        kv.check()


def test_a_growth_that_fails_in_a_later_group_gives_the_earlier_one_its_pages_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = shared("gemma3_text", sliding_window=300)
    with tinykv.attach(model, page_size=4, attention="gather") as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(250), cache)
        used = kv.stats().pages_used
        with monkeypatch.context() as patch:
            patch.setattr(mx, "pad", failing(mx.pad, 5, MemoryError("no memory")))
            with pytest.raises(PoolGrowthError):
                logits(model, prompt(30), cache)
        kv.check()
        assert kv.stats().pages_used == used
        assert {layer.offset for layer in cache} == {250}
        # What the first group has gained is kept, for the next request; only pages are taken back.
        assert [pool.allocator.capacity for pool in kv.session.pools] == [96, 64]
        logits(model, prompt(30), cache)
        kv.check()


def failing(function: Callable[..., Any], call: int, error: Exception) -> Callable[..., Any]:
    """``function``, which raises at one call (counted from 0)."""
    calls = iter(range(1000))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*args, **kwargs)

    return wrapped


def test_growth_stops_at_the_budget(model: Any) -> None:
    small = shared("llama", num_hidden_layers=LAYERS)
    page = LAYERS * 2 * 2 * 16 * 4 * 4
    with tinykv.attach(small, page_size=4, memory=100 * page + 17) as kv:
        cache = make_prompt_cache(small)
        for _ in range(25):
            logits(small, prompt(16), cache)
            assert kv.stats().bytes_reserved <= 100 * page
        assert kv.stats().pages_used == kv.stats().pages_total == 100
        with pytest.raises(OutOfPagesError):
            logits(small, [1], cache)
        assert kv.stats().bytes_reserved == 100 * page
        assert {layer.offset for layer in cache} == {400}
