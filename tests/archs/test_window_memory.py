"""Layers with a window hold, and are charged for, the window and not the whole context (R67)."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache
from oracle import feed, prompt
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.batching.admission import Admission
from tinykv_plugin.batching.generator import PagedBatchGenerator
from tinykv_plugin.cli.capacity import request_bytes
from tinykv_plugin.cli.inspect import group_sizes

CONTEXT = 32_768
CHUNK = 512


def one_full_and_five_windows() -> object:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return registry.make(
        "gemma3_text", num_hidden_layers=6, sliding_window=1024, sliding_window_pattern=6, layer_types=kinds
    )


@pytest.mark.parametrize("page_size", [16, 32])
def test_admission_and_inspect_charge_windows_at_the_window(page_size: int) -> None:
    with tinykv.attach(one_full_and_five_windows(), page_size=page_size, rewind=16, memory="1GiB") as kv:
        names = [group.name for group in kv.groups]
        window, full = names.index("window 1024"), names.index("full")
        need = Admission(kv.session, CHUNK).footprint(CONTEXT)  # type: ignore[arg-type]
        assert need.pages[full] == CONTEXT // page_size
        # The window, the margin, the tokens of one step, and the page that it begins in.
        assert need.pages[window] == -(-(1024 + 16 + CHUNK) // page_size) + 1
        sizes = group_sizes(kv)
        assert sizes[window].pages(CONTEXT) == -(-(1024 + 16) // page_size) + 1
        whole = CONTEXT // page_size * sum(size.page_bytes for size in sizes)
        assert request_bytes(sizes, CONTEXT) < 0.25 * whole, "not charged for the whole context"


def test_a_long_request_is_admitted_where_only_its_windows_make_it_fit() -> None:
    """Charged for the whole context in every layer it would need twice the budget."""
    model = registry.make("gemma3_text")
    with tinykv.attach(model, page_size=4, rewind=0, memory=180 * 1024, attention="gather", prefix_cache=0) as kv:
        page = sum(group.page_bytes for group in kv.groups)
        assert 300 // 4 * page > kv.stats().bytes_total > 300 // 4 * page / 2
        generator = PagedBatchGenerator(model, max_tokens=4, prefill_step_size=16)
        generator.insert([prompt(296)])
        tokens = [response.token for _ in range(4) for response in generator.next_generated()]
        assert len(tokens) == 4 and -1 not in tokens
        generator.close()


@pytest.mark.parametrize(("page_size", "rewind"), [(4, 0), (4, 6), (16, 0), (32, 16)])
def test_a_window_holds_itself_two_pages_and_the_margin(page_size: int, rewind: int) -> None:
    model = registry.shared("gemma3_text")
    with tinykv.attach(model, attention="gather", page_size=page_size, rewind=rewind) as kv:
        cache = make_prompt_cache(model)
        windowed = next(layer for layer in cache if layer.window is not None)
        for token in prompt(90):
            feed(model, cache, [token])
            held = len(windowed._row.tables[windowed._layer.group].live_pages()) * page_size
            assert held <= 8 + rewind + 2 * page_size
        assert windowed.offset == 90
        kv.check()
