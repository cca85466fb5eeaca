"""PagedKVCache against mlx-lm's own caches: the whole protocol of one request's cache, chunk by chunk."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from models import greedy, largest_difference, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError
from tinykv_plugin.masks import sequence_mask

TOLERANCE = 2e-4

# Full attention; windows of 8; windows with sinks; latent K/V that the model reads itself; hybrid; arrays, not handles.
KINDS = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "phi"]


def chunks(total: int, seed: int) -> list[int]:
    """Random sizes that add up to ``total``, single tokens often among them."""
    rng = random.Random(seed)
    sizes: list[int] = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, rng.choice([1, 1, 2, 3, 5, 9, 17])))
    return sizes


def run(model: Any, tokens: list[int], sizes: list[int], cache: Any) -> mx.array:
    """Logits of all ``tokens``, processed in pieces of the given sizes."""
    found, position = [], 0
    for size in sizes:
        found.append(logits(model, tokens[position : position + size], cache))
        position += size
    return mx.concatenate(found)


def contents(cache: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Bit-exact copies of what each layer holds."""
    return [np.array(side) for layer in cache for side in layer.keys_and_values()]


def same_bits(a: list[np.ndarray[Any, Any]], b: list[np.ndarray[Any, Any]]) -> bool:
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_size_give_the_logits_of_stock(kind: str) -> None:
    model = shared(kind)
    for seed, page_size in enumerate((1, 4, 16, 32)):
        tokens, sizes = prompt(48, seed), chunks(48, seed)
        stock = run(model, tokens, sizes, make_prompt_cache(model))
        with tinykv.attach(model, page_size=page_size) as kv:
            cache = make_prompt_cache(model)
            paged = run(model, tokens, sizes, cache)
            kv.check()
        assert largest_difference(paged, stock) < TOLERANCE, (page_size, sizes)


@pytest.mark.parametrize("max_kv_size", [None, 11])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_offset_size_and_empty_are_those_of_stock(kind: str, max_kv_size: int | None) -> None:
    model = shared(kind)
    stock = make_prompt_cache(model, max_kv_size=max_kv_size)
    with tinykv.attach(model, page_size=4, max_kv_size=max_kv_size) as kv:
        cache = make_prompt_cache(model)
        limits = [layer.window or max_kv_size for layer in kv.plan]
        assert [layer.empty() for layer in cache] == [True] * 4
        assert all(cache), "a cache without tokens is still true: mlx-lm asks `if cache`"
        position = 0
        for size in chunks(40, seed=1):
            step = prompt(40)[position : position + size]
            logits(model, step, stock)
            logits(model, step, cache)
            position += size
            for paged, own, limit in zip(cache, stock, limits, strict=True):
                assert paged.offset == own.offset == position
                assert type(paged.offset) is int
                if isinstance(own, RotatingKVCache) or limit is None:
                    assert paged.size() == own.size()
                assert paged.size() == min(position, limit or position)
                assert not paged.empty()


def test_nbytes_is_what_the_pages_take() -> None:
    model = shared("gemma3_text")
    token = 2 * 2 * 16 * 4  # K and V, heads, head_dim, float32
    with tinykv.attach(model, page_size=4, rewind=0):
        cache = make_prompt_cache(model)
        assert [layer.nbytes for layer in cache] == [0] * 4
        logits(model, prompt(5), cache)
        assert [layer.nbytes for layer in cache] == [2 * 4 * token] * 4
        for one in prompt(20):
            logits(model, [one], cache)
        # 25 tokens are 7 pages; a window of 8 that ends at the 25th token starts in the fifth page.
        assert [layer.nbytes for layer in cache] == [3 * 4 * token, 7 * 4 * token] * 2
        fork = cache[1].__deepcopy__({})
        assert fork.nbytes == cache[1].nbytes


