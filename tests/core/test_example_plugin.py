"""The plugin of a third party, from its entry point to generated tokens."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import tinykv_plugin as tinykv
from tinykv_plugin.manager import PluginInfo, PluginManager, default_manager

PROMPT = [(5 * i) % 97 for i in range(33)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if importlib.util.find_spec("tinykv_example") is None:
        pytest.fail("the example is not installed: python -m pip install --no-deps ./tests/example_plugin")


def tokens(model: Any, prompt: list[int], count: int, cache: list[Any] | None = None) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=cache)]


def test_its_entry_point_is_found_and_says_what_it_offers() -> None:
    (info,) = (info for info in default_manager().plugins if info.name == "example")
    offers = ("provider example", "adapter example", "backend example")
    assert info == PluginInfo("example", "tinykv-example", "1.2.3", offers, "")


def test_it_can_be_disabled() -> None:
    manager = PluginManager(disabled=["example"])
    with pytest.raises(tinykv.PluginError, match=r"'example' \(tinykv-example\) is not usable: disabled by TINYKV_"):
        manager.provider("example")


def test_automatic_choices_pass_it_by(tiny_llama: Callable[..., Any]) -> None:
    manager = default_manager()
    assert "example" not in [backend.name for backend in manager.backends("auto")]
    assert manager.adapter(tiny_llama()).name == "llama-like"


@pytest.mark.parametrize("page_size", [1, 8, 32])
def test_its_backend_is_chosen_by_the_setting_and_generates(page_size: int, tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    stock = tokens(model, PROMPT, 24)
    with tinykv.attach(model, attention="example", page_size=page_size) as kv:
        assert {(layer.attention, layer.backend) for layer in kv.plan} == {("gather", "example")}
        assert tokens(model, PROMPT, 24) == stock
        kv.check()


def test_a_backend_that_reads_pages_directly_also_owns_them(tiny_llama: Callable[..., Any]) -> None:
    from tinykv_example.backend import ExampleBackend

    class Owner(ExampleBackend):
        name = "owner"
        direct = True

    plugins = PluginManager()
    plugins.register(SimpleNamespace(tinykv_attention_backends=tinykv.hookimpl(lambda: [Owner()])), "owner")
    model = tiny_llama()
    stock = tokens(model, PROMPT, 24)
    longer = tokens(model, [*PROMPT, 1, 2], 12)
    with tinykv.attach(model, attention="owner", page_size=8, plugins=plugins) as kv:
        assert {(layer.attention, layer.backend) for layer in kv.plan} == {("direct", "owner")}
        assert tokens(model, PROMPT, 24) == stock
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT]), cache=cache))
        fork = copy.deepcopy(cache)
        trim_prompt_cache(cache, 3)
        tokens(model, [7, 7, 7, 7], 2, cache)
        assert tokens(model, [1, 2], 12, fork) == longer
        # Past the first 256 tokens its arrays have to grow.
        tokens(model, [i % 97 for i in range(300)], 2, cache)
        assert kv.stats().growths > 1
        assert tokens(model, PROMPT, 24) == stock


def test_what_its_backend_refuses_is_read_by_gather(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinykv_example.backend import ExampleBackend

    model = tiny_llama()
    with tinykv.attach(model, attention="gather", max_kv_size=16, page_size=4):
        expected = tokens(model, PROMPT, 12)
    monkeypatch.setattr(ExampleBackend, "attend", pytest.fail)
    with tinykv.attach(model, attention="example", max_kv_size=16, page_size=4):
        assert tokens(model, PROMPT, 12) == expected


def test_a_backend_that_fails_when_asked_is_named_in_the_plan(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinykv_example.backend import ExampleBackend

    def fail(self: Any, request: Any) -> list[str]:
        raise KeyError("mine")

    model = tiny_llama()
    stock = tokens(model, PROMPT, 12)
    monkeypatch.setattr(ExampleBackend, "supports", fail)
    with tinykv.attach(model, attention="example") as kv:
        assert {layer.backend for layer in kv.plan} == {"gather"}
        assert "example: it failed when asked: KeyError: 'mine'" in kv.plan[0].reason
        assert tokens(model, PROMPT, 12) == stock


def test_its_adapter_serves_its_own_model(tiny_llama: Callable[..., Any]) -> None:
    from tinykv_example.model import Model

    model = tiny_llama()
    stock = tokens(model, PROMPT, 24)
    model.__class__ = Model
    with tinykv.attach(model, page_size=8) as kv:
        assert [layer.kind for layer in kv.plan] == ["full", "full", "full", "dense"]
        assert kv.plan[-1].reason == "the example keeps its last layer dense"
        assert tokens(model, PROMPT, 24) == stock
        cache = make_prompt_cache(model)
        tokens(model, PROMPT, 2, cache)
        assert kv.stats().tokens == cache[0].offset == cache[-1].offset
        del cache


def test_its_provider_is_chosen_by_the_setting_and_counts(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    stock = tokens(model, PROMPT, 24)
    monkeypatch.setenv("TINYKV_CACHE", "example")
    with tinykv.attach(model) as kv:
        assert {layer.kind for layer in kv.plan} == {"dense"}
        cache = make_prompt_cache(model)
        assert tokens(model, PROMPT, 24, cache) == stock
        assert kv.stats().tokens == cache[0].offset > len(PROMPT)
