"""Puts a device of the harness in place of the GPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

from msl_cpu.device import Device


def install(made: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels made from now on run on ``made``."""
    from tinykv_metal import device as metal_device

    monkeypatch.setattr(mx.fast, "metal_kernel", made.metal_kernel)
    monkeypatch.setattr(metal_device, "problem", lambda: "")
    monkeypatch.setattr(metal_device, "name", lambda: "a CPU that runs Metal kernels")
