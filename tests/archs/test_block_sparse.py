"""phi3small: block-sparse layers by the positions of queries and keys."""

from __future__ import annotations

import pytest
from common import compare, only_general, restored
from mlx_lm.models import phi3small
from oracle import feed, prompt
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.errors import ConfigError


def test_equals_mlx_lms_own_one_token_at_a_time() -> None:
    with restored(phi3small.Attention):
        compare("phi3small")


def test_a_prompt_over_several_blocks() -> None:
    """Blocks of 32 tokens, of which a query sees its own and every second one before."""
    model = registry.shared("phi3small")
    with tinykv.attach(model, attention="gather", page_size=8) as kv:
        whole = feed(model, kv.make_cache(), prompt(80))
        steps = kv.make_cache()
        pieces = [feed(model, steps, prompt(80)[start : start + 16]) for start in range(0, 80, 16)]
        assert abs(whole - [row for piece in pieces for row in piece]).max() < 2e-3


def test_without_the_adapter_the_plan_says_that_the_masks_hide_nothing() -> None:
    with tinykv.attach(registry.shared("phi3small"), attention="gather", plugins=only_general()) as kv:
        assert all("adds a mask of booleans to its scores, which hides nothing" in line.reason for line in kv.plan)
    with tinykv.attach(registry.make("gemma2"), attention="gather", plugins=only_general()) as kv:
        assert all("expand_dims" in line.reason for line in kv.plan)
        assert not any("booleans" in line.reason for line in kv.plan), "it asks where they are false"


def test_a_size_limit_is_refused_by_name() -> None:
    model = registry.shared("phi3small")
    with (
        tinykv.attach(model) as kv,
        pytest.raises(ConfigError, match="max_kv_size: phi3small picks blocks of the whole context"),
    ):
        feed(model, kv.make_cache(max_kv_size=16), prompt(4))