def test_trim_refuses_a_negative_and_clamps_a_large_count() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(13), cache)
        for count in (-1, -13):
            with pytest.raises(CacheStateError, match=str(count)):
                cache[0].trim(count)
        assert [layer.offset for layer in cache] == [13] * 4
        assert all(layer.is_trimmable() for layer in cache)
        assert [layer.trim(0) for layer in cache] == [0] * 4
        assert [layer.trim(3) for layer in cache] == [3] * 4
        assert [layer.trim(100) for layer in cache] == [10] * 4
        assert [layer.trim(1) for layer in cache] == [0] * 4
        assert all(layer.empty() for layer in cache)
        assert kv.stats().pages_used == 0
        again = logits(model, prompt(13), cache)
    stock = logits(model, prompt(13), make_prompt_cache(model))
    assert largest_difference(again, stock) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_rewound_cache_goes_on_as_if_the_tokens_had_never_been(kind: str, page_size: int) -> None:
    model = shared(kind)
    rng = random.Random(page_size)
    kept: list[int] = []
    with tinykv.attach(model, page_size=page_size) as kv:
        cache = make_prompt_cache(model)
        for turn in range(8):
            more = prompt(rng.choice([1, 2, 7]), seed=turn)
            got = logits(model, more, cache)
            kept += more
            assert largest_difference(got, logits_alone(model, kept)[-len(more) :]) < TOLERANCE, turn
            count = rng.randrange(min(len(kept), 6))
            assert trim_prompt_cache(cache, count) == count
            del kept[len(kept) - count :]
            kv.check()


def logits_alone(model: Any, tokens: list[int]) -> mx.array:
    """Logits of a stock cache of the attached model, in one pass."""
    own = getattr(type(model), "make_cache", None)
    return logits(model, tokens, own(model) if own else [KVCache() for _ in model.layers])


def test_a_trim_of_some_layers_is_completed_by_the_next_step() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        for trims in ([3, 0, 0, 0], [0, 0, 0, 3], [1, 2, 3, 3], [3, 3, 3, 0]):
            cache = make_prompt_cache(model)
            logits(model, prompt(13), cache)
            for layer, count in zip(cache, trims, strict=True):
                layer.trim(count)
                assert layer.offset == 13 - count
            after = logits(model, [5, 6], cache)
            assert [layer.offset for layer in cache] == [12] * 4
            kv.check()
            stock = logits_alone(model, [*prompt(10), 5, 6])[-2:]
            assert largest_difference(after, stock) < TOLERANCE, trims


def test_a_trim_after_a_partial_one_counts_from_where_each_layer_is() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(13), cache)
        cache[2].trim(4)
        assert trim_prompt_cache(cache, 2) == 2
        assert [layer.offset for layer in cache] == [11, 11, 7, 11]
        kv.check()
        assert {layer.offset for layer in cache} == {7}


@pytest.mark.parametrize(("window", "window_size"), [(None, None), (None, 3), (None, 20), (8, None), (8, 3), (8, 8)])
def test_masks_have_the_values_of_stock(window: int | None, window_size: int | None) -> None:
    for start in (0, 1, 5, 7, 8, 9, 30):
        stock: Any = KVCache() if window is None else RotatingKVCache(max_size=window)
        for _ in range(start):
            stock.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
        prior = start if window is None else min(start, window - 1)
        for count in (1, 2, 6, 8, 11):
            for return_array in (False, True):
                own = stock.make_mask(count, return_array=return_array, window_size=window_size)
                ours = sequence_mask(count, start, window, False, return_array, window_size)
                expected = mask_values(own, count, prior)
                if window is not None and count == 1 and own is not None:
                    # The columns of a stock ring are in ring order; this step's token goes to slot start % window.
                    ring = np.array(own)
                    positions = np.arange(start - prior, start + 1)
                    expected = ring[positions % window][None]
                case = (start, count, return_array)
                assert np.array_equal(mask_values(ours, count, prior), expected), case
                if return_array and count > 1:
                    assert isinstance(ours, mx.array), case


def test_a_mask_asked_for_beyond_the_window_stays_within_it() -> None:
    for count in (1, 5, 11):
        mask = mask_values(sequence_mask(count, 30, 8, False, True, 20), count, 7)
        assert np.array_equal(mask, mask_values(sequence_mask(count, 30, 8, False, True, None), count, 7))


def mask_values(mask: Any, count: int, prior: int) -> np.ndarray[Any, Any]:
    """What a mask lets through, ``(count, prior + count)``."""
    if mask is None:
        assert count == 1
        return np.ones((1, prior + 1), dtype=bool)
    if isinstance(mask, str):
        assert mask == "causal"
        return np.arange(prior + count)[None] <= np.arange(prior, prior + count)[:, None]
    assert mask.dtype == mx.bool_
    return np.array(mask)


def test_make_mask_of_a_cache_gives_arrays_on_request_and_handles_otherwise() -> None:
    model = shared("gemma3_text")
    with tinykv.attach(model, page_size=4):
        cache = make_prompt_cache(model)
        logits(model, prompt(10), cache)
        window, full = cache[0], cache[1]
        assert full.make_mask(1) is None
        assert full.make_mask(3) == "causal"
        assert full.make_mask(3, return_array=True).shape == (3, 13)
        assert window.make_mask(1) is None
        assert "window=8" in repr(window.make_mask(3))
        assert window.make_mask(3, return_array=True).shape == (3, 10)
        assert full.make_mask(2, return_array=True, window_size=5).tolist() == [
            [False] * 6 + [True] * 5 + [False],
            [False] * 7 + [True] * 5,
        ]


