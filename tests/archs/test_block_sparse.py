"""phi3small: block-sparse layers by the positions of queries and keys."""

from __future__ import annotations

import pytest
from common import compare, restored
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


def test_a_size_limit_is_refused_by_name() -> None:
    model = registry.shared("phi3small")
    with (
        tinykv.attach(model) as kv,
        pytest.raises(ConfigError, match="max_kv_size: phi3small picks blocks of the whole context"),
    ):
        feed(model, kv.make_cache(max_kv_size=16), prompt(4))
