"""For the tests of one adapter: the paths its models are compared on, and that they are left as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from paths import PATHS
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.manager import ENTRY_POINT_GROUP, PluginManager, default_manager
from tinykv_plugin.protocols import SeenLayer, VerifyingAdapter

# Short, and what an adapter is most likely to break; tests/archs/test_architectures.py has them all.
SHORT = ("single", "chunks", "batch", "trim")


def compare(name: str, paths: Sequence[str] = SHORT, **fields: Any) -> None:
    """Paged caches on ``paths`` against mlx-lm's own."""
    with tinykv.attach(registry.shared(name), **{"attention": "gather", "page_size": 4, **fields}) as kv:
        for path in paths:
            PATHS[path](name, kv)
            kv.check()


@contextmanager
def restored(owner: Any, name: str = "__call__") -> Iterator[None]:
    """``owner.name`` is something else in the block, and the same again after it."""
    before = vars(owner)[name]
    yield
    assert vars(owner)[name] is before


def only_general() -> PluginManager:
    """Plugins as they would be without the adapters of mlx-lm's families."""
    wanted = ("paged", "dense", "gather", "general")
    return PluginManager(
        [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name in wanted], disabled=()
    )


def served_as_expected(name: str, adapter: str) -> None:
    """The model file's adapter is ``adapter``, and finds what it expects."""
    with tinykv.attach(registry.make(name), attention="gather") as kv:
        assert default_manager().adapter(kv.model).name == adapter
        assert not any("expected" in line.reason for line in kv.plan), kv.plan[0].reason


def differences(name: str, adapter: VerifyingAdapter, *seen: tuple[str, str, str, int | None]) -> str:
    """What ``adapter`` says of a model of two layers with such caches; each is the fields of a SeenLayer."""
    return adapter.verify(registry.shared(name), [SeenLayer(*layer) for layer in seen])  # type: ignore[arg-type]


DIRECT = ("KVCache", "full", "", 2)
WINDOWED = ("RotatingKVCache", "window", "", 2)
STATE = ("ArraysCache", "dense", "", None)
ABSORBED = ("KVCache", "full", "the model uses values.swapaxes", 1)
EXPANDED = ("KVCache", "full", "the model uses values.swapaxes", 4)
UNKNOWN = ("NewCache", "dense", "", None)
UNWRITTEN = ("KVCache", "full", "", None)
