"""attach() and detach(): what they change, that it is all restored, and several at once."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, gemma3_text, llama, qwen2
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import greedy, logits, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.attachment import live_attachments
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.errors import CacheStateError, ConfigError, InvariantError, PluginError

STOCK = base.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def untouched() -> Any:
    """After each test the modules have mlx-lm's own function again."""
    yield
    for kv in live_attachments():
        kv.detach()
    for module in (llama, gemma3_text, qwen2):
        assert module.scaled_dot_product_attention is STOCK, module.__name__


def state(model: Any) -> dict[str, Any]:
    return dict(vars(model))


def test_detach_restores_the_model_and_its_module_exactly() -> None:
    model = make("llama")
    attributes, items, keys = state(model), dict(model), list(model)
    kv = tinykv.attach(model)
    assert kv.attached
    assert llama.scaled_dot_product_attention is not STOCK
    assert gemma3_text.scaled_dot_product_attention is STOCK, "another family's module is left alone"
    assert base.scaled_dot_product_attention is STOCK
    assert llama.scaled_dot_product_attention.__name__ == STOCK.__name__
    greedy(model, prompt(9), 3)
    kv.detach()
    assert not kv.attached
    assert state(model) == attributes
    assert dict(model) == items
    assert list(model) == keys
    assert [type(layer) for layer in make_prompt_cache(model)] == [KVCache] * 4
    kv.detach()
    assert llama.scaled_dot_product_attention is STOCK


def test_weights_are_none_of_its_business() -> None:
    model = make("llama")
    before = {name for name, _ in model.named_modules()}
    with tinykv.attach(model):
        make_prompt_cache(model)
        assert {name for name, _ in model.named_modules()} == before
        assert "make_cache" not in model.parameters()


def test_a_make_cache_of_the_instance_is_put_back() -> None:
    model = make("llama")

    def own() -> list[Any]:
        return [KVCache() for _ in model.layers]

    model.make_cache = own
    with tinykv.attach(model):
        assert type(make_prompt_cache(model)[0]) is PagedKVCache
    assert model.make_cache is own


def test_leaving_the_block_detaches_whatever_happens() -> None:
    model = make("llama")
    attributes = state(model)
    with pytest.raises(ZeroDivisionError), tinykv.attach(model):  # noqa: PT012
        logits(model, prompt(5), make_prompt_cache(model))
        raise ZeroDivisionError
    assert state(model) == attributes
    assert live_attachments() == []


def test_two_models_of_one_family() -> None:
    one, other = shared("llama"), shared("llama", seed=9)
    expected = [greedy(one, prompt(12), 10), greedy(other, prompt(12), 10)]
    assert expected[0] != expected[1]
    first, second = tinykv.attach(one, page_size=4), tinykv.attach(other, page_size=16)
    assert [greedy(one, prompt(12), 10), greedy(other, prompt(12), 10)] == expected
    assert first.stats().peak_pages_used != second.stats().peak_pages_used
    first.detach()
    assert llama.scaled_dot_product_attention is not STOCK
    assert greedy(other, prompt(12), 10) == expected[1]
    assert greedy(one, prompt(12), 10) == expected[0], "dense, through the other's dispatcher"
    second.detach()


def test_a_stock_model_beside_a_paged_one_keeps_its_own_caches() -> None:
    paged, plain = shared("llama"), shared("llama", seed=9)
    expected = greedy(plain, prompt(12), 10)
    with tinykv.attach(paged, page_size=4) as kv:
        cache = make_prompt_cache(plain)
        assert type(cache[0]) is KVCache
        logits(paged, prompt(5), make_prompt_cache(paged))
        assert greedy(plain, prompt(12), 10, cache=cache) == expected
        kv.check()


def test_models_of_several_families_at_once() -> None:
    kinds = ["llama", "qwen2", "gemma3_text"]
    expected = {kind: greedy(shared(kind), prompt(12), 10) for kind in kinds}
    attached = [tinykv.attach(shared(kind), page_size=4) for kind in kinds]
    for kind in kinds * 2:
        assert greedy(shared(kind), prompt(12), 10) == expected[kind]
    for kv in attached:
        kv.check()


