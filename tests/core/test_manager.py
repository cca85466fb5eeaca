"""The plugin manager, with plugins laid out on disk as distributions would be."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toml_text import loads

from tinykv_plugin.errors import ConfigError, PluginError
from tinykv_plugin.hookspecs import PageEvicted, PoolGrown, RequestFreed, hookimpl
from tinykv_plugin.manager import ENTRY_POINT_GROUP, PluginInfo, PluginManager, default_manager

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

GATHER = """
from types import SimpleNamespace
from tinykv_plugin.hookspecs import hookimpl

def backend(name, direct=False, priority=0):
    return SimpleNamespace(
        name=name, direct=direct, priority=priority,
        **dict.fromkeys(["supports", "resize", "write", "copy_pages", "attend", "dense", "stored"], print),
    )

@hookimpl
def tinykv_attention_backends():
    return [backend("gather")]
"""

PROVIDER = """
from types import SimpleNamespace
from tinykv_plugin.hookspecs import hookimpl

@hookimpl
def tinykv_providers():
    return [SimpleNamespace(name="{name}", open=print)]
"""

ADAPTER = """
from types import SimpleNamespace
from tinykv_plugin.hookspecs import hookimpl

@hookimpl
def tinykv_model_adapters():
    return [SimpleNamespace(
        name="{name}", matches=lambda model: {matches}, attention_modules=print, choose=print,
    )]
"""


class Shelf:
    """Distributions in a folder of their own on ``sys.path``; each offers modules ``<distribution>_<entry point>``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def add(self, distribution: str, version: str = "1.0", **plugins: str) -> None:
        info = self.folder / f"{distribution}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{ENTRY_POINT_GROUP}]"]
        for name, source in plugins.items():
            module = f"{distribution}_{name}".replace("-", "_")
            (self.folder / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}")
            self.modules.append(module)
        (info / "entry_points.txt").write_text("\n".join(lines))

    @property
    def points(self) -> list[EntryPoint]:
        found: list[Distribution] = [*distributions(path=[str(self.folder)])]
        return [point for dist in found for point in dist.entry_points.select(group=ENTRY_POINT_GROUP)]

    def manager(self, *disabled: str) -> PluginManager:
        return PluginManager(self.points, disabled)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    shelf = Shelf(tmp_path)
    shelf.add("tinykv-plugin", gather=GATHER, paged=PROVIDER.format(name="paged"))
    yield shelf
    for module in shelf.modules:
        sys.modules.pop(module, None)


def problem(manager: PluginManager, name: str) -> str:
    (info,) = (info for info in manager.plugins if info.name == name and info.problem)
    return info.problem


def test_plugins_are_listed_with_what_they_offer(shelf: Shelf) -> None:
    shelf.add("acme-kv", "2.3", acme=PROVIDER.format(name="fancy") + ADAPTER.format(name="odd", matches=False))
    assert shelf.manager().plugins == (
        PluginInfo("gather", "tinykv-plugin", "1.0", ("backend gather",), ""),
        PluginInfo("paged", "tinykv-plugin", "1.0", ("provider paged",), ""),
        PluginInfo("acme", "acme-kv", "2.3", ("provider fancy", "adapter odd"), ""),
    )


def test_a_provider_is_found_by_its_own_name(shelf: Shelf) -> None:
    shelf.add("acme-kv", acme=PROVIDER.format(name="fancy"))
    manager = shelf.manager()
    assert manager.provider("fancy").name == "fancy"
    with pytest.raises(ConfigError, match=r"cache: 'nope' is not known; there are: fancy, paged$") as caught:
        manager.provider("nope")
    assert caught.value.field == "cache"


def test_third_parties_adapters_are_asked_before_ours(shelf: Shelf) -> None:
    shelf.add("acme-kv", zzz=ADAPTER.format(name="theirs", matches="model == 1"))
    shelf.add("aaa-kv", aaa=ADAPTER.format(name="also theirs", matches="model == 2"))
    (shelf.folder / "tinykv_plugin_paged.py").write_text(ADAPTER.format(name="ours", matches="model is not None"))
    manager = shelf.manager()
    assert [manager.adapter(model).name for model in (1, 2, 3)] == ["theirs", "also theirs", "ours"]
    with pytest.raises(PluginError, match=r"no model adapter serves builtins\.NoneType; is one disabled by TINYKV_"):
        manager.adapter(None)


