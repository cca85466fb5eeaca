"""Attention and recurrent layers."""

from __future__ import annotations

import pytest
from common import DIRECT, STATE, UNKNOWN, compare, differences, served_as_expected

from tinykv_adapters.hybrid import HybridAdapter


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "baichuan_m1", "nemotron_h", "kimi_linear", "lfm2-vl"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "hybrid")


def test_equals_mlx_lms_own() -> None:
    compare("jamba", ("single", "batch"))


def test_what_is_not_expected_is_named() -> None:
    adapter = HybridAdapter()
    assert differences("jamba", adapter, STATE, DIRECT, STATE, DIRECT) == ""
    assert differences("jamba", adapter, UNKNOWN, DIRECT, STATE, DIRECT) == (
        "jamba: expected 4 layers full read directly or recurrent, "
        "found 1 NewCache as mlx-lm made it; 2 full read directly; 1 recurrent"
    )
    assert differences("falcon_h1", adapter, STATE, DIRECT) == (
        "falcon_h1: expected 4 layers full read directly or recurrent, found 1 recurrent; 1 full read directly"
    )
