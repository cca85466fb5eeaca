"""Prompt caches on disk: ours and stock's read each other's files, and generation goes on with the same tokens."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from models import greedy, largest_difference, logits, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.errors import CacheStateError, OutOfPagesError, PromptCacheFileError
from tinykv_plugin.layout import leaves
from tinykv_plugin.persistence import adopt

KINDS = ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "falcon_h1", "llama4", "mamba"]
START, NEXT = prompt(30), [5, 6, 7]


def pieces(model: Any, tokens: list[int], cache: Any) -> None:
    """Prefill in one piece, then by single tokens: a stock ring is turned by them."""
    logits(model, tokens[:-5], cache)
    for token in tokens[-5:]:
        logits(model, [token], cache)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "cache.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [6, 30])
def test_what_we_save_stock_goes_on_with(kind: str, length: int, file: str) -> None:
    model = shared(kind)
    stock = make_prompt_cache(model)
    pieces(model, prompt(length), stock)
    expected = greedy(model, NEXT, 12, cache=stock)
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        pieces(model, prompt(length), cache)
        used = kv.stats().pages_used
        tinykv.save_prompt_cache(file, cache, {"model": "tiny", "chat": ""})
        assert kv.stats().pages_used == used
        assert greedy(model, NEXT, 12, cache=cache) == expected, "saving left the cache as it was"
    loaded, metadata = mlx_cache.load_prompt_cache(file, return_metadata=True)
    assert json.loads(metadata.pop("tinykv"))["version"] == 1
    assert metadata == {"model": "tiny", "chat": ""}
    assert [type(layer) for layer in loaded] == [type(layer) for layer in make_prompt_cache(model)]
    assert greedy(model, NEXT, 12, cache=loaded) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [6, 30])
def test_what_stock_saves_we_go_on_with(kind: str, length: int, file: str) -> None:
    model = shared(kind)
    stock = make_prompt_cache(model)
    pieces(model, prompt(length), stock)
    mlx_cache.save_prompt_cache(file, stock, {"a": "b"})
    expected = greedy(model, NEXT, 12, cache=stock)
    for page_size in (1, 4, 32):
        with tinykv.attach(model, page_size=page_size) as kv:
            cache, metadata = tinykv.load_prompt_cache(file, return_metadata=True, kv=kv)
            assert metadata == {"a": "b"}
            paged = [isinstance(leaf, PagedKVCache) for leaf in leaves(cache)]
            assert paged == [isinstance(leaf, PagedKVCache) for leaf in leaves(make_prompt_cache(model))]
            kv.check()
            assert greedy(model, NEXT, 12, cache=cache) == expected
            kv.check()
            del cache
            assert kv.stats().pages_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_save_we_go_on_with(kind: str, file: str) -> None:
    model = shared(kind)
    expected = greedy(model, [*START, *NEXT], 12)
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        pieces(model, START, cache)
        tinykv.save_prompt_cache(file, cache)
    with tinykv.attach(model, page_size=16) as kv:
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        again = tinykv.load_prompt_cache(file, kv=kv)
        assert greedy(model, NEXT, 12, cache=loaded) == expected
        assert greedy(model, NEXT, 12, cache=again) == expected
        kv.check()
        # And once more, from a cache that went through a file.
        third = tinykv.load_prompt_cache(file, kv=kv)
        logits(model, NEXT[:1], third)
        tinykv.save_prompt_cache(file, third)
        assert greedy(model, NEXT[1:], 12, cache=tinykv.load_prompt_cache(file, kv=kv)) == expected


@pytest.mark.parametrize("length", [3, 4, 15, 16, 17, 45])
def test_a_size_limit_goes_through_files_both_ways(length: int, file: str) -> None:
    model = shared("llama")
    stock = [RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
    pieces(model, prompt(length), stock) if length > 5 else logits(model, prompt(length), stock)
    mlx_cache.save_prompt_cache(file, stock)
    expected = greedy(model, NEXT, 30, cache=stock)
    for page_size in (1, 4, 32):
        with tinykv.attach(model, page_size=page_size) as kv:
            cache = tinykv.load_prompt_cache(file, kv=kv)
            assert {layer.window for layer in cache} == {16}
            assert {layer.offset for layer in cache} == {length}
            kv.check()
            ours = file.replace("cache.", "ours.")
            tinykv.save_prompt_cache(ours, cache)
            assert greedy(model, NEXT, 30, cache=cache) == expected
            kv.check()
            assert greedy(model, NEXT, 30, cache=tinykv.load_prompt_cache(ours, kv=kv)) == expected
            kv.check()
    assert greedy(model, NEXT, 30, cache=mlx_cache.load_prompt_cache(ours)) == expected


@pytest.mark.parametrize("one_piece", [True, False])
def test_a_ring_of_stock_is_put_in_order(one_piece: bool, file: str) -> None:
    model = shared("gemma3_text")
    stock = make_prompt_cache(model)
    for size in [29] if one_piece else [1] * 13 + [9] + [1] * 7:
        logits(model, prompt(size, seed=size), stock)
    mlx_cache.save_prompt_cache(file, stock)
    with tinykv.attach(model, page_size=4) as kv:
        cache = tinykv.load_prompt_cache(file, kv=kv)
        for ours, own in zip(cache, stock, strict=True):
            for a, b in zip(ours.keys_and_values(), own.keys_and_values(), strict=True):
                ordered = own._temporal_order(b)[:, :, -8:] if isinstance(own, RotatingKVCache) else b
                assert largest_difference(a, ordered) == 0.0
        kv.check()


def test_empty_caches_go_through_files(file: str) -> None:
    model = shared("llama")
    with tinykv.attach(model) as kv:
        expected = greedy(model, prompt(9), 5)
        tinykv.save_prompt_cache(file, make_prompt_cache(model))
        cache = tinykv.load_prompt_cache(file, kv=kv)
        assert all(layer.empty() for layer in cache)
        assert greedy(model, prompt(9), 5, cache=cache) == expected
    assert greedy(model, prompt(9), 5, cache=mlx_cache.load_prompt_cache(file)) == expected


def test_copies_and_trimmed_caches_save_their_own_tokens(file: str) -> None:
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(14), cache)
        fork = copy.deepcopy(cache)
        logits(model, prompt(6, seed=2), fork)
        for layer in cache:
            layer.trim(3)
        for one, tokens in ((cache, prompt(11)), (fork, [*prompt(14), *prompt(6, seed=2)])):
            tinykv.save_prompt_cache(file, one)
            expected = greedy(model, [*tokens, 9], 8)
            assert greedy(model, [9], 8, cache=tinykv.load_prompt_cache(file, kv=kv)) == expected


def test_stock_caches_can_be_saved_and_adopted_later(file: str) -> None:
    model = shared("llama")
    stock = make_prompt_cache(model)
    logits(model, START, stock)
    expected = greedy(model, [*START, *NEXT], 8)
    tinykv.save_prompt_cache(file, stock)
    dense = tinykv.load_prompt_cache(file)
    assert [type(layer) for layer in dense] == [mlx_cache.KVCache] * 4
    with tinykv.attach(model, page_size=4) as kv:
        adopt(dense, kv)
        assert "Paged" in repr(dense)
        assert greedy(model, NEXT, 8, cache=dense) == expected
        kv.check()
    with tinykv.attach(model, cache="dense") as kv:
        cache = tinykv.load_prompt_cache(file, kv=kv)
        assert [type(layer) for layer in cache] == [mlx_cache.KVCache] * 4
        assert greedy(model, NEXT, 8, cache=cache) == expected


def saved(file: str, kind: str = "llama", **fields: Any) -> str:
    model = shared(kind, **fields)
    cache = make_prompt_cache(model)
    logits(model, START, cache)
    mlx_cache.save_prompt_cache(file, cache)
    return file


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("llama", {"num_hidden_layers": 2}, "holds 2 caches, the model has 4; another model's?"),
        ("gemma3_text", {}, "layer 0 is a RotatingKVCache with a window of 8; the model's pages have a window of None"),
        ("mamba", {"num_hidden_layers": 4}, "layer 0 is a ArraysCache"),
        ("llama", {"num_key_value_heads": 4}, "layer 0 holds LayerSpec(kv_heads=4, "),
        ("llama", {"head_dim": 32}, "layer 0 holds LayerSpec(kv_heads=2, key_dim=32, "),
    ],
)
def test_another_models_file_is_refused_by_name(kind: str, fields: dict[str, Any], reason: str, file: str) -> None:
    saved(file, kind, **fields)
    model = shared("llama")
    with tinykv.attach(model, page_size=4) as kv:
        live = make_prompt_cache(model)
        logits(model, prompt(9), live)
        before = kv.stats()
        with pytest.raises(PromptCacheFileError) as caught:
            tinykv.load_prompt_cache(file, kv=kv)
        assert caught.value.path == file
        assert str(caught.value).startswith(f"{file}: ")
        assert reason in str(caught.value)
        assert kv.stats() == before
        kv.check()


def test_another_models_file_is_refused_while_no_cache_is_in_use(file: str) -> None:
    saved(file, num_key_value_heads=4)
    model = make("llama")
    with tinykv.attach(model, page_size=4) as kv:
        with pytest.raises(PromptCacheFileError, match="layer 0"):
            tinykv.load_prompt_cache(file, kv=kv)
        expected = greedy(model, prompt(9), 5, cache=[mlx_cache.KVCache() for _ in model.layers])
        assert greedy(model, prompt(9), 5) == expected
        kv.check()


@pytest.mark.parametrize("content", [b"", b"not a safetensors file", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", None])
def test_files_that_are_no_prompt_cache_are_refused_by_name(content: bytes | None, file: str) -> None:
    if content is None:
        mx.save_safetensors(file, {"weight": mx.zeros((3,))})
    else:
        Path(file).write_bytes(content)
    with tinykv.attach(shared("llama")) as kv:
        for options in ({}, {"kv": kv}):
            with pytest.raises(PromptCacheFileError, match="not a readable prompt cache") as caught:
                tinykv.load_prompt_cache(file, **options)
            assert caught.value.path == file
            assert isinstance(caught.value, ValueError)


def test_a_missing_or_truncated_file_is_refused_by_name(file: str) -> None:
    with pytest.raises(PromptCacheFileError, match=r"cache\.safetensors"):
        tinykv.load_prompt_cache(file)
    content = Path(saved(file)).read_bytes()
    with tinykv.attach(shared("llama")) as kv:
        for length in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
            Path(file).write_bytes(content[:length])
            with pytest.raises(PromptCacheFileError, match=r"cache\.safetensors"):
                tinykv.load_prompt_cache(file, kv=kv)
            kv.check()
            assert kv.stats().pages_used == 0


def test_layers_of_different_lengths_are_refused(file: str) -> None:
    model = shared("llama")
    stock = make_prompt_cache(model)
    logits(model, START, stock)
    stock[2].trim(1)
    mlx_cache.save_prompt_cache(file, stock)
    with tinykv.attach(model) as kv, pytest.raises(PromptCacheFileError, match=r"different lengths: \[29, 30\]"):
        tinykv.load_prompt_cache(file, kv=kv)


def test_a_file_too_large_for_the_budget_is_refused_with_nothing_changed(file: str) -> None:
    saved(file)
    model = shared("llama")
    with tinykv.attach(model, page_size=4, max_pages=6) as kv:
        with pytest.raises(OutOfPagesError, match="--kv-max-pages 8"):
            tinykv.load_prompt_cache(file, kv=kv)
        kv.check()
        assert kv.stats().pages_used == 0
        logits(model, prompt(20), make_prompt_cache(model))


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_save_that_fails_leaves_the_old_file(step: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Path(saved(file)).read_bytes()
    model = shared("llama")

    def fail(*args: Any, **kwargs: Any) -> None:
        if step == "write":
            Path(args[0]).write_bytes(b"half of it")
        raise OSError("disk full")

    with tinykv.attach(model) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        with monkeypatch.context() as patch:
            patch.setattr(*((mx, "save_safetensors") if step == "write" else (os, "replace")), fail)
            with pytest.raises(OSError, match="disk full"):
                tinykv.save_prompt_cache(file, cache)
        assert Path(file).read_bytes() == old
        assert os.listdir(Path(file).parent) == [Path(file).name], "nothing is left behind"
        tinykv.save_prompt_cache(file, cache)
        assert Path(file).read_bytes() != old
        kv.check()


def test_names_without_suffix_and_paths_are_those_of_stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama")
    monkeypatch.chdir(tmp_path)
    with tinykv.attach(model) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(9), cache)
        tinykv.save_prompt_cache("plain", cache)
        tinykv.save_prompt_cache(Path("sub.safetensors"), cache)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.safetensors", "sub.safetensors"]
        for name in ("plain.safetensors", Path("sub.safetensors")):
            assert {layer.offset for layer in tinykv.load_prompt_cache(name, kv=kv)} == {9}
        with pytest.raises(OSError):
            tinykv.save_prompt_cache(tmp_path / "nowhere" / "cache.safetensors", cache)
    # Readable by whoever may read what the user creates, as stock's files are.
    mlx_cache.save_prompt_cache("stock.safetensors", make_prompt_cache(model))
    assert os.stat("plain.safetensors").st_mode == os.stat("stock.safetensors").st_mode


def rewritten(file: str, change: Any) -> None:
    """Change the header or the arrays of a file of ours."""
    arrays, metadata = mx.load(file, return_metadata=True)  # type: ignore[misc]
    mx.eval(arrays)
    header = json.loads(metadata["0.tinykv"])
    change(header, arrays)
    metadata["0.tinykv"] = header if isinstance(header, str) else json.dumps(header)
    mx.save_safetensors(file, arrays, metadata)


@pytest.mark.parametrize("with_model", [True, False])
def test_r54_files_say_what_they_are(file: str, with_model: bool) -> None:
    model = make("llama")
    kv = tinykv.attach(model, page_size=4)
    cache = kv.make_cache()
    logits(model, prompt(20), cache)
    target = kv if with_model else None

    def save() -> None:
        tinykv.save_prompt_cache(file, cache, {"mine": "yes"})

    save()
    loaded, metadata = tinykv.load_prompt_cache(file, return_metadata=True, kv=target)
    assert (loaded[0].offset, metadata) == (20, {"mine": "yes"})

    rewritten(file, lambda header, _: header.update(version=7))
    with pytest.raises(tinykv.PromptCacheFileError, match=r"cache\.safetensors: is of version 7 .* reads version 1"):
        tinykv.load_prompt_cache(file, kv=target)
    save()
    rewritten(file, lambda _, arrays: arrays.update({"1.0": arrays["1.0"] + 1e-3}))
    with pytest.raises(tinykv.PromptCacheFileError, match="wrong checksum"):
        tinykv.load_prompt_cache(file, kv=target)
    save()
    rewritten(file, lambda header, _: header.pop("checksum"))
    with pytest.raises(tinykv.PromptCacheFileError, match="header can't be read"):
        tinykv.load_prompt_cache(file, kv=target)
    assert kv.stats().sequences == 1 + with_model
    del loaded


def test_r54_other_weights_are_refused_and_what_passes_through_keeps_its_origin(file: str) -> None:
    kv = tinykv.attach(make("llama"), page_size=4)
    cache = kv.make_cache()
    logits(kv.model, prompt(20), cache)
    tinykv.save_prompt_cache(file, cache)
    other = tinykv.attach(make("llama", seed=8), page_size=4)
    with pytest.raises(tinykv.PromptCacheFileError, match=r"cache\.safetensors: was computed by other weights"):
        tinykv.load_prompt_cache(file, kv=other)
    dense = tinykv.load_prompt_cache(file)
    tinykv.save_prompt_cache(file, dense)
    with pytest.raises(tinykv.PromptCacheFileError, match="other weights"):
        tinykv.load_prompt_cache(file, kv=other)
    assert tinykv.load_prompt_cache(file, kv=kv)[0].offset == 20
    assert other.stats().pages_used == 0


@pytest.mark.parametrize("fields", [{}, {"max_kv_size": 12}, {"bits": 8, "group_size": 32}])
def test_a_cache_without_the_oldest_token_of_its_window_goes_through_files(fields: dict[str, Any], file: str) -> None:
    """Fetched, it may hold no more than the next token sees; stock's ring has one more, which is never seen then.

    What is taken back after loading must not see it either.
    """
    kind = "llama" if "max_kv_size" in fields else "gemma3_text"
    model = shared(kind, **({"head_dim": 32} if "bits" in fields else {}))
    seen = set()
    with tinykv.attach(model, page_size=4, rewind=5, **fields) as kv:
        whole = kv.make_cache()
        for start in range(0, 29, 4):
            logits(model, prompt(29)[start : start + 4], whole)
        kv.prefix_cache.insert(prompt(29), whole)
        for length in range(23, 28):
            rewound = copy.deepcopy(whole)
            mlx_cache.trim_prompt_cache(rewound, min(5, 29 - length))
            fetched, rest = kv.prefix_cache.fetch([*prompt(length), 1])
            assert rest == [1]
            for cache in (rewound, fetched):
                limited = next(layer for layer in cache if layer.window)
                seen.add(limited.keys_and_values()[0].shape[2] - limited.window)
                tinykv.save_prompt_cache(file, cache)
                expected = greedy(model, NEXT, 12, cache=copy.deepcopy(cache))
                loaded = tinykv.load_prompt_cache(file, kv=kv)
                with pytest.raises(CacheStateError, match="can't rewind"):
                    mlx_cache.trim_prompt_cache(loaded, 2)
                assert greedy(model, NEXT, 12, cache=tinykv.load_prompt_cache(file, kv=kv)) == expected
                kv.check()
                if "bits" not in fields:
                    assert greedy(model, NEXT, 12, cache=mlx_cache.load_prompt_cache(file)) == expected
    assert seen == {-1, 0}
