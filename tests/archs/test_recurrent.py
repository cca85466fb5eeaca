"""Recurrent models: nothing to page, and the plan says so."""

from __future__ import annotations

import pytest
from common import DIRECT, STATE, compare, differences, served_as_expected
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_adapters.recurrent import RecurrentAdapter


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv7"])
def test_models_are_served_as_expected(name: str) -> None:
    served_as_expected(name, "recurrent")


def test_equals_mlx_lms_own() -> None:
    compare("mamba2", ("single", "batch"))


def test_the_plan_says_that_there_is_nothing_to_page() -> None:
    with tinykv.attach(registry.shared("rwkv7")) as kv:
        assert {line.reason for line in kv.plan} == {"recurrent state, which doesn't grow with the context"}
        assert kv.stats().bytes_reserved == 0


def test_what_is_not_expected_is_named() -> None:
    assert differences("mamba", RecurrentAdapter(), STATE, DIRECT) == (
        "mamba: expected 2 layers recurrent, found 1 recurrent; 1 full read directly"
    )
