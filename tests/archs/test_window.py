"""plamo3: a window as wide as its masks, which the chunks of a prompt don't change."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from common import compare
from mlx_lm.models.cache import make_prompt_cache
from oracle import difference, feed, prompt
from tiny import registry

import tinykv_plugin as tinykv


def test_equals_mlx_lms_own_with_caches_as_wide_as_its_masks() -> None:
    compare("plamo3")


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
