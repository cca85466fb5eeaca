"""For the tests of one adapter: the paths its models are compared on, and that they are left as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paths import PATHS
from tiny import registry

import tinykv_plugin as tinykv

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
