"""Plain transformers, and what is done with one that isn't plain any more."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from common import DIRECT, UNWRITTEN, compare, differences, served_as_expected
from mlx_lm.models import llama
from oracle import PROMPTS, run, staggered, stock_caches
from paths import PATHS, same
from tiny import registry
from tiny.base import WINDOWED

import tinykv_plugin as tinykv
from tinykv_adapters.llama_like import LlamaLikeAdapter
from tinykv_plugin.batching.generator import PagedBatchGenerator


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "stablelm", "nemotron-nas", "lille-130m"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "llama-like")


def test_equals_mlx_lms_own() -> None:
    compare("qwen2", ("single", "batch"))


def test_a_llama_may_have_layers_with_a_window() -> None:
    model = registry.make("llama", **WINDOWED)
    expected = [run(model, tokens, stock_caches(model)) for tokens in PROMPTS]
    with tinykv.attach(model, attention="gather", page_size=4) as kv:
        assert {line.kind for line in kv.plan} == {"full", "window"}
        assert not any("expected" in line.reason for line in kv.plan)
        same(run(model, PROMPTS[0], kv.make_cache(), prefill_step_size=7), expected[0])
        for found, alone in zip(staggered(PagedBatchGenerator, model), expected, strict=True):
            same(found, alone)
        kv.check()


def test_what_is_not_expected_is_named() -> None:
    adapter = LlamaLikeAdapter()
    assert differences("qwen2", adapter, DIRECT, DIRECT) == ""
    assert differences("qwen2", adapter, DIRECT, DIRECT, DIRECT) == (
        "qwen2: expected 2 layers full read directly, found 3 full read directly"
    )
    assert differences("qwen2", adapter, DIRECT, UNWRITTEN) == (
        "qwen2: expected 2 layers full read directly, found 1 full read directly; 1 never written"
    )
    assert differences("nemotron-nas", adapter, DIRECT, UNWRITTEN, DIRECT) == ""


def test_a_model_that_has_changed_is_read_by_gather_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a new mlx-lm took positions from the number of keys: right alone, and wrong in its own batches."""
    own = llama.Attention.__call__

    def changed(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return own(self, x, mask, None if cache is None else Counting(cache))

    monkeypatch.setattr(llama.Attention, "__call__", changed)
    with (
        caplog.at_level(logging.WARNING, "tinykv"),
        tinykv.attach(registry.shared("llama"), attention="gather", page_size=4) as kv,
    ):
        difference = (
            "llama: expected 2 layers full read directly or window read directly, "
            "found 2 full gathered (the model uses keys.shape)"
        )
        assert [line.attention for line in kv.plan] == ["gather"] * 2
        assert all(difference in line.reason for line in kv.plan)
        assert all("run one after the other" in line.reason for line in kv.plan)
        assert f"{difference}; it is read by gather" in caplog.text
        monkeypatch.undo()  # mlx-lm's own, to compare with: it computes the same
        for path in ("single", "batch"):
            PATHS[path]("llama", kv)
            kv.check()


class Counting:
    """A cache whose keys are counted."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        keys, values = self._cache.update_and_fetch(keys, values)
        assert keys.shape[2] > 0
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
