"""Models with sliding windows; plamo3: a window as wide as its masks, which the chunks of a prompt don't change."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from common import ABSORBED, DIRECT, WINDOWED, compare, differences, only_general, served_as_expected
from mlx_lm.models.cache import make_prompt_cache
from oracle import difference, feed, prompt
from tiny import registry

import tinykv_adapters.window
import tinykv_plugin as tinykv


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gemma4_text", "iquestloopcoder"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "window")


def test_what_is_not_expected_is_named() -> None:
    adapter = tinykv_adapters.window.WindowAdapter()
    assert differences("gemma3_text", adapter, WINDOWED, DIRECT, WINDOWED, DIRECT) == ""
    assert differences("gemma3_text", adapter, *[DIRECT] * 4) == ""
    assert differences("gemma3_text", adapter, WINDOWED, DIRECT, WINDOWED, ABSORBED) == (
        "gemma3_text: expected 4 layers full read directly or window read directly, found 2 window read directly; "
        "1 full read directly; 1 full gathered (the model uses values.swapaxes)"
    )


def test_equals_mlx_lms_own_with_caches_as_wide_as_its_masks() -> None:
    compare("plamo3")
    for plugins in (None, only_general()):
        with tinykv.attach(registry.shared("plamo3"), attention="gather", plugins=plugins) as kv:
            assert [line.window for line in kv.plan] == [9, None, 9, None], "what its masks say, not its caches"


def test_equals_the_model_without_caches_however_the_prompt_is_cut() -> None:
    model = registry.shared("plamo3")
    logits = model(mx.array([prompt(24)]))[0]
    expected = np.array(logits - mx.logsumexp(logits, -1, keepdims=True))
    with tinykv.attach(model, attention="gather", page_size=4):
        for size in (24, 7, 1):
            cache = make_prompt_cache(model)
            pieces = [feed(model, cache, prompt(24)[start : start + size]) for start in range(0, 24, size)]
            found = np.concatenate(pieces)
            assert max(difference(a, b) for a, b in zip(found, expected, strict=True)) < 2e-3, size
