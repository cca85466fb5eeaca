"""Every hook is specified, documented and tested: checked mechanically, so that a new one can't be forgotten."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path

import pytest

from tinykv_plugin import hookspecs, protocols

ROOT = Path(__file__).parents[2]
HOOKS = {
    name: item
    for name, item in vars(hookspecs).items()
    if inspect.isfunction(item) and hasattr(item, f"{hookspecs.PROJECT}_spec")
}
EVENTS = [item for item in vars(hookspecs).values() if dataclasses.is_dataclass(item)]


def test_there_are_hooks() -> None:
    assert {"tinykv_providers", "tinykv_model_adapters", "tinykv_attention_backends"} < set(HOOKS)


def test_functions_without_the_marker_are_private() -> None:
    public = {
        name
        for name, item in vars(hookspecs).items()
        if inspect.isfunction(item) and item.__module__ == hookspecs.__name__ and not name.startswith("_")
    }
    assert public == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_its_name_has_the_prefix(name: str) -> None:
    assert name.startswith("tinykv_")


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_it_has_a_docstring(hook: object) -> None:
    assert inspect.getdoc(hook)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_it_has_type_hints(hook: typing.Any) -> None:
    hints = typing.get_type_hints(hook, {**vars(hookspecs), **vars(protocols)})
    assert set(hints) == {*inspect.signature(hook).parameters, "return"}
    assert typing.Any not in hints.values()


@pytest.mark.parametrize("name", HOOKS)
def test_it_is_documented(name: str) -> None:
    assert name in (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HOOKS)
def test_it_is_tested(name: str) -> None:
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert any(name in path.read_text(encoding="utf-8") for path in tests)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_is_frozen_described_and_sent_by_a_hook(event: type) -> None:
    assert event.__doc__
    assert event.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert any(event.__name__ in str(inspect.signature(hook)) for hook in HOOKS.values())
