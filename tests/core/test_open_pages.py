"""Open pages where chunks, trims, forks and files meet: each token reads what its position says, and no other page."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from models import greedy, largest_difference, logits, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.batching.admission import Admission
from tinykv_plugin.persistence import adopt

TOKENS = prompt(60)
NEXT = [7, 8, 9]
CLOSE = 1e-3


def wide(kind: str = "llama") -> Any:
    return shared(kind, head_dim=32, num_hidden_layers=2)


def attach(model: Any, **settings: Any) -> tinykv.Attachment:
    """Pages that have held other tokens before."""
    kv = tinykv.attach(model, **{"page_size": 4, "bits": 4, "rewind": 2, **settings})
    logits(model, prompt(60, 5), kv.make_cache())
    return kv


def cold(model: Any, tokens: list[int]) -> mx.array:
    """The logits of :data:`NEXT` after ``tokens``, run at once."""
    return logits(model, [*tokens, *NEXT], make_prompt_cache(model))[-len(NEXT) :]


@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize(("start", "left"), [(0, 11), (20, 11), (20, 12)])
def test_a_chunk_fills_the_page_that_it_leaves_behind(start: int, left: int, attention: str) -> None:
    """It is there until the next step, so a trim may lead back into it."""
    model = wide()
    with attach(model, quantized_start=start, attention=attention) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:10], cache)
        logits(model, TOKENS[10:40], cache)
        trim_prompt_cache(cache, 40 - left)
        assert largest_difference(logits(model, NEXT, cache), cold(model, TOKENS[:left])) < CLOSE
        kv.check()


@pytest.mark.parametrize("left", [11, 12])
def test_a_page_left_behind_is_stored_whole(left: int) -> None:
    model = wide()
    with attach(model, quantized_start=20) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:10], cache)
        logits(model, TOKENS[10:40], cache)
        kv.prefix_cache.insert(TOKENS[:40], cache)
        found, rest = kv.prefix_cache.fetch([*TOKENS[:left], *NEXT])
        assert rest == NEXT
        assert largest_difference(logits(model, rest, found), cold(model, TOKENS[:left])) < CLOSE


def test_pages_made_again_are_not_those_of_a_fork() -> None:
    model = wide()
    with attach(model, quantized_start=20) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:10], cache)
        fork = copy.deepcopy(cache)
        logits(model, TOKENS[10:40], cache)
        trim_prompt_cache(cache, 26)
        logits(model, [7], cache)
        kv.check()
        assert largest_difference(logits(model, NEXT, fork), cold(model, TOKENS[:10])) < CLOSE


def test_a_shared_page_is_copied_where_others_are_made_again() -> None:
    model = wide()
    with attach(model, quantized_start=18) as kv:
        cache = make_prompt_cache(model)
        for tokens in (TOKENS[:20], *([token] for token in TOKENS[20:23])):
            logits(model, tokens, cache)
        fork = copy.deepcopy(cache)
        trim_prompt_cache(cache, 6)
        logits(model, [7], cache)
        kv.check()
        assert largest_difference(logits(model, NEXT, fork), cold(model, TOKENS[:23])) < CLOSE


@pytest.mark.parametrize(("start", "rewind"), [(20, 16), (0, 16), (30, 0)])
def test_no_request_holds_more_open_pages_than_it_is_admitted_with(start: int, rewind: int) -> None:
    model = wide()
    with attach(model, quantized_start=start, rewind=rewind) as kv:
        before = start + rewind - 1
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:before], cache)
        logits(model, TOKENS, cache)
        held = [len(table.live_pages()) for table in cache[0]._row.tables]
        most = Admission(kv.session, 60).footprint(before + 60).pages  # type: ignore[arg-type]
        assert all(have <= need for have, need in zip(held, most, strict=True)), (held, most)


def test_kept_tokens_are_in_open_pages_too(tmp_path: Path) -> None:
    """With max_kv_size, below quantized_start: after loading a file, and after a trim into pages that went."""
    model, file = wide(), str(tmp_path / "cache.safetensors")
    with attach(model, bits=8, quantized_start=30, max_kv_size=16) as kv:
        caches: list[Any] = [make_prompt_cache(model) for _ in range(2)]
        for length, cache in zip((28, 33), caches, strict=True):
            for token in TOKENS[:length]:
                logits(model, [token], cache)
        tinykv.save_prompt_cache(file, caches[0])
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        trim_prompt_cache(caches[1], 5)
        expected = logits(model, [7], caches[0])
        assert largest_difference(logits(model, [7], loaded), expected) < CLOSE
        assert largest_difference(logits(model, [7], caches[1]), expected) < 0.5, "rounded to 8 bits, but right"
        kv.check()


@pytest.mark.parametrize("left", [0, 12, 13, 18])
def test_a_loaded_cache_can_be_trimmed_by_any_number(left: int, tmp_path: Path) -> None:
    model, file = wide(), str(tmp_path / "cache.safetensors")
    with attach(model) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:23], cache)
        tinykv.save_prompt_cache(file, cache)
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        trim_prompt_cache(loaded, 23 - left)
        got = logits(model, NEXT, loaded)
        kv.check()
        if left % 4 == 0:
            assert largest_difference(got, cold(model, TOKENS[:left])) < CLOSE


@pytest.mark.parametrize("page_size", [4, 32])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_file_has_what_a_rewind_leads_back_into(kind: str, page_size: int, tmp_path: Path) -> None:
    """And what is behind a window of 8 tokens in the page being filled doesn't hide the rest."""
    model, file = wide(kind), str(tmp_path / "cache.safetensors")
    with attach(model, page_size=page_size, rewind=6) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:49], cache)
        tinykv.save_prompt_cache(file, cache)
        for left in (49, 46):
            loaded = tinykv.load_prompt_cache(file, kv=kv)
            if kind == "llama":  # a loaded window holds no more than itself
                trim_prompt_cache(loaded, 49 - left)
            assert largest_difference(logits(model, NEXT, loaded), cold(model, TOKENS[: loaded[0].offset - 3])) < CLOSE
        kv.check()