def test_arrays_a_mask_was_asked_for_attend_as_the_handle_does() -> None:
    model = shared("gemma3_text")
    tokens = prompt(21)
    with tinykv.attach(model, page_size=4) as kv:
        handled = make_prompt_cache(model)
        expected = run(model, tokens, [9, 1, 5, 6], handled)
        cache = make_prompt_cache(model)
        for layer in cache:
            plain = layer.make_mask
            layer.make_mask = lambda N, plain=plain, **options: plain(N, **{**options, "return_array": True})
        assert largest_difference(run(model, tokens, [9, 1, 5, 6], cache), expected) < TOLERANCE
        kv.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_keys_and_values_are_those_of_stock_in_order(kind: str) -> None:
    model = shared(kind)
    stock = make_prompt_cache(model)
    with tinykv.attach(model, page_size=4):
        cache = make_prompt_cache(model)
        for size in (3, 1, 9, 1, 1, 6, 1):
            logits(model, prompt(size, seed=size), stock)
            logits(model, prompt(size, seed=size), cache)
            for paged, own in zip(cache, stock, strict=True):
                for ours, theirs in zip(paged.keys_and_values(), own.keys_and_values(), strict=True):
                    if isinstance(own, RotatingKVCache):
                        theirs = own._temporal_order(theirs)[:, :, -own.max_size :]
                    assert largest_difference(ours, theirs) < TOLERANCE
        with pytest.raises(CacheStateError, match="empty cache"):
            _no_pages_yet(model).keys_and_values()


def _no_pages_yet(model: Any) -> Any:
    with tinykv.attach(model):
        cache = make_prompt_cache(model)
        cache[0]._layer.pages = None
        return cache[0]


@pytest.mark.parametrize(("tokens", "copied"), [(13, True), (12, False)])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_copy_shares_pages_until_it_writes(kind: str, tokens: int, copied: bool) -> None:
    model = shared(kind)
    with tinykv.attach(model, page_size=4) as kv:
        groups = len({layer.kind for layer in kv.plan})
        cache = make_prompt_cache(model)
        logits(model, prompt(tokens), cache)
        before, used = contents(cache), kv.stats().pages_used
        fork = copy.deepcopy(cache)
        assert kv.stats().pages_used == used
        assert kv.stats().pages_shared == used
        assert same_bits(contents(fork), before)
        first = logits(model, [7], fork)
        assert kv.stats().pages_used == used + groups, "one page per cache group, whatever the length"
        assert kv.stats().cow_copies == (groups if copied else 0)
        assert same_bits(contents(cache), before), "writing to the copy changed the original"
        assert [layer.offset for layer in cache] == [tokens] * len(cache)
        kv.check()
        # The other way round: what the original writes doesn't reach the copy.
        held = contents(fork)
        logits(model, [8, 9], cache)
        assert same_bits(contents(fork), held)
        assert largest_difference(first, logits_alone(model, [*prompt(tokens), 7])[-1:]) < TOLERANCE
        del cache, fork
        assert kv.stats().pages_used == 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_copies_of_copies_each_go_their_own_way(kind: str) -> None:
    model = shared(kind)
    start, ways = prompt(18), [[3], [5, 6], [9] * 7, [1, 2, 3, 4]]
    stock = [greedy(model, start + way, 8) for way in ways]
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, start, cache)
        family = [cache]
        for _ in ways[1:]:
            family.append(copy.deepcopy(family[-1]))
        # The oldest writes last; after each, the others must be as they were.
        for index in reversed(range(len(ways))):
            assert greedy(model, ways[index], 8, cache=family[index]) == stock[index], index
            kv.check()
        del family[1], cache
        assert greedy(model, [11], 3, cache=family[0]) != []
        kv.check()


def test_layers_copied_one_by_one_stay_one_sequence() -> None:
    model = shared("gemma3_text")
    stock = greedy(model, [*prompt(18), 4], 12)
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(18), cache)
        first = [copy.deepcopy(layer) for layer in cache]
        second = [copy.deepcopy(layer) for layer in cache]
        assert kv.stats().sequences == 3
        for one in (first, second, cache):
            assert greedy(model, [4], 12, cache=one) == stock
            kv.check()


