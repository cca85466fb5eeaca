"""afm7 and gemma3n: layers that attend to an earlier layer's K/V."""

from __future__ import annotations

import mlx.core as mx
import pytest
from common import compare, restored
from mlx_lm.models import afm7, gemma3n
from mlx_lm.models.cache import make_prompt_cache
from oracle import prompt
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.errors import CacheStateError


@pytest.mark.parametrize("name", ["afm7", "gemma3n"])
def test_equals_mlx_lms_own(name: str) -> None:
    owner = afm7.AFMModel if name == "afm7" else gemma3n.Gemma3nAttention
    with restored(owner):
        compare(name)


@pytest.mark.parametrize("name", ["afm7", "gemma3n"])
def test_all_layers_are_read_by_attention_itself(name: str) -> None:
    with tinykv.attach(registry.shared(name), attention="gather") as kv:
        assert {line.reason for line in kv.plan} == {"no backend that reads pages directly is installed or chosen"}


def test_the_newest_keys_and_values_are_there_until_something_changes() -> None:
    model = registry.shared("llama")
    with tinykv.attach(model, attention="gather", page_size=4):
        cache = make_prompt_cache(model)
        with pytest.raises(CacheStateError, match="layer 0 has written nothing in this forward pass"):
            cache[0].newest()
        mx.eval(model(mx.array([prompt(6)]), cache=cache))
        keys, values = cache[0].newest()
        assert keys.metadata is values.metadata
        for layer in cache:
            layer.trim(1)
        with pytest.raises(CacheStateError, match="layer 0 has written nothing in this forward pass"):
            cache[0].newest()