@pytest.mark.parametrize("inner_first", [True, False])
def test_nested_attachments_are_detached_in_either_order(inner_first: bool) -> None:
    model = make("llama")
    attributes = state(model)
    expected = greedy(model, prompt(12), 10)
    outer = tinykv.attach(model, page_size=4)
    assert greedy(model, prompt(12), 10) == expected
    inner = tinykv.attach(model, page_size=8, max_kv_size=64)
    assert greedy(model, prompt(12), 10) == expected
    assert inner.stats().peak_pages_used > 0
    first, last = (inner, outer) if inner_first else (outer, inner)
    first.detach()
    assert type(make_prompt_cache(model)[0]) is PagedKVCache
    used = last.stats().growths
    assert greedy(model, prompt(12), 10) == expected
    assert last.stats().growths >= max(1, used)
    last.detach()
    assert state(model) == attributes


def test_three_attachments_of_one_model_detached_from_the_middle() -> None:
    model = make("llama")
    attributes = state(model)
    chain = [tinykv.attach(model) for _ in range(3)]
    chain[1].detach()
    chain[0].detach()
    assert type(make_prompt_cache(model)[0]) is PagedKVCache
    chain[2].detach()
    assert state(model) == attributes


def test_a_make_cache_set_after_attach_is_left_alone() -> None:
    model = make("llama")
    kv = tinykv.attach(model)

    def own() -> list[Any]:
        return [KVCache() for _ in model.layers]

    model.make_cache = own
    kv.detach()
    assert model.make_cache is own


def test_caches_refuse_use_after_detach() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(5), cache)
    with pytest.raises(CacheStateError, match="detached from tinykv; make a new prompt cache"):
        logits(model, prompt(2), cache)
    assert {layer.offset for layer in cache} == {5}
    assert cache[0].size() == 5
    assert copy.deepcopy(cache)[0].offset == 5
    del cache
    # What there was to know can still be asked.
    assert len(kv.plan) == 4
    assert kv.stats().pages_used == 0
    kv.check()


def test_a_model_detached_before_its_first_cache_says_so() -> None:
    kv = tinykv.attach(shared("llama"))
    kv.detach()
    for ask in (lambda: kv.plan, kv.stats, kv.make_cache):
        with pytest.raises(CacheStateError, match="detached from tinykv before any cache was made"):
            ask()
    kv.check()


def test_wrong_settings_leave_the_model_as_it_was() -> None:
    model = make("llama")
    attributes = state(model)
    with pytest.raises(ConfigError, match="page_size"):
        tinykv.attach(model, page_size=0)
    with pytest.raises(ConfigError, match="'nowhere' is not known"):
        tinykv.attach(model, cache="nowhere")
    with pytest.raises(ConfigError, match="'nothing' is not known"):
        tinykv.attach(model, attention="nothing")
    with pytest.raises(ConfigError, match="either a config or fields"):
        tinykv.attach(model, tinykv.KVCacheConfig(), page_size=4)
    assert state(model) == attributes
    assert llama.scaled_dot_product_attention is STOCK
    assert live_attachments() == []


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(PluginError):
        tinykv.attach(object())


def test_the_dense_provider_hands_out_stock_caches() -> None:
    model = shared("gemma3_text")
    expected = greedy(model, prompt(12), 10)
    own = [type(layer) for layer in make_prompt_cache(model)]
    with tinykv.attach(model, cache="dense") as kv:
        assert [type(layer) for layer in make_prompt_cache(model)] == own
        assert greedy(model, prompt(12), 10) == expected
        assert [(line.kind, line.attention, line.reason) for line in kv.plan] == [
            ("dense", "dense", "cache is set to 'dense'")
        ] * 4
        assert kv.stats() == tinykv.PoolStats()
        kv.check()