def test_a_copy_of_one_layer_left_behind_is_no_part_of_the_next_copy() -> None:
    model = shared("llama")
    stock = greedy(model, [*prompt(18), 4], 12)
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(18), cache)
        stray = copy.deepcopy(cache[0])
        whole = [copy.deepcopy(layer) for layer in cache]
        assert greedy(model, [4], 12, cache=whole) == stock
        assert stray.offset == 18
        kv.check()


class Failing:
    """An MLP that raises at its ``after``-th call from now on, once."""

    def __init__(self, mlp: Any, after: int) -> None:
        self.mlp = mlp
        self.left = after

    def __call__(self, x: mx.array) -> mx.array:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("injected")
        return self.mlp(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_step_that_fails_half_way_can_be_repeated(kind: str) -> None:
    model = shared(kind)
    tokens = prompt(20)
    sizes = [7, 1, 9, 1, 1, 1]
    stock = run(model, tokens, sizes, make_prompt_cache(model))
    with tinykv.attach(model, page_size=4) as kv:
        # Once the last layer has written, the pass is complete for its caches, as it is for stock ones.
        for layer in range(3):
            block = model.model.layers[layer]
            mlp = block.mlp
            for call in range(1, len(sizes) + 1):
                cache = make_prompt_cache(model)
                block.mlp = Failing(mlp, call)
                try:
                    found, position = [], 0
                    for number, size in enumerate(sizes, start=1):
                        step = tokens[position : position + size]
                        if number == call:
                            with pytest.raises(ArithmeticError):
                                logits(model, step, cache)
                            if layer % 2:
                                kv.check()
                                assert {one.offset for one in cache} == {position}
                        found.append(logits(model, step, cache))
                        position += size
                    kv.check()
                finally:
                    block.mlp = mlp
                assert largest_difference(mx.concatenate(found), stock) < TOLERANCE, (layer, call)


def test_after_a_failed_step_other_tokens_may_follow() -> None:
    model = shared("llama")
    stock = greedy(model, [*prompt(10), 1, 2, 3], 6)
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(10), cache)
        block = model.model.layers[2]
        mlp, block.mlp = block.mlp, Failing(block.mlp, 1)
        try:
            with pytest.raises(ArithmeticError):
                logits(model, [50, 51, 52, 53, 54, 55, 56], cache)
        finally:
            block.mlp = mlp
        assert greedy(model, [1, 2, 3], 6, cache=cache) == stock
        kv.check()


def test_state_forces_every_write() -> None:
    model = shared("gemma3_text")
    with tinykv.attach(model, page_size=4):
        cache = make_prompt_cache(model)
        model(mx.array([prompt(11)]), cache=cache)  # nothing is evaluated
        mx.eval([layer.state for layer in cache])
        # Arrays that were not evaluated can't be read from another thread.
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(contents(cache)))
        thread.start()
        thread.join()
        expected = make_prompt_cache(model)
        logits(model, prompt(11), expected)
        assert same_bits(found, contents(expected))


def test_stock_save_refuses_and_names_ours(tmp_path: Any) -> None:
    model = shared("llama")
    with tinykv.attach(model):
        cache = make_prompt_cache(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"save it with tinykv_plugin\.save_prompt_cache"):
                save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
            logits(model, prompt(5), cache)
        with pytest.raises(CacheStateError, match="load_prompt_cache"):
            cache[0].state = ()
        with pytest.raises(CacheStateError, match="load_prompt_cache"):
            type(cache[0]).from_state(())
    assert list(tmp_path.iterdir()) == []


def test_rows_and_widths_that_do_not_fit_are_refused() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        with pytest.raises(CacheStateError, match="2 rows"):
            model(mx.array([[1, 2], [3, 4]]), cache=cache)
        k = mx.zeros((1, 2, 3, 16))
        cache[0].update_and_fetch(k, k)
        with pytest.raises(CacheStateError, match="writes 2 tokens where others wrote 3"):
            cache[1].update_and_fetch(k[:, :, :2], k[:, :, :2])
        kv.check()
        assert greedy(model, prompt(9), 5, cache=cache) == stock_greedy(model, prompt(9), 5)


def stock_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    return greedy(model, tokens, count, cache=[KVCache() for _ in model.layers])


def test_no_tokens_change_nothing() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        none = mx.zeros((1, 2, 0, 16))
        logits(model, prompt(5), cache)
        for layer in cache:
            layer.update_and_fetch(none, none)
        assert {layer.offset for layer in cache} == {5}
        kv.check()
        assert largest_difference(logits(model, [3], cache), logits_alone(model, [*prompt(5), 3])[-1:]) < TOLERANCE
