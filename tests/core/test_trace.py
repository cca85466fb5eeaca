"""The dry trace: what is paged, how it is read and why, on one model of each kind; and that it generates as stock."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache
from models import greedy, largest_difference, logits, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.errors import HandleTouchedError
from tinykv_plugin.metadata import PagedKV, PagedMask

FULL = ("full", "gather", None)
WINDOW = ("window", "gather", 8)
CHUNKED = ("chunked", "gather", 8)
DENSE = ("dense", "dense", None)
NOT_DIRECT = "no backend that reads pages directly is installed or chosen"
RECURRENT = "recurrent state, which doesn't grow with the context"

PLANS: dict[str, tuple[list[tuple[str, str, int | None]], list[str]]] = {
    "llama": ([FULL] * 4, [NOT_DIRECT] * 4),
    "qwen2": ([FULL] * 4, [NOT_DIRECT] * 4),
    "gemma3_text": ([WINDOW, FULL] * 2, [NOT_DIRECT] * 4),
    "gpt_oss": ([WINDOW, FULL] * 2, [NOT_DIRECT] * 4),
    "cohere2": ([WINDOW, FULL] * 2, [NOT_DIRECT] * 4),
    "gemma2": ([FULL] * 4, [NOT_DIRECT] * 4),
    "deepseek_v3": ([FULL] * 4, ["the model uses values.swapaxes"] * 4),
    "phi": ([FULL] * 2, [NOT_DIRECT] * 2),
    "qwen3_next": ([DENSE, FULL] * 2, [RECURRENT, NOT_DIRECT] * 2),
    "falcon_h1": ([FULL] * 2, [f"{NOT_DIRECT}; also dense"] * 2),
    "llama4": ([CHUNKED] * 3 + [FULL], [NOT_DIRECT] * 4),
    "mamba": ([DENSE] * 2, [RECURRENT] * 2),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_plan_and_what_is_generated_with_it(kind: str) -> None:
    model = shared(kind)
    prompts = [prompt(29), prompt(5, seed=1)]
    whole = [greedy(model, tokens, 14) for tokens in prompts]
    pieces = greedy(model, prompts[0], 14, prefill_step_size=5)
    checked = logits(model, prompt(20), make_prompt_cache(model))
    with tinykv.attach(model, page_size=4, attention="gather") as kv:
        lines, reasons = PLANS[kind]
        assert [(line.kind, line.attention, line.window) for line in kv.plan] == lines
        for line, reason in zip(kv.plan, reasons, strict=True):
            assert line.reason.startswith(reason)
            assert "\n" not in line.reason
        assert [line.layer for line in kv.plan] == list(range(len(lines)))
        assert [greedy(model, tokens, 14) for tokens in prompts] == whole
        assert greedy(model, prompts[0], 14, prefill_step_size=5) == pieces
        assert largest_difference(logits(model, prompt(20), make_prompt_cache(model)), checked) < 1e-4
        kv.check()
        assert kv.stats().pages_used == 0
        assert (kv.stats().growths > 0) == any(line.kind != "dense" for line in kv.plan)
    assert greedy(model, prompts[0], 14) == whole[0], "detached: as before"


def test_nothing_is_evaluated_and_no_page_taken_for_the_plan() -> None:
    model = shared("llama")
    with tinykv.attach(model, memory="10GiB") as kv:
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        assert len(kv.plan) == 4
        assert mx.get_peak_memory() - before < 100_000
        assert kv.stats().bytes_reserved == 0


def test_parts_of_a_list_of_caches_keep_their_places() -> None:
    model = shared("falcon_h1")
    with tinykv.attach(model, page_size=4) as kv:
        for entry in make_prompt_cache(model):
            assert type(entry) is CacheList
            assert [type(part) for part in entry.caches] == [ArraysCache, PagedKVCache]
        kv.check()


class Module:
    """A module of a third party: a llama with another Model class, and an attention function of its own to patch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = ModuleType("third_party_model")
        self.module.scaled_dot_product_attention = base.scaled_dot_product_attention  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, self.module.__name__, self.module)

    def model(self, call: Any) -> Any:
        """A llama whose class is in this module and has ``call`` as its ``__call__``."""
        kind = type("Model", (llama.Model,), {"__call__": call, "__module__": self.module.__name__})
        model = make("llama")
        model.__class__ = kind
        return model


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Module:
    return Module(monkeypatch)


def test_a_model_that_fails_with_our_caches_is_kept_dense_and_the_plan_says_why(third_party: Module) -> None:
    def call(self: Any, inputs: mx.array, cache: Any = None) -> Any:
        if cache is not None:
            assert all(type(one) is KVCache for one in cache), "I want my own caches,\nand nothing else"
        return llama.Model.__call__(self, inputs, cache)

    model = third_party.model(call)
    expected = greedy(model, prompt(20), 10)
    with tinykv.attach(model, attention="gather") as kv:
        for line in kv.plan:
            assert (line.kind, line.attention, line.backend) == ("dense", "dense", "mlx-lm")
            assert line.reason == (
                "the model can't run on paged caches: "
                "the model fails with handles (AssertionError: I want my own caches,); "
                "the requests of a batch are run one after the other"
            )
        assert [type(one) for one in make_prompt_cache(model)] == [KVCache] * 4
        assert greedy(model, prompt(20), 10) == expected
        assert kv.stats().pages_used == kv.stats().bytes_reserved == 0


