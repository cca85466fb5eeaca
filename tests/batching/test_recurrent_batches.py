"""R26: recurrent layers in batches of prompts of different lengths."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from models import largest_difference, make, prompt

import tinykv_plugin as tinykv


def log_probabilities(generator: Any, prompts: list[list[int]]) -> list[mx.array]:
    """``(tokens, vocabulary)`` of each prompt's answer."""
    uids = generator.insert(prompts)
    found: dict[int, list[mx.array]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append(response.logprobs)
    generator.close()
    return [mx.stack(found[uid]) for uid in uids]


@pytest.mark.parametrize("architecture", ["mamba", "jamba", "nemotron_h"])
def test_r26_padding_never_reaches_a_recurrent_state(architecture: str) -> None:
    model = make(architecture)
    prompts = [prompt(length, seed) for seed, length in enumerate((13, 1, 4, 9))]
    solo = [log_probabilities(BatchGenerator(model, max_tokens=6), [tokens])[0] for tokens in prompts]
    stock = log_probabilities(BatchGenerator(model, max_tokens=6), prompts)
    # What this is about: mlx-lm's right padding changes the state (if it no longer does, this line can go).
    assert max(largest_difference(*pair) for pair in zip(stock, solo, strict=True)) > 1e-2
    tinykv.attach(model, page_size=4)
    paged = log_probabilities(tinykv.PagedBatchGenerator(model, max_tokens=6), prompts)
    for row, expected in zip(paged, solo, strict=True):
        assert largest_difference(row, expected) < 1e-4
