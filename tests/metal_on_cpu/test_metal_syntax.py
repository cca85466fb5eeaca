"""The kernels as Metal's compiler would read them: address spaces, types, C++14."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest

from metal_case import Case
from metal_device import install
from metal_faults import Replace
from msl_cpu import syntax
from msl_cpu.device import Device

pytest.importorskip("clang.cindex", reason="PyPI's libclang is missing")


class Written(Exception):
    """The text of a kernel is known: it needn't run."""


def generated(monkeypatch: pytest.MonkeyPatch, run: Any, change: Any = None) -> dict[str, str]:
    """The kernels that ``run(backend)`` makes mlx write, by name; none of them is run."""
    from msl_cpu import device as device_module
    from tinykv_metal.backend import MetalBackend

    found: dict[str, str] = {}

    class NotRun:
        def __init__(self, source: str, name: str, arguments: str, variant: str) -> None:
            found[name] = source

        def run(self, arguments: Any, *where: Any) -> Any:
            for argument in arguments:
                if argument.kind:
                    argument.data[...] = 0
            return device_module.Counts(0, 0, 0)

    monkeypatch.setattr(device_module, "Program", NotRun)
    install(Device(change=change), monkeypatch)
    run(MetalBackend())
    return found


def everything(backend: Any) -> None:
    """Every kernel, with small and with larger inputs, in all dtypes, with all features."""
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for contexts in ([20], [600] * 9):
            for dim in (64, 80, 128):
                case = Case(contexts, 2, key_dim=dim, dtype=dtype).fill(backend)
                mask = mx.zeros((2, 600), dtype)
                for options in (
                    {},
                    {"mask": mask},
                    {"mask": mask == 0},
                    {"softcap": 5.0, "sinks": mx.zeros((4,), dtype)},
                ):
                    case.attend(backend, **options)
            windowed = Case(contexts, window=8, dtype=dtype).fill(backend)
            windowed.attend(backend)
            backend.write(windowed.metadata, windowed.q[:, :2], windowed.q[:, :2])
            backend.copy_pages(windowed.pages, [0], [1])
            windowed.pages.copy_out(windowed.metadata, [[(0, 8)]] * len(contexts))


def test_no_kernel_has_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = generated(monkeypatch, everything)
    assert {name.split("_")[3] for name in sources} >= {"attend", "reduce", "write", "copy", "gather"}
    found = {name: syntax.problems(source) for name, source in sources.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def attend(backend: Any) -> None:
    Case([600], dtype=mx.bfloat16).fill(backend).attend(backend)


FAULTS = {
    "a threadgroup pointer as a device pointer": (
        Replace("attend", "all += values[s * V_DIM + dim];", "load_token<V_DIM>(values, lane, o);"),
        "no matching function",
    ),
    "a device pointer in a variable without an address space": (
        Replace("attend", "const int lane =", "const bfloat* bad = key_pages;\nconst int lane ="),
        "cannot initialize",
    ),
    "a helper's parameter without an address space": (
        Replace("attend", "load(const device T* from", "load(const T* from"),
        "cannot initialize|no known conversion",
    ),
    "a constant as device memory": (
        Replace(
            "attend", "const float scale = numbers[0];", "const device float* n = numbers;\nconst float scale = n[0];"
        ),
        "cannot initialize",
    ),
    "a write to an input that is const": (
        Replace("attend", "  float score[", "  key_pages[key] = 0;\n  float score["),
        "not assignable",
    ),
    "a type that Metal doesn't have": (
        Replace("attend", "float products = 0.0f;", "double products = 0.0f;"),
        "poisoned",
    ),
    "a statement of C++17": (Replace("attend", "if (SOFTCAP) {", "if constexpr (SOFTCAP) {"), "C\\+\\+17 extension"),
    "a function that isn't there": (Replace("attend", "simd_sum(products)", "simd_add(products)"), "simd_add"),
    "a thread pointer without its address space": (
        Replace("attend", "from, thread float* to", "from, float* to"),
        "without an address space",
    ),
    "a result without an address space": (
        Replace("attend", "METAL_FUNC device T* writable", "METAL_FUNC T* writable"),
        "without an address space",
    ),
    "a cast without an address space": (
        Replace("attend", "const device S* scales = (const device S*)", "const device S* scales = (const S*)"),
        "without an address space",
    ),
    "a variable of the program": (
        Replace("attend", "#define UNROLL", "float total = 0.0f;\n#define UNROLL"),
        "a variable of the program that is not constant",
    ),
    "a static variable": (
        Replace("attend", "const int lane =", "static int calls;\nconst int lane ="),
        "a static variable",
    ),
    "recursion": (
        Replace("attend", "  float top = -INFINITY;\n  for", "  float top = highest<COUNT>(tops);\n  for"),
        "a function that calls itself",
    ),
    "an array of a thread that can't be in registers": (
        Replace(
            "attend",
            "UNROLL for (int v = 0; v < PASS; v++) {\n  const float",
            "for (int v = 0; v < PASS; v++) {\n  const float",
        ),
        "indexed by a loop that isn't unrolled",
    ),
    "a sum of bfloats": (
        Replace("attend", "float products = 0.0f;", "bfloat products = bfloat(0.0f);"),
        "call to deleted function 'simd_sum'",
    ),
    "a word that Metal reserves": (Replace("attend", "const int lane =", "int kernel;\nconst int lane ="), "poisoned"),
    "a goto": (Replace("attend", "const int lane =", "goto on;\non:\nconst int lane ="), "poisoned"),
    "an index cut to 32 bits": (Replace("attend", "const int64_t key =", "const int key ="), "loses integer precision"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = FAULTS[fault]
    (source,) = (text for name, text in generated(monkeypatch, attend, change).items() if "attend" in name)
    assert re.search(message, "\n".join(syntax.problems(source)))
