"""Latent attention, with indexers and without."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import pytest
from common import ABSORBED, DIRECT, EXPANDED, UNKNOWN, compare, differences, served_as_expected
from tiny import latent, registry

import tinykv_plugin as tinykv
from tinykv_adapters.latent import LatentAdapter


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash_ngram", "mistral4"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "latent")


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_equals_mlx_lms_own(name: str) -> None:
    compare(name, ("single", "batch"))


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral4", "deepseek_v32", "kimi_linear"])
def test_quantized_weights_make_no_difference(name: str) -> None:
    """Nearly all models are quantized, and some have other functions then."""
    model = registry.make(name, wide=True)
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, part: registry.quantizable(part))
    assert "Quantized" in str(model)
    unchanged(model)


def test_another_language_model_in_the_same_file() -> None:
    text = latent.text(model_type="mistral4", rope_parameters=latent.SCALED_ROPE)
    unchanged(registry.make("mistral3", **text))


def unchanged(model: Any) -> None:
    """The model does what its adapter expects, and is batched."""
    with tinykv.attach(model, attention="gather") as kv:
        assert not any("expected" in line.reason for line in kv.plan), kv.plan[-1].reason
        assert not kv.session.separate  # type: ignore[attr-defined]


def test_what_an_indexer_counts_is_known_and_batched() -> None:
    with tinykv.attach(registry.shared("deepseek_v32"), attention="gather") as kv:
        assert all("keys.shape" in line.reason for line in kv.plan)
        assert not kv.session.separate  # type: ignore[attr-defined]


def test_what_is_not_expected_is_named() -> None:
    adapter = LatentAdapter()
    expected = "deepseek_v3: expected 2 layers full with one K/V head gathered (the model uses values.swapaxes)"
    assert differences("deepseek_v3", adapter, ABSORBED, ABSORBED) == ""
    assert differences("deepseek_v3", adapter, DIRECT, DIRECT) == f"{expected}, found 2 full read directly"
    assert differences("deepseek_v3", adapter, EXPANDED, ABSORBED) == (
        f"{expected}, found 1 full gathered (the model uses values.swapaxes); "
        "1 full with one K/V head gathered (the model uses values.swapaxes)"
    )
    assert differences("deepseek_v3", adapter, UNKNOWN, UNKNOWN) == f"{expected}, found 2 NewCache as mlx-lm made it"
