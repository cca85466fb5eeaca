"""Finds plugins through entry points, keeps broken ones out, and looks up what they offer by name."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

import pluggy

from . import hookspecs
from .errors import ConfigError, PluginError
from .protocols import AttentionBackend, CacheProvider, GatheringBackend, ModelAdapter

ENTRY_POINT_GROUP = "tinykv_plugin"
DISABLE_VARIABLE = "TINYKV_DISABLE_PLUGINS"
OWN_DISTRIBUTION = "tinykv-plugin"

log = logging.getLogger("tinykv")


class _Named(Protocol):
    name: str


_T = TypeVar("_T", bound=_Named)


@dataclass(frozen=True)
class PluginInfo:
    """One entry point. ``problem`` is empty for a working plugin, else why it is disabled."""

    name: str
    distribution: str
    version: str
    provides: tuple[str, ...]
    problem: str


class PluginManager:
    """The plugins of one process, loaded when this is made. Several may exist; they share nothing."""

    def __init__(self, points: Iterable[EntryPoint] | None = None, disabled: Iterable[str] | None = None) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._infos: list[PluginInfo] = []
        self._failed: set[tuple[str, str]] = set()  # plugins and hooks, so that each is reported once
        self.hook: Any = self._manager.hook
        if points is None:
            points = entry_points(group=ENTRY_POINT_GROUP)
        if disabled is None:
            disabled = os.environ.get(DISABLE_VARIABLE, "").split(",")
        blocked = {name.strip() for name in disabled if name.strip()}
        # Hooks are called in reverse order of registration, so ours come first here and are asked last.
        for point in sorted(points, key=lambda point: (_distribution(point) != OWN_DISTRIBUTION, point.name)):
            problem = f"disabled by {DISABLE_VARIABLE}" if point.name in blocked else self._load(point)
            self._note(point, problem)
        for name in blocked - {info.name for info in self._infos}:
            log.warning("%s names %r, but there is no such plugin", DISABLE_VARIABLE, name)

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin object of this process (a script's own). Raises PluginError if its hooks don't fit."""
        problem = self._register(plugin, name)
        if problem:
            raise PluginError(f"plugin {name!r} is broken: {problem}")
        self._infos.append(PluginInfo(name, "", "", self._offers(plugin), ""))

    def unregister(self, name: str) -> None:
        """Remove a plugin added with :meth:`register`."""
        self._manager.unregister(name=name)
        self._infos = [info for info in self._infos if info.name != name or info.problem]

    @property
    def plugins(self) -> Sequence[PluginInfo]:
        """Every entry point found, working or not, in order of registration."""
        return tuple(self._infos)

    def provider(self, name: str) -> CacheProvider:
        """The provider called ``name``. Raises ConfigError for an unknown, PluginError for a broken one."""
        found: list[CacheProvider] = self._collect("tinykv_providers")
        return self._named("cache", name, found)

    def backends(self, name: str) -> list[AttentionBackend]:
        """The candidates for setting ``attention=name``, best first; gather, which serves everything, is last."""
        found: list[AttentionBackend] = self._collect("tinykv_attention_backends")
        fallback = self.gather()
        if name == "auto":
            ranked = sorted(found, key=lambda backend: -backend.priority)
            return [backend for backend in ranked if backend.direct] + [fallback]
        chosen = self._named("attention", name, found)
        return [fallback] if name == fallback.name else [chosen, fallback]

    def gather(self) -> GatheringBackend:
        """The backend of last resort. Raises ConfigError or PluginError if it is disabled."""
        found = [item for item in self._collect("tinykv_attention_backends") if isinstance(item, GatheringBackend)]
        return self._named("attention", "gather", found)

    def adapter(self, model: object) -> ModelAdapter:
        """The first adapter that serves ``model``. Raises PluginError if there is none.

        An adapter that fails at being asked is reported and passed over.
        """
        adapters: list[ModelAdapter] = self._collect("tinykv_model_adapters")
        for adapter in adapters:
            try:
                if adapter.matches(model):
                    return adapter
            except Exception as error:
                log.warning("the model adapter %r is passed over, as it fails: %s", adapter.name, _problem(error))
        raise PluginError(
            f"no model adapter serves {type(model).__module__}.{type(model).__name__}; "
            f"is one disabled by {DISABLE_VARIABLE}? (tinykv plugins lists them)"
        )

    def emit(self, hook: str, event: object) -> None:
        """Call a notification hook of every plugin; what one raises is logged, the first time, and stops no other."""
        for implementation in reversed(getattr(self.hook, hook).get_hookimpls()):
            try:
                implementation.function(*[event for _ in implementation.argnames])
            except Exception:
                name = implementation.plugin_name
                level = logging.DEBUG if (name, hook) in self._failed else logging.ERROR
                self._failed.add((name, hook))
                log.log(level, "the plugin %r failed in %s", name, hook, exc_info=True)

    def _collect(self, hook: str) -> list[Any]:
        return [item for offered in getattr(self.hook, hook)() for item in offered]

    def _named(self, field: str, name: str, found: Sequence[_T]) -> _T:
        for item in found:
            if item.name == name:
                return item
        for info in self._infos:
            if info.name == name and info.problem:
                raise PluginError(f"{field}: the plugin {name!r} ({info.distribution}) is not usable: {info.problem}")
        names = sorted({item.name for item in found} | ({"auto"} if field == "attention" else set()))
        broken = [f"{info.name} ({info.problem})" for info in self._infos if info.problem]
        hint = f"; disabled plugins: {', '.join(broken)}" if broken else ""
        raise ConfigError(field, f"{name!r} is not known; there are: {', '.join(names)}{hint}")

    def _load(self, point: EntryPoint) -> str:
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:
            problem = _problem(error)
            log.warning("plugin %r of %s can't be loaded: %s", point.name, _distribution(point), problem)
            return problem
        problem = self._register(plugin, point.name)
        if problem:
            log.warning("plugin %r of %s is ignored: %s", point.name, _distribution(point), problem)
        return problem

    def _register(self, plugin: object, name: str) -> str:
        if self._manager.has_plugin(name):
            return f"another plugin is already called {name!r}"
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
            for caller in self._manager.get_hookcallers(plugin) or ():
                if any(each.plugin is plugin and (each.wrapper or each.hookwrapper) for each in caller.get_hookimpls()):
                    raise TypeError(f"its {caller.name} is a wrapper; only plain hooks are called")
            self._offers(plugin)
        except Exception as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            return _problem(error)
        return ""

    def _offers(self, plugin: object) -> tuple[str, ...]:
        """What ``plugin`` provides, as "kind name"; also the first try of its registration hooks."""
        offered = []
        for hook, kind, interface in (
            ("tinykv_providers", "provider", CacheProvider),
            ("tinykv_model_adapters", "adapter", ModelAdapter),
            ("tinykv_attention_backends", "backend", AttentionBackend),
        ):
            for implementation in getattr(self.hook, hook).get_hookimpls():
                if implementation.plugin is not plugin:
                    continue
                for item in implementation.function():
                    if isinstance(item, type):
                        raise TypeError(f"{hook} offers the class {item.__name__}; an instance of it is needed")
                    if not isinstance(item, interface):
                        missing = [name for name in _members(interface) if getattr(item, name, None) is None]
                        raise TypeError(f"{hook} offers {item!r}, which lacks {', '.join(missing)}")
                    offered.append(f"{kind} {item.name}")
        return tuple(offered)

    def _note(self, point: EntryPoint, problem: str) -> None:
        self._infos.append(
            PluginInfo(
                name=point.name,
                distribution=_distribution(point),
                version=point.dist.version if point.dist is not None else "",
                provides=() if problem else self._offers(self._manager.get_plugin(point.name)),
                problem=problem,
            )
        )


def _members(interface: type) -> list[str]:
    return sorted(name for name in {*vars(interface), *interface.__annotations__} if not name.startswith("_"))


def _problem(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


@functools.cache
def default_manager() -> PluginManager:
    """The manager that ``attach`` uses, loaded at its first use."""
    return PluginManager()
