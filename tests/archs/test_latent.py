"""Latent attention, with indexers and without."""

from __future__ import annotations

import pytest
from common import ABSORBED, DIRECT, EXPANDED, UNKNOWN, compare, differences, served_as_expected
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_adapters.latent import LatentAdapter


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "longcat_flash_ngram", "mistral4"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "latent")


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_equals_mlx_lms_own(name: str) -> None:
    compare(name, ("single", "batch"))


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
