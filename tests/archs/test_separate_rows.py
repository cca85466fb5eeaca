"""Models that can run one request at a time: in a batch each gets what it gets alone."""

from __future__ import annotations

import copy
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from common import only_general
from mlx_lm.generate import BatchGenerator, _merge_caches
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import can_trim_prompt_cache
from oracle import PROMPTS, feed, prompt, solo, staggered
from paths import PATHS, close, same
from tiny import registry

import tinykv_plugin as tinykv


def test_requests_in_a_cache_that_mlx_lm_cant_merge_are_batched() -> None:
    model = registry.shared("deepseek_v41")
    own = deepseek_v41.Model.__call__
    with tinykv.attach(model, page_size=4) as kv:
        assert all(
            line.reason.endswith("the requests of a batch are run one after the other: mlx-lm can't merge LayerCache")
            for line in kv.plan
        )
        assert deepseek_v41.Model.__call__ is not own
        PATHS["batch"]("deepseek_v41", kv)
        # mlx-lm's own generator as well.
        for tokens, found in zip(PROMPTS, staggered(BatchGenerator, model), strict=True):
            same(found, solo("deepseek_v41", tuple(tokens)))
    assert deepseek_v41.Model.__call__ is own


@pytest.mark.parametrize("name", ["gemma2", "afm7", "gpt_bigcode"])
def test_a_model_whose_batches_fail_or_cant_be_trusted_is_batched(name: str) -> None:
    with tinykv.attach(registry.shared(name), attention="gather", page_size=4, plugins=only_general()) as kv:
        assert kv.session.separate  # type: ignore[attr-defined]
        PATHS["batch"](name, kv)
        kv.check()


def test_rows_of_a_batch_are_padded_joined_taken_out_and_left_alone() -> None:
    model = registry.shared("deepseek_v41")
    first, second = prompt(9), prompt(4, 1)
    with tinykv.attach(model) as kv:
        ours = [kv.make_cache() for _ in range(3)]
        alone = copy.deepcopy(ours[:2])
        expected = [feed(model, alone[0], first), feed(model, alone[1], second)]
        batch = _merge_caches(ours[:2])
        for layer in batch:
            layer.prepare(lengths=[9, 4], right_padding=[0, 5])
        logits = [
            model(mx.array([tokens[a:b] for tokens in (first, second + [0] * 5)]), cache=batch)
            for a, b in ((0, 6), (6, 9))
        ]
        for layer in batch:
            layer.finalize()
        mx.eval(logits, [layer.state for layer in batch])
        found = mx.concatenate(logits, axis=1)
        found = found - mx.logsumexp(found, axis=-1, keepdims=True)
        close(np.array(found[0]), expected[0])
        close(np.array(found[1, :4]), expected[1])
        assert [row.offset for row in batch[0].rows] == [9, 4]
        assert ours[0][0].offset == 0, "what was merged is left alone"
        assert not batch[0].empty() and not batch[0].is_trimmable() and batch[0].nbytes > 0
        other = _merge_caches(ours[2:])
        for layer, joining in zip(batch, other, strict=True):
            layer.filter([1])
            layer.extend(joining)
        assert [row.offset for row in batch[0].rows] == [4, 0]
        taken = [layer.extract(0) for layer in batch]
        close(feed(model, taken, prompt(3, 2)), feed(model, alone[1], prompt(3, 2)))
        assert [row.offset for row in batch[0].rows] == [4, 0]


def test_a_cache_that_says_it_can_be_trimmed_and_reads_what_it_has_dropped_is_not_asked(tmp_path: Path) -> None:
    """llama4's own caches let go of chunks, and then take tokens back (R39)."""
    model = registry.shared("llama4")
    with tinykv.attach(model, attention="gather", plugins=only_general()) as kv:
        assert [line.kind for line in kv.plan] == ["dense"] * 3 + ["full"]
        cache = kv.make_cache()
        assert not can_trim_prompt_cache(cache)
        feed(model, cache, prompt(12))
        tinykv.save_prompt_cache(tmp_path / "cache.safetensors", cache)
        loaded = tinykv.load_prompt_cache(tmp_path / "cache.safetensors", kv=kv)
        assert not can_trim_prompt_cache(loaded)
        batch = _merge_caches([loaded, cache])
        assert [row.offset for row in batch[0].rows] == [12, 12]
