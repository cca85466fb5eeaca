"""What models do with caches besides reading and writing: ones they never write, and ``cache.keys`` as a handle."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, trim_prompt_cache
from oracle import cold, feed, prompt
from paths import close
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError
from tinykv_plugin.unused import UnusedCache


def test_a_cache_that_is_never_written_stands_in_nobodys_way(tmp_path: Path) -> None:
    model = registry.shared("nemotron-nas")
    with tinykv.attach(model, attention="gather", page_size=4) as kv:
        cache = make_prompt_cache(model)
        unused = cache[1]
        assert [isinstance(layer, UnusedCache) for layer in cache] == [False, True, False]
        feed(model, cache, prompt(9))
        assert (unused.offset, unused.size(), unused.nbytes, unused.empty(), unused.state) == (0, 0, 0, True, [])
        assert trim_prompt_cache([unused, cache[0], cache[2]], 2) == 2
        fork = copy.deepcopy(cache)
        path = tmp_path / "cache.safetensors"
        tinykv.save_prompt_cache(path, cache)
        expected = cold("nemotron-nas", prompt(7), prompt(3, 1))
        for continued in (cache, fork, tinykv.load_prompt_cache(path, kv=kv), load_prompt_cache(str(path))):
            close(feed(model, continued, prompt(3, 1)), expected)
        with pytest.raises(CacheStateError, match="attach it again"):
            unused.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))


def test_what_a_model_has_depend_on_keys_is_evaluated_with_the_cache() -> None:
    model = registry.shared("llama")
    with tinykv.attach(model, attention="gather", page_size=4) as kv:
        cache = make_prompt_cache(model)
        cache[0].keys = mx.depends(cache[0].keys, mx.zeros(()))  # nothing was written: nothing to hold it
        feed(model, cache, prompt(5))
        layer = cache[0]
        layer.keys = mx.depends(layer.keys, mx.ones((3,)))
        layer.values = mx.zeros_like(layer.values)
        assert len(layer._layer.pages.due) == 2
        assert all(any(held is due for due in layer._layer.pages.due) for held in layer.state[-3:-1])
        close(feed(model, cache, prompt(4, 1)), cold("llama", prompt(5), prompt(4, 1)))
        assert not layer._layer.pages.due, "the next write came after them"
        with pytest.raises(CacheStateError, match="can't be assigned"):
            layer.keys = mx.zeros((1, 2, 5, 16))
        kv.check()


def test_a_model_that_ties_its_caches_together_is_written_in_place() -> None:
    """deepseek_v32 has its indexer's keys depend on each other so that no chain of pending writes grows (R09)."""
    model = registry.shared("deepseek_v32")
    with tinykv.attach(model, attention="gather", page_size=16, memory="1GiB") as kv:
        cache = make_prompt_cache(model)
        feed(model, cache, prompt(3))
        pool = kv.session.pools[0]
        pool._grow(2000, 0)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for step in range(200):
            mx.eval(model(mx.array([[step % 97]]), cache=cache))
            assert all(len(part._layer.pages.due) <= 1 for entry in cache for part in entry.caches)
        smallest = min(pages.keys.nbytes for pages in pool.layers.values())
        assert mx.get_peak_memory() - before < smallest / 2, "no pool was copied"
        kv.check()
