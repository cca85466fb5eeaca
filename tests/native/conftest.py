from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def native() -> Any:
    """The compiled module; without it every test of this folder is skipped."""
    try:
        from tinykv_native.extension import extension
    except ModuleNotFoundError:
        pytest.skip("tinykv_native isn't installed: pip install ./native (needs a C++ compiler)")
    loaded = extension()
    if loaded.module is None:
        pytest.skip(f"tinykv_native can't be used: {loaded.problem}")
    return loaded.module


@pytest.fixture
def backend(native: Any) -> Any:
    from tinykv_native.backend import CpuBackend

    return CpuBackend()


@pytest.fixture(autouse=True)
def _defaults(native: Any) -> Iterator[None]:
    """Every test begins and ends with the best kernels and all processors."""
    yield
    native.choose_isa("")
    native.set_threads(0)
