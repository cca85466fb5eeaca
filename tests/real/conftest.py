"""How much the tests on a real model do: all of it in `tox run -e real`, else less, and little without a fast BLAS."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from tinykv_plugin.blas import load_blas

PAGE_SIZES = (1, 16, 32, 128)


@dataclass(frozen=True)
class Extent:
    """Prompts, greedy tokens of each, tokens of the long prompt, its prefill step, and page sizes."""

    prompts: int
    tokens: int
    long: int
    step: int
    page_sizes: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts of {self.tokens} tokens and a long one of {self.long}, "
            f"page sizes {', '.join(map(str, self.page_sizes))}"
        )


WHOLE = Extent(prompts=6, tokens=64, long=2000, step=512, page_sizes=PAGE_SIZES)
USUAL = Extent(prompts=6, tokens=32, long=2000, step=512, page_sizes=(1, 32))
PART = Extent(prompts=2, tokens=24, long=120, step=50, page_sizes=(1, 32))
EXTENT = WHOLE if os.environ.get("TINYKV_REAL_MODEL") == "whole" else USUAL
if load_blas().path is None:
    EXTENT = PART


@pytest.fixture(scope="session")
def extent() -> Extent:
    return EXTENT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page_size" in metafunc.fixturenames:
        metafunc.parametrize("page_size", EXTENT.page_sizes)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if EXTENT is PART:
        terminalreporter.write_line(f"real model, shortened as no fast BLAS was found ({EXTENT}; else {WHOLE})")
