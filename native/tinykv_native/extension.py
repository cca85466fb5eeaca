"""Loads the compiled module, and finds out whether it can serve here."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mlx.core as mx

_REBUILD = "reinstall tinykv-native to build it for this environment"


@dataclass(frozen=True)
class Extension:
    """The compiled module, or None and the reason why it can't be used."""

    module: Any
    problem: str


@functools.cache
def extension() -> Extension:
    """The compiled module of this process, loaded and tried at the first call. Never raises."""
    problem = _versions()
    if problem:
        return Extension(None, problem)
    try:
        module = importlib.import_module("._ext", __package__)
    except ImportError as error:
        return Extension(None, f"the compiled module can't be loaded ({error}); {_REBUILD}")
    try:
        problem = _try(module)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        return Extension(None, f"the compiled module doesn't work here ({_first_line(problem)}); {_REBUILD}")
    return Extension(module, "")


def _versions() -> str:
    """What is wrong before anything compiled is loaded: with another mlx the module could crash, not just fail."""
    try:
        built_for = importlib.import_module(".build_info", __package__).MLX_VERSION
    except ImportError:
        return f"the compiled module is missing; {_REBUILD}"
    try:
        running = version("mlx")
    except PackageNotFoundError:
        running = str(getattr(mx, "__version__", "unknown"))
    if running != built_for:
        return f"built for mlx {built_for}, but mlx {running} is installed; {_REBUILD}"
    return ""


def _try(module: Any) -> str:
    """Passes arrays to the module and back. With a nanobind other than mlx's it imports, and fails at every call."""
    if module.built_for != module.running_with():
        return f"built for mlx {module.built_for}, running with {module.running_with()}"
    if module.size(mx.array([1, 2, 3])) != 3:
        return "it gets another array than it was given"
    # A query of zeros weighs all values alike.
    values = mx.arange(16, dtype=mx.float32).reshape(1, 1, 2, 8)
    pages = [module.resize_pages(None, [1, 1, 2, 8], mx.float32, 1) for _ in range(2)]
    zero, two, one = (mx.array(x, dtype=mx.int32) for x in ([[0]], [2], [1]))
    with mx.stream(mx.cpu):
        written = module.write_pages(*pages, mx.array([[0, 1]], dtype=mx.int32), values, values)
        output, _ = module.attend(mx.zeros((1, 1, 1, 8)), *pages, zero, two, one, scale=1.0, written=written)
        right = mx.allclose(output, values.mean(axis=2, keepdims=True)).item()
    return "" if right else "it computes a wrong result"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no message"