def test_an_adapter_that_fails_is_named_and_passed_over(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.add("acme-kv", acme=ADAPTER.format(name="theirs", matches="model.no_such_thing"))
    (shelf.folder / "tinykv_plugin_paged.py").write_text(ADAPTER.format(name="ours", matches="True"))
    assert shelf.manager().adapter(1).name == "ours"
    (record,) = caplog.records
    assert record.getMessage() == (
        "the model adapter 'theirs' is passed over, as it fails: "
        "AttributeError: 'int' object has no attribute 'no_such_thing'"
    )


def test_backends_come_best_first_and_gather_last(shelf: Shelf) -> None:
    more = '[backend("slow", True, 1), backend("fast", True, 9), backend("copying", False, 99)]'
    shelf.add("acme-kv", acme=GATHER.replace('[backend("gather")]', more))
    manager = shelf.manager()

    def names(setting: str) -> list[str]:
        return [backend.name for backend in manager.backends(setting)]

    assert names("auto") == ["fast", "slow", "gather"]
    assert names("slow") == ["slow", "gather"]
    assert names("copying") == ["copying", "gather"]
    assert names("gather") == ["gather"]
    with pytest.raises(ConfigError, match=r"there are: auto, copying, fast, gather, slow$"):
        manager.backends("nope")


BROKEN = {
    "raises when imported": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "lacks a dependency": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
    "leaves when imported": ("raise SystemExit('bye')", "SystemExit: bye"),
    "implements no such hook": (
        "from tinykv_plugin.hookspecs import hookimpl\n@hookimpl\ndef tinykv_provider(): ...",
        "unknown hook 'tinykv_provider'",
    ),
    "takes what a hook does not give": (
        "from tinykv_plugin.hookspecs import hookimpl\n@hookimpl\ndef tinykv_providers(model): ...",
        "hook 'tinykv_providers'",
    ),
    "wraps a hook": (
        "from tinykv_plugin.hookspecs import hookimpl\n@hookimpl(wrapper=True)\ndef tinykv_pool_grown(event): yield",
        "TypeError: its tinykv_pool_grown is a wrapper; only plain hooks are called",
    ),
    "raises in a hook": (PROVIDER.replace("return", "raise KeyError #"), "KeyError:"),
    "offers nothing iterable": (PROVIDER.replace("return", "return None #"), "TypeError: 'NoneType' object is not"),
    "offers an incomplete object": (PROVIDER.replace(", open=print", ""), "which lacks open"),
    "offers a class": (
        PROVIDER + "class Mine:\n    name = 'x'\n    def open(self, context): ...\n"
        "@hookimpl\ndef tinykv_attention_backends(): return [Mine]",
        "offers the class Mine; an instance of it is needed",
    ),
}


@pytest.mark.parametrize(("source", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_named_and_left_out(
    source: str, why: str, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.add("acme-kv", "0.1", acme=source.replace("{name}", "acme"))
    shelf.add("good-kv", good=PROVIDER.format(name="good"))
    with caplog.at_level(logging.WARNING, "tinykv"):
        manager = shelf.manager()
    assert why in problem(manager, "acme")
    assert "\n" not in problem(manager, "acme")
    (record,) = caplog.records
    assert "'acme' of acme-kv" in record.getMessage()
    assert [info.name for info in manager.plugins if not info.problem] == ["gather", "paged", "good"]
    assert manager.provider("good").name == "good"
    # Asked for by name, it is an error instead.
    with pytest.raises(PluginError, match=r"^cache: the plugin 'acme' \(acme-kv\) is not usable: ") as caught:
        manager.provider("acme")
    assert why in str(caught.value)
    # Asked for by the name of something unknown, it is mentioned.
    with pytest.raises(ConfigError, match=r"disabled plugins: acme \("):
        manager.provider("something")


def test_a_second_plugin_of_the_same_name_does_not_displace_the_first(shelf: Shelf) -> None:
    shelf.add("acme-kv", paged=PROVIDER.format(name="other"))
    manager = shelf.manager()
    assert [(info.distribution, info.provides) for info in manager.plugins if info.name == "paged"] == [
        ("tinykv-plugin", ("provider paged",)),
        ("acme-kv", ()),
    ]
    assert problem(manager, "paged") == "another plugin is already called 'paged'"
    assert manager.provider("paged").name == "paged"


def test_plugins_are_disabled_by_name(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.add("acme-kv", acme="raise AssertionError('a disabled plugin is not even imported')")
    monkeypatch.setenv("TINYKV_DISABLE_PLUGINS", " acme,paged, ,nobody")
    manager = PluginManager(shelf.points)
    assert [(info.name, info.problem) for info in manager.plugins if info.problem] == [
        ("paged", "disabled by TINYKV_DISABLE_PLUGINS"),
        ("acme", "disabled by TINYKV_DISABLE_PLUGINS"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "TINYKV_DISABLE_PLUGINS names 'nobody', but there is no such plugin"
    ]
    with pytest.raises(PluginError, match=r"'paged' .* disabled by TINYKV_DISABLE_PLUGINS"):
        manager.provider("paged")
    with pytest.raises(PluginError, match=r"'gather' .* disabled by"):
        shelf.manager("gather").backends("auto")


def test_a_script_registers_its_own_plugin(shelf: Shelf) -> None:
    provider = SimpleNamespace(name="mine", open=print)
    plugin = SimpleNamespace(tinykv_providers=hookimpl(lambda: [provider]))
    manager = shelf.manager()
    manager.register(plugin, "script")
    assert manager.provider("mine") is provider
    assert manager.plugins[-1] == PluginInfo("script", "", "", ("provider mine",), "")
    with pytest.raises(PluginError, match="plugin 'script' is broken: another plugin is already called 'script'"):
        manager.register(SimpleNamespace(), "script")
    assert manager.provider("mine") is provider
    manager.unregister("script")
    assert [info.name for info in manager.plugins] == ["gather", "paged"]
    with pytest.raises(ConfigError):
        manager.provider("mine")
    manager.register(plugin, "script")


def test_managers_share_nothing(shelf: Shelf) -> None:
    one, other = shelf.manager(), shelf.manager("paged")
    one.register(SimpleNamespace(tinykv_providers=hookimpl(lambda: [SimpleNamespace(name="x", open=print)])), "x")
    assert [info.name for info in other.plugins] == ["gather", "paged"]


@pytest.mark.parametrize(
    ("hook", "event"),
    [
        ("tinykv_pool_grown", PoolGrown("full", 0, 8, 4096)),
        ("tinykv_page_evicted", PageEvicted("full", 3)),
        ("tinykv_request_freed", RequestFreed(tokens=200, pages=7)),
    ],
)
def test_a_notification_reaches_plugins_and_their_failure_is_only_logged(
    hook: str, event: object, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("oops")

    events: list[object] = []
    manager = shelf.manager()
    manager.register(SimpleNamespace(**{hook: hookimpl(lambda event: events.append(event))}), "listener")
    manager.emit(hook, event)
    assert events == [event]
    manager.register(SimpleNamespace(**{hook: hookimpl(fail)}), "failing")
    manager.emit(hook, event)
    assert f"the plugin 'failing' failed in {hook}" in caplog.text
    assert "oops" in caplog.text
    assert events == [event, event], "one plugin's failure keeps nothing from the others"


def test_the_default_manager_finds_what_is_installed() -> None:
    manager = default_manager()
    assert manager is default_manager()
    ours = {info.name: info for info in manager.plugins if info.distribution == "tinykv-plugin"}
    assert {name: info.problem for name, info in ours.items()} == dict.fromkeys(
        loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]["tinykv_plugin"], ""
    )
    assert manager.provider("paged").name == "paged"
    assert manager.provider("dense").name == "dense"
    assert manager.backends("auto")[-1].name == "gather"
