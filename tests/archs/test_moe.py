"""Mixtures of experts."""

from __future__ import annotations

import pytest
from common import ABSORBED, DIRECT, compare, differences, served_as_expected

from tinykv_adapters.moe import MoEAdapter


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "hunyuan", "solar_open"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "moe")


def test_equals_mlx_lms_own() -> None:
    compare("mixtral", ("single", "batch"))


def test_what_is_not_expected_is_named() -> None:
    assert differences("mixtral", MoEAdapter(), DIRECT, ABSORBED) == (
        "mixtral: expected 2 layers full read directly, "
        "found 1 full read directly; 1 full gathered (the model uses values.swapaxes)"
    )
