"""The plugin: found by its entry point, says why it can't serve, never breaks the rest."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest

import tinykv_plugin as tinykv
from tinykv_native.backend import CpuBackend
from tinykv_plugin.manager import PluginManager
from tinykv_plugin.protocols import AttentionBackend, AttentionRequest


def request_of(**changes: Any) -> AttentionRequest:
    usual = AttentionRequest(
        query_heads=8, kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32, page_size=32, query_len=1,
        mask="causal", window=None, keep=0, sinks=False,
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


def test_it_is_found() -> None:
    manager = PluginManager()
    info = next(info for info in manager.plugins if info.name == "cpu")
    assert info.problem == ""
    assert info.provides == ("backend cpu",)
    first, *_, last = manager.backends("auto")
    assert isinstance(first, AttentionBackend)
    assert (first.name, first.direct, last.name) == ("cpu", True, "gather")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": mx.bfloat16, "query_len": 5000, "sinks": True},
        {"key_dim": 576, "value_dim": 512, "page_size": 1},
        {"window": 128, "mask": "none"},
        {"window": 128, "keep": 4},
        {"mask": "array"},
    ],
)
def test_what_it_serves(backend: Any, changes: Any) -> None:
    assert backend.supports(request_of(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": mx.float64}, "dtype mlx.core.float64"),
        ({"key_dim": 60}, "key dim 60 (multiples of 8 up to 1024 are supported)"),
        ({"value_dim": 4096}, "value dim 4096"),
        ({"query_heads": 7}, "7 query heads don't share 2 kv heads evenly"),
        ({"window": 128, "keep": 4, "query_len": 2}, "keep=4 with 2 query tokens per row"),
        ({"window": 128, "mask": "array"}, "an array as mask together with a window"),
    ],
)
def test_what_it_does_not_serve(backend: Any, changes: Any, reason: str) -> None:
    reasons = backend.supports(request_of(**changes))
    assert len(reasons) == 1
    assert reason in reasons[0]


def refusals(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[str]:
    """What ``supports`` says after ``change`` of a freshly imported extension module."""
    from tinykv_native import extension
    from tinykv_native.backend import CpuBackend

    extension.extension.cache_clear()
    try:
        with monkeypatch.context() as patch:
            change(patch, extension)
            return CpuBackend().supports(request_of())
    finally:
        extension.extension.cache_clear()


def replace_module(patch: pytest.MonkeyPatch, load: Any) -> None:
    """Importing the compiled module calls ``load``."""
    imported = importlib.import_module

    def replaced(name: str, package: str | None = None) -> Any:
        return load() if name == "._ext" else imported(name, package)

    patch.setattr(importlib, "import_module", replaced)


def test_another_mlx_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(patch: pytest.MonkeyPatch, extension: Any) -> None:
        patch.setattr(extension, "version", lambda name: "9.9.9")
        replace_module(patch, lambda: pytest.fail("it must not be loaded"))

    (reason,) = refusals(monkeypatch, change)
    assert reason.startswith("built for mlx ")
    assert "mlx 9.9.9 is installed" in reason


def test_a_module_that_cannot_be_loaded_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("undefined symbol: _ZN3mlx")

    (reason,) = refusals(monkeypatch, lambda patch, extension: replace_module(patch, fail))
    assert "can't be loaded (undefined symbol: _ZN3mlx)" in reason


def test_calls_that_fail_are_a_reason(monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    """With another nanobind than mlx's the module can be imported, and every call raises TypeError."""

    class Mismatched:
        built_for = native.built_for
        running_with = staticmethod(native.running_with)

        @staticmethod
        def size(array: Any) -> int:
            raise TypeError("size(): incompatible function arguments. The following argument types are supported:\n")

    (reason,) = refusals(monkeypatch, lambda patch, extension: replace_module(patch, lambda: Mismatched))
    assert "incompatible function arguments" in reason
    assert "\n" not in reason


def test_sources_that_were_never_built_are_a_reason() -> None:
    """The package without its compiled module imports, and says so."""
    sources = Path(__file__).parents[2] / "native"
    program = """
from tinykv_native.extension import extension
from tinykv_native.plugin import tinykv_attention_backends
print(tinykv_attention_backends()[0].name, extension().problem)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=sources, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("cpu the compiled module is missing; reinstall tinykv-native")


def test_a_plugin_list_does_not_load_mlx() -> None:
    program = "import sys, tinykv_native.plugin as p; p.tinykv_attention_backends(); print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_threads_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    for source in ("field", "environment"):
        backend.set_threads(2)
        if source == "environment":
            monkeypatch.setenv("TINYKV_THREADS", "3")
        fields = {"threads": 3} if source == "field" else {}
        with tinykv.attach(models.shared("llama"), **fields) as kv:
            assert kv.plan[0].backend == "cpu"
            assert backend.threads == 3
    backend.set_threads(0)
    with pytest.raises(
        tinykv.ConfigError, match=r"threads: 0 is not allowed: it must be a whole number from 1 to 1024"
    ):
        tinykv.KVCacheConfig(threads=0)
