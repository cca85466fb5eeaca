"""How many pages and bytes requests take: worked examples, next to what a dense cache takes."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import logits, prompt, shared

import tinykv_plugin as tinykv

LAYERS = 2
# K and V, heads, head_dim, float32.
TOKEN_BYTES = 2 * 2 * 16 * 4


@pytest.fixture
def model() -> Any:
    return shared("llama", num_hidden_layers=LAYERS)


def append(cache: list[Any], count: int) -> None:
    """Write ``count`` tokens without running a model."""
    for layer in cache:
        zeros = mx.zeros((1, 2, count, 16))
        layer.update_and_fetch(zeros, zeros)
    mx.eval([layer.state for layer in cache if not isinstance(layer, KVCache)])


def page_lens(cache: list[Any]) -> list[int]:
    """Tokens in each page of the first layer."""
    table = cache[0]._row.tables[0]
    return [min(table.page_size, cache[0].offset - start * table.page_size) for start in range(len(table.pages))]


@pytest.mark.parametrize(
    ("page_size", "pages", "waste"), [(128, 8, 0.219), (16, 52, 0.038), (32, 28, 0.107), (1, 800, 0)]
)
def test_four_requests_of_200_tokens(model: Any, page_size: int, pages: int, waste: float) -> None:
    with tinykv.attach(model, page_size=page_size) as kv:
        caches = [make_prompt_cache(model) for _ in range(4)]
        for cache in caches:
            append(cache, 200)
        stats = kv.stats()
        assert stats.pages_used == pages, "counted once for all layers: a page id is a page in each"
        assert stats.waste == pytest.approx(waste, abs=5e-4)
        assert stats.tokens == 800
        assert stats.slots_used == pages * page_size
        assert stats.bytes_used == pages * page_size * TOKEN_BYTES * LAYERS
        assert sum(layer.nbytes for cache in caches for layer in cache) == stats.bytes_used


def test_the_last_page_is_filled_before_another_is_taken(model: Any) -> None:
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        found = []
        for count in (3, 2, 4):
            append(cache, count)
            found.append(page_lens(cache))
            kv.check()
        assert found == [[3], [4, 1], [4, 4, 1]]
        assert len(set(cache[0]._row.tables[0].pages)) == 3, "each page has an id of its own"


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_against_dense_allocations_of_the_same_four_requests(model: Any, page_size: int) -> None:
    reserved_ahead = 4 * 4096 * TOKEN_BYTES * LAYERS  # room for the longest context, for each request
    stock = [[KVCache() for _ in model.layers] for _ in range(4)]
    for cache in stock:
        append(cache, 200)
    held_by_stock = sum(layer.nbytes for cache in stock for layer in cache)
    assert held_by_stock == 4 * 256 * TOKEN_BYTES * LAYERS, "mlx-lm's own cache grows by 256 tokens"
    with tinykv.attach(model, page_size=page_size) as kv:
        caches = [make_prompt_cache(model) for _ in range(4)]
        for cache in caches:
            append(cache, 200)
        stats = kv.stats()
        assert stats.bytes_used < 0.2 * reserved_ahead
        assert stats.bytes_reserved < 0.2 * reserved_ahead, "and what the pool has taken ahead is counted too"
        # Against mlx-lm itself a short request saves less: a few per cent, or nothing with large pages.
        saved = 1 - stats.bytes_used / held_by_stock
        assert saved == pytest.approx({16: 0.1875, 32: 0.125, 128: 0.0}[page_size])


def test_a_prefix_shared_by_four_is_held_once(model: Any) -> None:
    with tinykv.attach(model, page_size=16) as kv:
        base = make_prompt_cache(model)
        append(base, 160)
        forks = [copy.deepcopy(base) for _ in range(4)]
        for fork in forks:
            append(fork, 40)
        stats = kv.stats()
        assert stats.pages_used == 10 + 4 * 3
        assert stats.pages_shared == 10
        assert stats.tokens == 160 + 4 * 200
        assert stats.slots_filled == 160 + 4 * 40
        assert stats.cow_copies == 0, "the shared part ends with a page"
        del base
        assert kv.stats().pages_used == 22


def test_the_pool_grows_by_half_and_no_further_than_needed(model: Any) -> None:
    with tinykv.attach(model, page_size=16) as kv:
        cache = make_prompt_cache(model)
        sizes = []
        for _ in range(64):
            append(cache, 16)
            sizes.append(kv.stats().bytes_reserved // (16 * TOKEN_BYTES * LAYERS))
        assert sorted(set(sizes)) == [16, 24, 36, 54, 81]
        assert kv.stats().growths == 5
        assert all(size <= max(16, 1.5 * (pages + 1)) for pages, size in enumerate(sizes))


def test_pages_counted_by_hand_for_windows() -> None:
    model = shared("gemma3_text")
    with tinykv.attach(model, page_size=4, rewind=0) as kv:
        cache = make_prompt_cache(model)
        for index, token in enumerate(prompt(60)):
            logits(model, [token], cache)
            # Pages go back when the next one is opened, by a token that reads the 7 positions before it.
            first = max(0, index // 4 * 4 - 7) // 4
            assert kv.stats().pages_used == (index // 4 + 1) + (index // 4 + 1 - first), index
