"""Whether mlx can run Metal kernels here, and on what."""

from __future__ import annotations

import mlx.core as mx


def problem() -> str:
    """Why Metal kernels can't run here; empty if they can."""
    if not mx.metal.is_available():
        return "mlx has no Metal here"
    if mx.default_device().type != mx.DeviceType.gpu:
        return f"mlx computes on {mx.default_device()} here"
    return ""


def name() -> str:
    """The GPU, as the system calls it."""
    info = mx.device_info(mx.gpu) if hasattr(mx, "device_info") else mx.metal.device_info()
    return str(info.get("device_name", "unknown GPU"))
