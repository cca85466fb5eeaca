"""quantized_start: tokens before it read K and V in the model's dtype, token by token."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from models import batched, greedy, largest_difference, logits, make, prompt, shared
from rounding import generated, open_pages, placed

import tinykv_plugin as tinykv
from tinykv_plugin.errors import ConfigError, OutOfPagesError

NEXT = [3, 4]


def wide(kind: str) -> Any:
    return shared(kind, head_dim=32, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("kind", "start", "bits", "attention"),
    [
        *(("llama", start, 8, "auto") for start in (5, 16, 28, 200)),
        ("llama", 23, 4, "auto"),
        ("llama", 23, 4, "gather"),
        ("gemma3_text", 5, 8, "gather"),
        ("gemma3_text", 23, 4, "auto"),
        ("gpt_oss", 23, 8, "auto"),
    ],
)
def test_same_tokens_on_every_way(kind: str, start: int, bits: int, attention: str) -> None:
    model = wide(kind)
    way = {"bits": (bits, bits), "page_size": 4, "start": start}
    expected = generated(model, prompt(21), 12, **way)
    other = generated(model, prompt(9), 12, **way)
    longer = generated(model, [*prompt(21), *NEXT], 8, **way)
    with tinykv.attach(model, page_size=4, bits=bits, quantized_start=start, attention=attention) as kv:
        for step in (2048, 5):
            assert greedy(model, prompt(21), 12, prefill_step_size=step) == expected, step
        assert batched(model, [prompt(21), prompt(9), prompt(21)], 12) == [expected, other, expected]
        # Taken back and gone on.
        cache = make_prompt_cache(model)
        logits(model, prompt(21), cache)
        for token in (7, 8, 9):
            logits(model, [token], cache)
        assert trim_prompt_cache(cache, 3) == 3
        fork = copy.deepcopy(cache)
        assert greedy(model, NEXT, 8, cache=cache) == longer
        assert greedy(model, NEXT, 8, cache=fork) == longer
        kv.check()


@pytest.mark.parametrize("start", [12, 28, 200])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_files_and_stored_prompts(kind: str, start: int, tmp_path: Path) -> None:
    model, file = wide(kind), str(tmp_path / "cache.safetensors")
    longer = generated(model, [*prompt(21), *NEXT], 8, (8, 8), 4, start=start)
    settings = {"page_size": 4, "bits": 8, "quantized_start": start, "prefix_dir": str(tmp_path / "prefix")}
    with tinykv.attach(model, **settings) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(21), cache)
        tinykv.save_prompt_cache(file, cache)
        assert greedy(model, NEXT, 8, cache=tinykv.load_prompt_cache(file, kv=kv)) == longer
        kv.prefix_cache.insert(prompt(21), cache)
        found, rest = kv.prefix_cache.fetch([*prompt(21), *NEXT])
        assert rest == NEXT
        assert greedy(model, rest, 8, cache=found) == longer
        del cache, found
        kv.check()
    names = {type(layer).__name__ for layer in mlx_cache.load_prompt_cache(file)}
    assert (names <= {"KVCache", "RotatingKVCache"}) == (start > 21), "full precision is mlx-lm's own before the start"
    with tinykv.attach(model, **settings) as kv:
        # Of the partial page nothing is on disk; below the start the pages in full precision are.
        found, rest = kv.prefix_cache.fetch([*prompt(21), *NEXT])
        assert len(rest) == 3
        assert greedy(model, rest, 8, cache=found) == longer
        kv.check()


def test_a_stock_file_is_gone_on_with_in_full_precision(tmp_path: Path) -> None:
    model, file = wide("llama"), str(tmp_path / "cache.safetensors")
    stock = make_prompt_cache(model)
    logits(model, prompt(21), stock)
    mlx_cache.save_prompt_cache(file, stock)
    expected = logits(model, NEXT, stock)
    with tinykv.attach(model, page_size=4, bits=4, quantized_start=40) as kv:
        assert largest_difference(logits(model, NEXT, tinykv.load_prompt_cache(file, kv=kv)), expected) < 1e-4
        kv.check()


@pytest.mark.parametrize("trimmed", [5, 17, 25])
def test_a_long_trim_finds_what_quantized_pages_hold(trimmed: int) -> None:
    """Farther back than ``rewind``: pages in full precision are made again of the others."""
    model = wide("llama")
    with open_pages(model, 8, 8, 4, start=12):
        expected = logits(model, [*prompt(30)[: 30 - trimmed], *NEXT], placed(model))[-2:]
    with tinykv.attach(model, page_size=4, bits=8, quantized_start=12, rewind=2) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(30), cache)
        assert trim_prompt_cache(cache, trimmed) == trimmed
        kv.check()
        close = largest_difference(logits(model, NEXT, cache), expected)
        kv.check()
        assert close < 0.2, "rounded to 8 bits, but right"


@pytest.mark.parametrize(
    ("kind", "bits", "start"), [("llama", 4, 0), ("llama", 8, 20), ("gemma3_text", 4, 23), ("qwen3_next", 4, 23)]
)
def test_drafts_that_are_taken_back_change_nothing(kind: str, bits: int, start: int) -> None:
    model, draft = wide(kind), make("llama", seed=5, head_dim=32, num_hidden_layers=1)
    fields: dict[str, Any] = {"page_size": 4, "bits": bits, "quantized_start": start, "rewind": 24}
    with tinykv.attach(model, **fields) as kv, tinykv.attach(draft, budget_of=kv, **fields) as draft_kv:
        # Looked up now: while a model is attached, the loop is ours.
        speculative_generate_step = importlib.import_module("mlx_lm.generate").speculative_generate_step
        expected = greedy(model, prompt(17), 24)
        for chunk in (2048, 5):
            steps = speculative_generate_step(
                mx.array(prompt(17)), model, draft, num_draft_tokens=5, max_tokens=24, prefill_step_size=chunk
            )
            assert [int(token) for token, *_ in steps] == expected
        kv.check()
        draft_kv.check()


def test_full_precision_goes_once_it_is_not_read_any_more() -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=4, bits=8, quantized_start=20, rewind=4) as kv:
        cache = make_prompt_cache(model)

        def open_pages_held() -> int:
            return len(cache[0]._row.tables[-1].live_pages())

        held = []
        for token in range(33):
            logits(model, [token], cache)
            held.append(open_pages_held())
        # All until the start and the margin are passed, then the page being filled and the margin's.
        assert held[19:24] == [5, 6, 6, 6, 6]
        assert max(held[26:]) <= 3
        kv.check()


def test_a_request_that_cannot_fit_in_both_forms_is_refused_as_a_whole() -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=4, bits=8, quantized_start=100, max_pages=4) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(14), cache)
        with pytest.raises(OutOfPagesError):
            logits(model, prompt(9), cache)
        assert cache[0].offset == 14
        kv.check()


def test_layers_that_get_arrays_say_that_they_are_rounded_at_once() -> None:
    model = shared("deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=32, num_hidden_layers=2)
    with tinykv.attach(model, page_size=4, bits=8, quantized_start=9) as kv:
        assert all("quantized from the first token on" in line.reason for line in kv.plan)
        assert [group.open for group in kv.groups] == [False]


def test_a_start_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^quantized_start: -1 is not allowed"):
        tinykv.attach(wide("llama"), bits=8, quantized_start=-1)
