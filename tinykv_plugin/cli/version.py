"""``tinykv --version``: what a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..blas import blas_report


def version_lines() -> Iterator[str]:
    """Yields ``name: value`` lines. Works, and says so, where mlx can't be imported."""
    yield f"tinykv-plugin: {__version__}"
    for distribution in ("mlx", "mlx-lm"):
        yield f"{distribution}: {_version(distribution)}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    yield f"platform: {platform.platform()}"
    yield f"device: {_device()}"
    yield f"backends: {_backends()}"
    report = blas_report()
    yield f"blas: {report.name} ({report.reason})"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    try:
        import mlx.core as mx
    except ImportError as error:
        return f"unknown, mlx can't be imported ({error})"
    device = mx.default_device()
    kind = "gpu" if device == mx.gpu else "cpu"
    name = mx.device_info().get("device_name", "")
    return f"{kind}, {name}" if name else kind


def _backends() -> str:
    from ..manager import default_manager

    offered = [item for info in default_manager().plugins for item in info.provides]
    names = [item.removeprefix("backend ") for item in offered if item.startswith("backend ")]
    return ", ".join(names) or "none"
