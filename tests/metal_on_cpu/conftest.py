"""Each test runs on a device: Metal kernels on a CPU, and with the marker `metal` on a Mac's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tinykv_plugin as tinykv
from metal_case import TOLERANCE
from metal_device import install
from msl_cpu import build
from msl_cpu.device import Device
from tinykv_plugin import layer
from tinykv_plugin.manager import PluginManager
from tinykv_plugin.selftest import trial


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "where" in metafunc.fixturenames:
        metafunc.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.metal)], indirect=True)


@pytest.fixture
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """ "cpu" or "gpu"; the test is skipped where that can't be."""
    if request.param == "gpu":
        from tinykv_metal import device

        if device.problem():
            pytest.skip(f"Apple GPU needed: {device.problem()}")
        monkeypatch.setitem(TOLERANCE, mx.float32, 1e-4)  # its fast exp and tanh have fewer digits
    elif build.problem():
        pytest.skip(build.problem())
    return str(request.param)


@pytest.fixture(autouse=True)
def _outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Self-tests keep their outcomes in a folder of the test; only tests marked `selftest` make the automatic one."""
    monkeypatch.setenv("TINYKV_CACHE_DIR", str(tmp_path))
    if request.node.get_closest_marker("selftest") is None:
        monkeypatch.setattr(layer, "try_out", lambda *_: trial.Trial())
    trial.forget()
    yield
    trial.forget()


@pytest.fixture
def device(where: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Device | None]:
    """What stands for the GPU: every access checked if the test is marked `checked`; None on a real one."""
    if where == "gpu":
        yield None
        return
    marker = request.node.get_closest_marker("checked")
    made = Device("fast", (0, 1)) if marker is None else Device("check", (0, 1), keep_launches=True)
    install(made, monkeypatch)
    yield made


@pytest.fixture
def backend(device: Device | None) -> Any:
    from tinykv_metal.backend import MetalBackend

    return MetalBackend()


@pytest.fixture
def plugins(backend: Any, device: Any) -> PluginManager:
    """Plugins as a Mac has them, with a Metal backend that runs on the device of the test.

    In one schedule: what counts is the tokens.
    """
    if device is not None:
        device.schedules = (0,)
    manager = PluginManager(disabled=["metal", "cpu"])

    class Plugin:
        @tinykv.hookimpl
        def tinykv_attention_backends(self) -> list[Any]:
            return [backend]

    manager.register(Plugin(), "metal on a device")
    return manager
