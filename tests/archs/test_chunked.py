"""llama4: chunked layers in pages, alone and in batches (R32)."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from common import compare
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import llama4
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from oracle import PROMPTS, cold, feed, prompt, run, solo, stock_caches
from paths import close, same
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_adapters.chunked import ChunkedAdapter
from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.chunks import segments_of
from tinykv_plugin.errors import CacheStateError, PluginError
from tinykv_plugin.hookspecs import hookimpl
from tinykv_plugin.journal import Journal
from tinykv_plugin.manager import PluginManager
from tinykv_plugin.masks import causal_array
from tinykv_plugin.protocols import Replacement
from tinykv_plugin.retention import Retention
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable


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


@given(
    chunk=st.integers(1, 12),
    page_size=st.sampled_from([1, 2, 3, 4, 5]),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=3),
)
def test_segments_see_what_the_mask_lets_through(chunk: int, page_size: int, rows: list[tuple[int, int]]) -> None:
    """For any starts and lengths: either a step can't be cut, or each query sees its own chunk up to itself."""
    width = max(count for _, count in rows)
    tables = []
    for start, count in rows:
        table = PageTable(PageAllocator(Journal()), Journal(), page_size, Retention(chunk))
        table.pages = array("i", range(-(-(start + count) // page_size)))
        tables.append(table)
    step = GroupStep(tables, [start + count for start, count in rows], [count for _, count in rows], width)
    segments = segments_of(step, chunk)
    for row, (start, count) in enumerate(rows):
        mask = causal_array(count, min(start, chunk - 1), chunk, 0, start, chunk).tolist()
        first = start - min(start, chunk - 1)
        for query in range(count if segments else 0):
            part = next(part for part in segments if part.start <= query < part.stop)
            seen_until = part.step.starts[row] + query - part.start
            begin = part.step.tables[row].pages[0] * page_size
            assert [begin + position for position in range(seen_until + 1)] == [
                first + column for column, seen in enumerate(mask[query]) if seen
            ]
    if len(rows) == 1:
        assert bool(segments) == (chunk % page_size == 0)


def test_another_adapters_replacement_of_the_same_function_is_refused() -> None:
    class Other(ChunkedAdapter):
        name = "other"

        def replacements(self, model: Any) -> list[Replacement]:
            theirs = list(super().replacements(model))
            return [theirs[0], Replacement(theirs[1].owner, theirs[1].name, lambda original: original)]

    plugins = PluginManager()
    plugins.register(SimpleNamespace(tinykv_model_adapters=hookimpl(lambda: [Other()])), "other")
    model, other = registry.shared("llama4"), registry.make("llama4")
    before = llama4.LlamaModel.__call__, llama4.Attention.__call__
    with tinykv.attach(model):
        during = llama4.LlamaModel.__call__, llama4.Attention.__call__
        with pytest.raises(PluginError, match=r"Attention\.__call__ was replaced by another adapter"):
            tinykv.attach(other, plugins=plugins)
        assert (llama4.LlamaModel.__call__, llama4.Attention.__call__) == during
        assert "make_cache" not in vars(other)
    with tinykv.attach(other, plugins=plugins):
        assert llama4.LlamaModel.__call__ is not before[0]
    assert (llama4.LlamaModel.__call__, llama4.Attention.__call__) == before
