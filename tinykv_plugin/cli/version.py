"""``tinykv --version``: what a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .. import __version__
from ..blas import blas_report
from ..config import KVCacheConfig
from ..errors import ConfigError, TinyKVError
from ..units import format_bytes

if TYPE_CHECKING:
    from ..protocols import AttentionBackend


def version_lines() -> Iterator[str]:
    """Yields ``name: value`` lines. Works, and says so, where mlx can't be imported."""
    yield f"tinykv-plugin: {__version__}"
    for distribution in ("mlx", "mlx-lm"):
        yield f"{distribution}: {_version(distribution)}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    yield f"platform: {platform.platform()}"
    yield f"device: {_device()}"
    yield f"memory: {_memory()}"
    yield f"backends: {_backends()}"
    yield f"other plugins: {_other_plugins()}"
    yield f"settings: {_settings()}"
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


def _memory() -> str:
    try:
        from ..device import device_memory, physical_memory
    except ImportError:
        return "unknown"
    return f"{format_bytes(physical_memory())}, for a model {format_bytes(device_memory())}"


def _settings() -> str:
    """Those that the environment and tinykv.toml set."""
    try:
        config = KVCacheConfig()
    except ConfigError as error:
        return str(error)
    changed = {
        name: getattr(config, name)
        for name, field in KVCacheConfig.model_fields.items()
        if getattr(config, name) != field.default
    }
    return ", ".join(f"{name} = {value}" for name, value in changed.items()) or "the defaults"


def _other_plugins() -> str:
    """Plugins of other distributions, and why one is out of use."""
    from ..manager import OWN_DISTRIBUTION, default_manager

    found = []
    for info in default_manager().plugins:
        if info.problem:
            found.append(f"{info.name} ({info.distribution} {info.version}, out of use: {info.problem})")
        elif info.distribution != OWN_DISTRIBUTION:
            found.append(f"{info.name} ({info.distribution} {info.version})")
    return ", ".join(found) or "none"


def _backends() -> str:
    """Those that serve a common model's calls here, best first, and why the others don't."""
    from ..manager import default_manager

    manager = default_manager()
    offered = [item for info in manager.plugins for item in info.provides]
    usable, others = [], []
    for name in (item.removeprefix("backend ") for item in offered if item.startswith("backend ")):
        try:
            backend = manager.backends(name)[0]
            problem = _problem(backend)
        except (ImportError, TinyKVError) as error:
            others.append(f"{name} ({error})")
            continue
        if problem:
            others.append(f"{name} ({problem})")
        else:
            usable.append((-backend.priority, name))
    names = ", ".join(name for _, name in sorted(usable)) or "none"
    return f"{names}; not usable here: {', '.join(others)}" if others else names


def _problem(backend: AttentionBackend) -> str:
    """Why ``backend`` can't serve here; empty if it can. Raises ImportError where mlx can't be imported."""
    from ..layer import reasons_against
    from ..selftest.sample import usual_request

    try:
        page_size = KVCacheConfig().page_size
    except ConfigError:  # said in another line
        page_size = KVCacheConfig.model_fields["page_size"].default
    return "; ".join(reasons_against(backend, usual_request(page_size)))
