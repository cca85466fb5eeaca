"""llama4: chunked layers in pages, alone and in batches (R32)."""

from __future__ import annotations

import pytest
from common import compare
from mlx_lm.models import llama4
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from oracle import PROMPTS, cold, feed, prompt, run, solo, stock_caches
from paths import close, same
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError


@pytest.mark.parametrize("page_size", [1, 4, 8, 5, 32], ids=lambda size: f"pages of {size}")
def test_equals_mlx_lms_own_whatever_the_pages(page_size: int) -> None:
    """Where a chunk begins with a page its pages are read as a context of its own; elsewhere by a mask."""
    compare("llama4", page_size=page_size)


def test_the_plan_says_chunked() -> None:
    with tinykv.attach(registry.shared("llama4"), attention="gather") as kv:
        assert [(line.kind, line.window) for line in kv.plan] == [("chunked", 8)] * 3 + [("full", None)]


def test_chunked_layers_hold_no_more_than_a_chunk_and_the_margin() -> None:
    model = registry.shared("llama4")
    with tinykv.attach(model, attention="gather", page_size=4, rewind=4) as kv:
        cache = make_prompt_cache(model)
        for start in range(0, 60, 5):
            feed(model, cache, prompt(60)[start : start + 5])
        held = [len(set(leaf._row.tables[leaf._layer.group].live_pages())) for leaf in cache]
        assert held[3] == 15
        # A chunk of 8 and a margin of 4 may begin inside a page; the tokens of the last step come on top.
        assert max(held[:3]) <= (8 + 4 + 5) // 4 + 1
        kv.check()


def test_a_rewind_within_the_margin_works_and_past_it_is_refused() -> None:
    model = registry.shared("llama4")
    with tinykv.attach(model, attention="gather", page_size=2, rewind=6) as kv:
        cache = make_prompt_cache(model)
        feed(model, cache, *[[token] for token in prompt(30)])
        with pytest.raises(CacheStateError, match="can't rewind to 5 tokens: a layer with a window of 8"):
            trim_prompt_cache(cache, 25)
        assert trim_prompt_cache(cache, 5) == 5
        close(feed(model, cache, prompt(4, 8)), cold("llama4", prompt(30)[:25], prompt(4, 8)))
        kv.check()


def test_models_of_the_same_class_that_are_not_attached_run_as_before() -> None:
    model, other = registry.shared("llama4"), registry.make("llama4")
    before = llama4.LlamaModel.__call__, llama4.Attention.__call__
    with tinykv.attach(other):
        assert llama4.Attention.__call__ is not before[1]
        same(run(model, PROMPTS[0], stock_caches(model)), solo("llama4", tuple(PROMPTS[0])))
        with tinykv.attach(model):
            pass
        assert llama4.Attention.__call__ is not before[1], "the other one still needs it"
    assert (llama4.LlamaModel.__call__, llama4.Attention.__call__) == before