@pytest.mark.parametrize("start", [0, 60])
def test_a_page_that_a_file_has_filled_in_part_is_not_stored(start: int, tmp_path: Path) -> None:
    """The file has what a window of 8 tokens still needs; earlier tokens of its first page are not there."""
    model, file = wide("gemma3_text"), str(tmp_path / "cache.safetensors")
    with attach(model, page_size=8, quantized_start=start) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:20], cache)
        tinykv.save_prompt_cache(file, cache)
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        kv.prefix_cache.insert(TOKENS[:20], loaded)
        if start:
            kv.prefix_cache.insert(TOKENS[:20], cache)  # whose pages for the window are whole
        for count in (16, 18):
            found, rest = kv.prefix_cache.fetch([*TOKENS[:count], *NEXT])
            got = logits(model, rest, found)[-len(NEXT) :]
            assert largest_difference(got, cold(model, TOKENS[:count])) < CLOSE
        kv.check()


def test_a_pass_that_breaks_off_leaves_what_a_file_needs(tmp_path: Path) -> None:
    model, file = wide("gemma3_text"), str(tmp_path / "cache.safetensors")
    with attach(model, page_size=1, rewind=0) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:20], cache)
        cache[0].update_and_fetch(mx.zeros((1, 2, 1, 32)), mx.zeros((1, 2, 1, 32)))
        tinykv.save_prompt_cache(file, cache)
        loaded = tinykv.load_prompt_cache(file, kv=kv)
        assert largest_difference(logits(model, NEXT, loaded), cold(model, TOKENS[:20])) < CLOSE
        kv.check()


def test_open_tokens_of_a_file_count_where_the_cache_still_has_them(tmp_path: Path) -> None:
    """mlx-lm has changed the loaded cache before it is put into pages."""
    model, file = wide(), str(tmp_path / "cache.safetensors")
    with attach(model, page_size=8) as kv:
        cache = make_prompt_cache(model)
        logits(model, TOKENS[:23], cache)
        tinykv.save_prompt_cache(file, cache)
        trimmed, changed = tinykv.load_prompt_cache(file), tinykv.load_prompt_cache(file)
        trim_prompt_cache(trimmed, 2)
        trim_prompt_cache(changed, 2)
        logits(model, [*NEXT, *NEXT], changed)  # by mlx-lm's own attention
        for loaded in (trimmed, changed):
            adopt(loaded, kv)
        assert largest_difference(logits(model, NEXT, trimmed), cold(model, TOKENS[:21])) < CLOSE
        assert largest_difference(logits(model, NEXT, changed), cold(model, [*TOKENS[:21], *NEXT, *NEXT])) < 3
        kv.check()


@pytest.mark.parametrize("start", [0, 40])
def test_rounded_tokens_of_a_long_trim_are_not_stored(start: int) -> None:
    """Otherwise who continues them would get other answers than one who runs the prompt."""
    model = shared("llama", head_dim=32, num_hidden_layers=2)
    with tinykv.attach(model, page_size=8, bits=4, rewind=2, quantized_start=start) as kv:
        run = [*prompt(60)[:45], 3, 4]
        cold = greedy(model, [*run, 5], 8)
        cache = make_prompt_cache(model)
        logits(model, prompt(60), cache)
        trim_prompt_cache(cache, 15)
        logits(model, [3, 4], cache)
        assert kv.prefix_cache.insert(run, cache) == 40, "the pages before the one that was rounded"
        found, rest = kv.prefix_cache.fetch([*run, 5])
        assert len(rest) == 8
        assert greedy(model, rest, 8, cache=found) == cold
        # Behind a trim to before it they are as the model makes them.
        trim_prompt_cache(cache, 7)
        logits(model, run[40:], cache)
        assert kv.prefix_cache.insert(run, cache) == 47
        kv.check()
