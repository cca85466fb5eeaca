"""Quantized pages: dequantized by the kernels as they load them, against float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from models import greedy, prompt, shared
from open_pages import CALLS, errors

import tinykv_plugin as tinykv
from metal_case import TOLERANCE, Case, error
from tinykv_plugin.kv_format import KVFormat
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.selftest.comparison import compare

# Each is compiled: every format once, and every dtype.
FORMATS = [
    (KVFormat(8, 8), mx.float32),
    (KVFormat(8, 8), mx.bfloat16),
    (KVFormat(6, 6, 32), mx.float16),
    (KVFormat(5, 5, 32), mx.bfloat16),
    (KVFormat(4, 4), mx.float32),
    (KVFormat(8, 4, 32), mx.float16),
    (KVFormat(None, 4), mx.float32),
]


@pytest.mark.parametrize(("kv_format", "dtype"), FORMATS, ids=str)
def test_every_format_and_dtype(backend: Any, kv_format: KVFormat, dtype: mx.Dtype) -> None:
    case = Case([70, 1, 33], query_heads=6, dtype=dtype, kv_format=kv_format).fill(backend)
    assert error(case.attend(backend), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (96, 32), (192, 64)])
def test_dims_and_parts(backend: Any, key_dim: int, value_dim: int) -> None:
    case = Case([530, 3], key_dim=key_dim, value_dim=value_dim, kv_format=KVFormat(8, 4, 32)).fill(backend)
    assert error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("group_size", [64, 128])
def test_larger_groups(backend: Any, group_size: int) -> None:
    case = Case([70, 33], key_dim=128, kv_format=KVFormat(8, 4, group_size)).fill(backend)
    assert error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]


def test_windows_sinks_and_drafts(backend: Any) -> None:
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    case = Case([90, 30], window=24, kv_format=KVFormat(4, 4)).fill(backend)
    assert error(case.attend(backend, sinks=sinks), case.expected(sinks=sinks)) < TOLERANCE[mx.float32]
    case = Case([75, 20], queries=4, kv_format=KVFormat(6, 6)).fill(backend)
    assert error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]


# Each is compiled; the self-test compares more of them.
@pytest.mark.parametrize("name", ["drafts", "window, kept tokens", "window below a page, drafts", "many query heads"])
def test_a_querys_own_page_is_read_from_open_pages(backend: Any, name: str) -> None:
    assert max(errors(backend, CALLS[name])) < 2e-5


@pytest.mark.checked
def test_every_access_is_inside(backend: Any) -> None:
    case = Case([20, 5], kv_format=KVFormat(5, 6, 32)).fill(backend)
    assert error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]
    assert max(errors(backend, CALLS["window below a page, drafts"])) < 2e-5


def test_the_self_test_takes_quantized_pages(backend: Any) -> None:
    kv_format = KVFormat(8, 4)
    request = AttentionRequest(
        2, 1, 32, 64, mx.bfloat16, 16, 1, "none", None, 0, False, keys=kv_format.keys(32), values=kv_format.values(64)
    )
    assert not backend.supports(request)
    from tinykv_plugin.manager import default_manager

    assert compare(backend, default_manager().gather(), request).problem == ""


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_generation(plugins: Any, kind: str) -> None:
    """Tokens written by the kernel, read by it and copied together for prefill."""
    model = shared(kind, head_dim=32, num_hidden_layers=2)
    with tinykv.attach(model, attention="gather", page_size=4, key_bits=8, value_bits=4):
        expected = greedy(model, prompt(14), 8)
    with tinykv.attach(model, attention="metal", page_size=4, key_bits=8, value_bits=4, plugins=plugins) as kv:
        assert kv.plan[0].backend == "metal"
        assert greedy(model, prompt(14), 8) == expected
        kv.check()
