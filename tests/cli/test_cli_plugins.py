"""``tinykv plugins``, with plugins that work, are disabled or broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin import manager

Call = Callable[..., Any]

BROKEN = EntryPoint("broken", "no_such_module_anywhere", manager.ENTRY_POINT_GROUP)


@pytest.fixture(autouse=True)
def fresh_manager() -> Iterator[None]:
    """The process's manager is loaded anew for, and after, each test."""
    manager.default_manager.cache_clear()
    yield
    manager.default_manager.cache_clear()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what entry points there are, next to the installed ones unless ``alone``."""

    def set_found(*points: EntryPoint, alone: bool = False) -> None:
        installed = () if alone else entry_points(group=manager.ENTRY_POINT_GROUP)
        monkeypatch.setattr(manager, "entry_points", lambda group: (*installed, *points))

    return set_found


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the table's rows, by the first."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {first: rest for first, *rest in cells if first}


def test_the_built_in_plugins_are_listed(tinykv: Call) -> None:
    done = tinykv("plugins")
    assert done.code == 0
    listed = rows(done.out)
    assert listed["paged"][0] == "provider paged"
    assert listed["gather"][0] == "backend gather"
    assert listed["general"][0] == "adapter general"
    assert all(row[2:] == ["tinykv-plugin", ""] for row in (listed["paged"], listed["dense"], listed["gather"]))


def test_a_broken_plugin_is_named_and_does_not_matter(
    tinykv: Call, found: Callable[..., None], tiny_model_dir: Path
) -> None:
    found(BROKEN)
    done = tinykv("plugins")
    assert done.code == 0
    assert rows(done.out)["broken"][-1] == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert tinykv("inspect", str(tiny_model_dir)).code == 0


def test_a_broken_plugin_stops_what_asked_for_it(tinykv: Call, found: Callable[..., None]) -> None:
    found(BROKEN)
    for flag, field in (("--kv-cache", "cache"), ("--kv-attention", "attention")):
        done = tinykv("generate", flag, "broken")
        assert done.code == 2
        last = done.err.splitlines()[-1]
        assert last.startswith(f"tinykv: error: {field}: the plugin 'broken' ")
        assert "No module named 'no_such_module_anywhere'" in last


def test_a_disabled_plugin_says_so(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(manager.DISABLE_VARIABLE, "dense")
    done = tinykv("plugins")
    assert done.code == 0
    assert rows(done.out)["dense"][-1] == "disabled by TINYKV_DISABLE_PLUGINS"
    assert tinykv("generate", "--kv-cache", "dense").code == 2


def test_no_plugins_at_all(tinykv: Call, found: Callable[..., None]) -> None:
    found(alone=True)
    done = tinykv("plugins")
    assert done.code == 0
    assert "no distribution offers anything" in done.out
    assert "backends: none\n" in tinykv("--version").out


def test_markup_in_a_message_is_shown_as_it_is(tinykv: Call, found: Callable[..., None]) -> None:
    found(EntryPoint("[red]odd", "[bold]x", manager.ENTRY_POINT_GROUP))
    done = tinykv("plugins")
    assert done.code == 0
    assert "[red]odd" in done.out


def test_plugins_takes_no_arguments(tinykv: Call) -> None:
    assert tinykv("plugins", "--help").code == 0
    done = tinykv("plugins", "x")
    assert done.code == 2
    assert "usage: tinykv plugins" in done.err