def test_the_plan_is_made_at_the_first_cache() -> None:
    model = make("llama")
    kv = tinykv.attach(model, page_size=4)
    # What sharding and pipelining do after loading: fewer heads here, fewer layers.
    model.set_dtype(mx.float16)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.n_kv_heads //= 2
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight = projection.weight[: projection.weight.shape[0] // 2]
    model.model.layers = model.model.layers[1:]
    expected = greedy(model, prompt(12), 10, cache=[KVCache() for _ in model.layers])
    assert len(kv.plan) == 3
    assert greedy(model, prompt(12), 10) == expected
    cache = make_prompt_cache(model)
    logits(model, prompt(5), cache)
    keys, _ = cache[0].keys_and_values()
    assert keys.shape == (1, 1, 5, 16)
    assert keys.dtype == mx.float16
    assert cache[0].nbytes == 2 * 4 * 2 * 16 * 2
    kv.check()


def test_a_dtype_changed_later_is_followed_once_no_cache_holds_tokens() -> None:
    model = make("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(5), cache)
        model.set_dtype(mx.bfloat16)
        with pytest.raises(CacheStateError, match="drop its prompt caches, or detach and attach again"):
            logits(model, [3], cache)
        assert {layer.offset for layer in cache} == {5}
        kv.check()
        del cache
        gc.collect()
        cache = make_prompt_cache(model)
        logits(model, prompt(5), cache)
        assert {layer.keys_and_values()[0].dtype for layer in cache} == {mx.bfloat16}
        kv.check()
        expected = greedy(model, prompt(12), 10, cache=[KVCache() for _ in model.layers])
        assert greedy(model, prompt(12), 10) == expected


def test_model_attachment_and_caches_can_be_collected() -> None:
    model = make("llama")
    kv = tinykv.attach(model, page_size=4)
    cache = make_prompt_cache(model)
    logits(model, prompt(9), cache)
    pool = weakref.ref(kv.session.pools[0])
    watched = [weakref.ref(model), weakref.ref(kv), weakref.ref(kv.session), weakref.ref(cache[0])]
    kv.detach()
    del model, kv, cache
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    assert pool() is None


def test_a_model_dropped_without_detach_is_collected_and_leaves_no_trace() -> None:
    model = make("llama")
    kv = tinykv.attach(model, page_size=4)
    greedy(model, prompt(9), 3)
    watched = [weakref.ref(model), weakref.ref(kv)]
    del model, kv
    gc.collect()
    assert [ref() for ref in watched] == [None] * 2
    # The next attachment of the family restores the module when it goes.
    with tinykv.attach(make("llama")):
        assert llama.scaled_dot_product_attention is not STOCK
    assert llama.scaled_dot_product_attention is STOCK


def test_a_dropped_request_gives_its_pages_back_without_a_collection() -> None:
    model = shared("llama")
    gc.disable()
    try:
        with tinykv.attach(model, page_size=4) as kv:
            cache = make_prompt_cache(model)
            logits(model, prompt(9), cache)
            fork = copy.deepcopy(cache)
            logits(model, [1], fork)
            assert kv.stats().pages_used == 4
            del cache
            assert kv.stats().pages_used == 3
            del fork
            assert kv.stats().pages_used == 0
    finally:
        gc.enable()


def test_check_finds_books_that_were_tampered_with() -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        table = cache[0]._row.tables[0]
        page = table.pages.pop()
        with pytest.raises(InvariantError):
            kv.check()
        table.pages.append(page)
        kv.check()
        kv.session.pools[0].booked += 1
        with pytest.raises(InvariantError, match="bytes held"):
            kv.check()
        kv.session.pools[0].booked -= 1
        kv.session.pools[0].allocator.share([page])
        with pytest.raises(InvariantError, match=f"page {page} has ref_count 2 but 1 holders"):
            kv.check()
        kv.session.pools[0].allocator.release([page])
        kv.check()