def test_a_cache_the_model_never_writes_is_kept_dense(third_party: Module) -> None:
    def call(self: Any, inputs: mx.array, cache: Any = None) -> Any:
        return llama.Model.__call__(self, inputs, cache[:4] if cache else None)

    model = third_party.model(call)
    type(model).make_cache = lambda self: [KVCache() for _ in range(5)]
    expected = greedy(model, prompt(20), 10)
    with tinykv.attach(model, page_size=4) as kv:
        assert [line.kind for line in kv.plan] == ["full"] * 4 + ["dense"]
        assert kv.plan[4].reason == "the model never writes this cache"
        assert greedy(model, prompt(20), 10) == expected


USES = {
    "values.reshape": lambda keys, values: (keys, values.reshape(values.shape)),
    "keys.shape": lambda keys, values: (keys, values) if keys.shape else None,
    "keys[...]": lambda keys, values: (keys[..., :, :], values),
    "keys in arithmetic": lambda keys, values: (keys * 1.0, values),
    "values in len()": lambda keys, values: (keys, values) if len(values) else None,
    "keys as a truth value": lambda keys, values: (keys, values) if keys else None,
    "keys in an unpacking": lambda keys, values: (mx.stack([*keys]), values),
}


@pytest.mark.parametrize("use", USES)
def test_a_model_that_touches_keys_or_values_gets_them_gathered(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared("llama")
    attention = llama.Attention.__call__

    class Touching:
        def __init__(self, cache: Any) -> None:
            self.cache = cache
            self.offset = cache.offset

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
            return USES[use](*self.cache.update_and_fetch(keys, values))

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        # bool() of an array with several elements is an error of its own: only handles are asked.
        touch = cache is not None and (use != "keys as a truth value" or type(cache).__name__ == "TraceCache")
        return attention(self, x, mask, Touching(cache) if touch and not getattr(cache, "quiet", False) else cache)

    expected = greedy(model, prompt(20), 10)
    monkeypatch.setattr(llama.Attention, "__call__", call)
    with tinykv.attach(model, page_size=4) as kv:
        if use == "keys as a truth value":
            # Arrays can't be asked either, so the trace goes on to fail, and the model is left alone.
            assert {line.kind for line in kv.plan} == {"dense"}
            monkeypatch.undo()
        else:
            assert all(line.reason.startswith(f"the model uses {use}; llama: expected") for line in kv.plan)
            assert {(line.kind, line.attention) for line in kv.plan} == {("full", "gather")}
        assert greedy(model, prompt(20), 10) == expected
        kv.check()


@pytest.mark.parametrize(
    "use", [lambda mask: mask.dtype, lambda mask: mask[None], lambda mask: mask & mx.array(True), lambda mask: ~mask]
)
def test_a_model_that_touches_the_mask_gets_an_array(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models import gemma3_text

    model = shared("gemma3_text")
    expected = greedy(model, prompt(20), 10, prefill_step_size=5)
    block = gemma3_text.TransformerBlock.__call__

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if mask is not None and not isinstance(mask, str):
            use(mask)
        return block(self, x, mask, cache)

    monkeypatch.setattr(gemma3_text.TransformerBlock, "__call__", call)
    with tinykv.attach(model, page_size=4, attention="gather") as kv:
        assert [line.kind for line in kv.plan] == ["window", "full"] * 2
        assert [line.reason.startswith("the model uses mask") for line in kv.plan] == [True, False] * 2
        assert greedy(model, prompt(20), 10, prefill_step_size=5) == expected
        kv.check()


def test_a_handle_says_which_layer_was_touched_and_how() -> None:
    model = shared("llama")
    with tinykv.attach(model) as kv:
        cache = make_prompt_cache(model)
        k = mx.zeros((1, 2, 3, 16))
        keys, values = [layer.update_and_fetch(k, k) for layer in cache][-1]
        for use in (lambda: keys.shape, lambda: keys + 1, lambda: 1 - keys, lambda: -keys, lambda: keys @ k):
            with pytest.raises(HandleTouchedError, match="layer 3: the model uses keys"):
                use()
        assert not hasattr(keys, "__array__")
        assert type(values) is PagedKV
        # Keys of one layer with values of another are no attention anybody meant.
        other, _ = make_prompt_cache(model)[0].update_and_fetch(k, k)
        with pytest.raises(HandleTouchedError, match="different origin"):
            llama.scaled_dot_product_attention(k, other, values, cache=None, scale=1.0, mask=None)
        assert repr(PagedMask(3)) == "<PagedMask window=3>"
        kv.check()
