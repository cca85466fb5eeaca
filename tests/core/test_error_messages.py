"""Each message names the setting or argument, its value and what would work, in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache, save_prompt_cache

import tinykv_plugin as tinykv
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.errors import CacheStateError, PromptCacheFileError, TinyKVError
from tinykv_plugin.persistence import adopt

Make = Callable[..., Any]


def run(model: Any, cache: list[Any], tokens: int = 3) -> None:
    mx.eval(model(mx.array([[1] * tokens]), cache=cache))


def says(kind: type[TinyKVError], call: Callable[[], Any], *parts: str) -> None:
    """``call`` raises ``kind`` in one line with all ``parts``."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


@pytest.fixture
def model(tiny_llama: Make) -> Any:
    return tiny_llama()


def batch_of(model: Any, *lengths: int, **options: Any) -> list[Any]:
    caches = [model.make_cache(**options) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        run(model, cache, length)
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def test_settings(model: Any) -> None:
    for field, value, allowed in (
        ("page_size", 0, "a whole number from 1 to 1024"),
        ("page_size", "many", "a whole number from 1 to 1024"),
        ("memory", "much", "a size such as 4GiB or 500MB, a whole number of bytes, or a fraction above 0 and below 1"),
        ("memory", 1.5, "a fraction above 0 and below 1"),
        ("max_pages", 0, "a whole number of at least 1"),
        ("on_full", "panic", "one of preempt, wait, error"),
        ("max_kv_size", 4, "a whole number of at least 8"),
        ("stats", "perhaps", "true or false"),
    ):
        says(
            tinykv.ConfigError,
            lambda field=field, value=value: tinykv.attach(model, **{field: value}),
            f"{field}: {value!r} is not allowed",
            f"it must be {allowed}" if not allowed.startswith("a fraction") else allowed,
        )
    says(
        tinykv.ConfigError, lambda: tinykv.attach(model, pages=3), "pages: no such setting; there are: cache, page_size"
    )
    says(tinykv.ConfigError, lambda: tinykv.attach(model, cache="pagd"), "cache: 'pagd' is not known; there are: dense")
    says(
        tinykv.ConfigError,
        lambda: tinykv.attach(model, attention="gpu"),
        "attention: 'gpu' is not known; there are: auto",
    )
    config = tinykv.KVCacheConfig()
    says(
        tinykv.ConfigError,
        lambda: tinykv.attach(model, config, page_size=3),
        "page_size: give either a config or fields, not both",
    )


def test_the_budget(model: Any) -> None:
    with tinykv.attach(model, page_size=4, max_pages=8) as kv:
        cache = model.make_cache()
        says(
            tinykv.OutOfPagesError,
            lambda: run(model, cache, 40),
            "10 needed, 8 free of 8",
            "the limit is max_pages: --kv-max-pages 10",
            "or use a smaller max_kv_size",
        )
        generator = tinykv.PagedBatchGenerator(model, max_tokens=20)
        says(
            tinykv.RequestTooLargeError,
            lambda: generator.insert([[1] * 30]),
            "the request can reach 50 tokens and needs 13 pages",
            "of 8 pages (max_pages): --kv-max-pages 13 would fit, or a shorter prompt or smaller max_tokens",
        )
        generator.close()
        kv.check()
    with tinykv.attach(model, page_size=4, memory="8KiB"):
        cache = model.make_cache()
        says(tinykv.OutOfPagesError, lambda: run(model, cache, 40), "the limit is memory: --kv-memory 40960 (40.0 KiB)")


def test_caches_of_one_request(model: Any, tiny_llama: Make) -> None:
    with tinykv.attach(model) as kv:
        cache = model.make_cache()
        two = mx.zeros((2, 2, 1, 16))
        says(
            CacheStateError,
            lambda: cache[0].update_and_fetch(two, two),
            "a cache of one request was given 2 rows; merge the requests' caches first",
        )
        one, three = mx.zeros((1, 2, 1, 16)), mx.zeros((1, 2, 3, 16))
        cache[0].update_and_fetch(one, one)
        says(
            CacheStateError,
            lambda: cache[0].update_and_fetch(one, one),
            "the last forward pass broke off; its tokens were taken back: call the model again",
        )
        cache[0].update_and_fetch(one, one)
        says(
            CacheStateError,
            lambda: cache[1].update_and_fetch(three, three),
            "layer 1 writes 3 tokens where others wrote 1",
        )
        says(CacheStateError, lambda: cache[0].trim(-1), "trim takes the number of tokens to take back, not -1")
        other = tiny_llama(seed=5)
        with tinykv.attach(other):
            theirs = make_prompt_cache(other)
            run(other, theirs)
            generator = tinykv.PagedBatchGenerator(model)
            says(
                CacheStateError,
                lambda: generator.insert([[1, 2]], caches=[theirs]),
                "a prompt cache belongs to another model or attachment; make it with this model's make_prompt_cache",
            )
            generator.close()
            with pytest.raises(CacheStateError, match="stores paged caches of its own model's attachment only"):
                kv.prefix_cache.insert([1, 1, 1], theirs)
        kept = model.make_cache()
    says(
        CacheStateError, lambda: run(model, kept), "the model was detached from tinykv; make a new prompt cache for it"
    )
    with tinykv.attach(model, cache="dense") as kv:
        says(
            CacheStateError,
            lambda: kv.prefix_cache,
            "the provider 'dense' has no prefix cache; cache=\"paged\" has one",
        )


def test_batches(model: Any) -> None:
    with tinykv.attach(model):
        batch = batch_of(model, 3, 4)
        three = mx.zeros((3, 2, 1, 16))
        says(
            CacheStateError,
            lambda: batch[0].update_and_fetch(three, three),
            "a batch cache of 2 rows was given 3; merge or filter it to as many rows first",
        )
        says(
            CacheStateError,
            lambda: batch[0].prepare(left_padding=[0, 2]),
            "left_padding=[0, 2]: paged caches take prompts padded on the right, not on the left",
        )
        says(
            CacheStateError,
            lambda: batch[0].prepare(right_padding=[0, 2]),
            "right_padding=[0, 2] needs the rows' lengths beside it",
        )
        long, short = model.make_cache(max_kv_size=64), model.make_cache(max_kv_size=16)
        run(model, long)
        run(model, short)
        says(
            CacheStateError,
            lambda: long[0].merge([long[0], short[0]]),
            "requests with different max_kv_size can't be batched: 16, 64; give them the same, or run them apart",
        )


def test_windows_tell_how_far_they_go_back(tiny_llama: Make) -> None:
    model = tiny_llama(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8)
    with tinykv.attach(model, page_size=4, rewind=4):
        cache = make_prompt_cache(model)
        run(model, cache, 40)
        run(model, cache, 1)
        says(
            CacheStateError,
            lambda: [layer.trim(20) for layer in cache],
            "can't rewind to 21 tokens: a layer with a window of 8 tokens has dropped those before",
            "raise rewind (4) to keep more",
        )


def test_prompt_cache_files(model: Any, tiny_llama: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "chat.safetensors")
    path_of_other = str(tmp_path / "other.safetensors")
    stock = [KVCache() for _ in range(4)]
    run(model, stock, 9)
    save_prompt_cache(path, stock)
    other = tiny_llama(num_hidden_layers=2)
    small = [KVCache() for _ in range(2)]
    run(other, small, 9)
    save_prompt_cache(path_of_other, small)
    with tinykv.attach(model) as kv:
        says(
            PromptCacheFileError,
            lambda: tinykv.load_prompt_cache(path_of_other, kv=kv),
            f"{path_of_other}: holds 2 caches, the model has 4; another model's?",
        )
        uneven = copy.deepcopy(stock)
        uneven[2].trim(1)
        says(PromptCacheFileError, lambda: adopt(uneven, kv), "its layers have different lengths: [8, 9]")
    with tinykv.attach(tiny_llama(num_key_value_heads=4)) as kv:
        says(PromptCacheFileError, lambda: tinykv.load_prompt_cache(path, kv=kv), "layer 0 holds", "the model writes")


def test_caches_of_another_kind(tmp_path: Path) -> None:
    """A model with recurrent layers, and a cache that has something else in their place."""
    hybrid = models.make("qwen3_next")
    with tinykv.attach(hybrid) as kv:
        own = hybrid.make_cache()
        recurrent = next(index for index, layer in enumerate(own) if isinstance(layer, ArraysCache))
        mixed: list[Any] = [KVCache() if isinstance(layer, PagedKVCache) else layer for layer in own]
        mixed[recurrent] = KVCache()
        says(
            PromptCacheFileError,
            lambda: adopt(mixed, kv),
            f"layer {recurrent} is a KVCache, the model's is a ArraysCache",
        )


def test_the_generator_of_a_model_without_pages(model: Any) -> None:
    says(
        CacheStateError,
        lambda: tinykv.PagedBatchGenerator(model),
        "PagedBatchGenerator needs a model with paged caches: tinykv_plugin.attach(model) first",
    )
