"""What the log tells with ``verbose``: the plan, who writes, growth, eviction, preemption; and warnings once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import tinykv_plugin as tinykv
from tinykv_plugin.hookspecs import PoolGrown
from tinykv_plugin.manager import PluginManager

Make = Callable[..., Any]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tinykv")
    return caplog


def run(model: Any, cache: list[Any], tokens: list[int]) -> None:
    mx.eval(model(mx.array([tokens]), cache=cache))


def test_the_plan_and_who_writes(tiny_llama: Make, log: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8)
    with tinykv.attach(model, page_size=4, attention="gather"):
        make_prompt_cache(model)
    assert "Model: pages of 4 tokens, written by gather" in log.messages
    assert len([line for line in log.messages if ": full, gather by gather (no backend that reads pages" in line]) == 2
    assert len([line for line in log.messages if ": window, gather by gather (no backend" in line]) == 2


def test_growth_and_eviction(tiny_llama: Make, log: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4, max_pages=40) as kv:
        cache = make_prompt_cache(model)
        run(model, cache, [1] * 80)
        assert any(line.startswith("pool 'full': 40 pages, 0 before (") for line in log.messages), log.messages
        kv.prefix_cache.insert([1] * 80, cache)
        del cache
        run(model, make_prompt_cache(model), [2] * 100)
        assert "cached pages evicted: 5" in log.messages
        kv.prefix_cache.clear()


def test_preemption(tiny_llama: Make, log: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4, max_pages=14, prefix_cache=0):
        generator = tinykv.PagedBatchGenerator(model, max_tokens=30, stop_tokens=[[1000]])
        generator.insert([[1, 2, 3], [4, 5, 6]])
        while generator.next_generated():
            pass
        assert generator.counts.preempted
        generator.close()
    # Whoever keeps the records keeps no request's pages by them.
    kept = [argument for record in log.records for argument in record.args or ()]
    assert not [argument for argument in kept if isinstance(argument, BaseException)]
    (line, *_) = [line for line in log.messages if "gives its pages up" in line]
    assert line.startswith("request 1 gives its pages up, to be computed again: out of KV pages")


def test_a_plugin_that_fails_again_and_again_is_reported_once(log: pytest.LogCaptureFixture) -> None:
    def fail(event: PoolGrown) -> None:
        raise ValueError("mine")

    manager = PluginManager(points=[], disabled=[])
    manager.register(SimpleNamespace(tinykv_pool_grown=tinykv.hookimpl(fail)), "failing")
    for _ in range(3):
        manager.emit("tinykv_pool_grown", PoolGrown("full", 0, 1, 1))
    assert log.messages == ["the plugin 'failing' failed in tinykv_pool_grown"]


def test_without_it_nothing_is_said(tiny_llama: Make, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with tinykv.attach(model, page_size=4):
        run(model, make_prompt_cache(model), [1] * 80)
    assert caplog.messages == []
