"""Planted faults: each change of a shipped kernel must be noticed."""

from __future__ import annotations

from typing import Any

import pytest

from metal_device import install
from metal_faults import FAULTS
from msl_cpu import build
from msl_cpu.device import Device

pytestmark = pytest.mark.skipif(bool(build.problem()), reason=build.problem())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_metal.backend import MetalBackend

    run, change, kind, message = FAULTS[fault]
    install(Device("check", (0, 1), change), monkeypatch)
    with pytest.raises(kind, match=message or None):
        run(MetalBackend())


@pytest.mark.parametrize("run", sorted({run for run, *_ in FAULTS.values()}, key=lambda run: str(run.__name__)))
def test_the_kernels_as_they_are_have_none(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_metal.backend import MetalBackend

    install(Device("check", (0, 1)), monkeypatch)
    run(MetalBackend())
