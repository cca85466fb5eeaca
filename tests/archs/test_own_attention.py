"""gemma2, olmo, plamo, plamo2: attention of the model's own, replaced; phi and stablelm: other dtypes at attention."""

from __future__ import annotations

import mlx.core as mx
import pytest
from common import compare, restored
from mlx_lm.models.cache import make_prompt_cache
from oracle import difference, feed, prompt, stock_caches
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.errors import HandleTouchedError
from tinykv_plugin.layer import PagedLayer, attend_handles
from tinykv_plugin.metadata import PagedKV
from tinykv_plugin.protocols import AttentionRequest

NOT_DIRECT = "no backend that reads pages directly is installed or chosen"


@pytest.mark.parametrize("name", ["gemma2", "olmo", "plamo", "plamo2"])
def test_equals_mlx_lms_own(name: str) -> None:
    module = registry.module_of(name)
    with restored(module.TransformerBlock, "attend") if name == "olmo" else restored(module.Attention):
        compare(name, ("single", "chunks", "batch"))


@pytest.mark.parametrize("name", ["gemma2", "olmo", "plamo", "plamo2", "phi", "phixtral", "stablelm"])
def test_keys_and_values_are_left_to_attention(name: str) -> None:
    with tinykv.attach(registry.shared(name), attention="gather") as kv:
        assert all(line.reason == NOT_DIRECT for line in kv.plan if line.kind == "full")


@pytest.mark.parametrize("name", ["phi", "stablelm"])
def test_half_precision_is_attended_to_in_the_dtype_of_the_queries(name: str) -> None:
    model = registry.make(name)
    model.set_dtype(mx.float16)
    expected = feed(model, stock_caches(model), prompt(9), prompt(3, 1))
    with tinykv.attach(model, attention="gather", page_size=4):
        cache = make_prompt_cache(model)
        found = feed(model, cache, prompt(9), prompt(3, 1))
        assert {layer._layer.spec.dtype for layer in cache} == {mx.float16}
    assert max(difference(a, b) for a, b in zip(found, expected, strict=True)) < 0.05


def test_a_cast_to_another_dtype_than_the_queries_is_refused() -> None:
    class Shared:
        index, spec = 3, type("spec", (), {"dtype": mx.float16, "value_dtype": mx.float16})

    pages = object()
    keys, values = (PagedKV(Shared(), pages, side) for side in ("keys", "values"))  # type: ignore[arg-type]
    assert keys.astype(mx.float32).dtype == mx.float32
    assert keys.dtype == mx.float16
    with pytest.raises(HandleTouchedError, match="another dtype than the queries'"):
        attend_handles(mx.zeros((1, 1, 1, 8)), keys.astype(mx.bfloat16), values)


def test_a_backend_is_asked_for_capped_scores_only_if_it_says_that_it_knows_them() -> None:
    class Plain:
        name, direct, priority = "plain", True, 1

        def supports(self, request: AttentionRequest) -> list[str]:
            return []

    layer = PagedLayer.__new__(PagedLayer)
    fallback, capped = Plain(), Plain()
    fallback.name, fallback.features = "fallback", {"softcap", "chunk"}  # type: ignore[attr-defined]
    capped.features = {"softcap"}  # type: ignore[attr-defined]
    request = AttentionRequest(4, 2, 16, 16, mx.float32, 16, 1, "causal", None, 0, False, softcap=50.0)
    layer.backends = [Plain(), fallback]  # type: ignore[list-item]
    reader = layer.choose_reader(request)
    assert (reader.backend, reader.refusals) == (fallback, ("plain: softcap is not supported",))
    layer.backends = [capped, fallback]  # type: ignore[list-item]
    reader = layer.choose_reader(request)
    assert (reader.backend, reader.refusals) == (capped, ())
