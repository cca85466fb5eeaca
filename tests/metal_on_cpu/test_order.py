"""Dispatches that touch a pool are ordered by tokens, as nothing else orders them on a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from metal_case import Case
from msl_cpu.order import OrderError
from test_pages import new_tokens

from tinykv_plugin.gather import GatherBackend


@pytest.fixture
def case(backend: Any, where: str) -> Case:
    if where == "gpu":
        pytest.skip("the order is checked where kernels run on a CPU")
    case = Case([600, 20]).fill(backend)
    backend.write(case.metadata, *new_tokens(case, 1))
    return case


def steps(case: Case, backend: Any) -> None:
    """Everything that happens to pages, in all orders."""
    gather = GatherBackend()
    for _ in range(2):
        backend.write(case.metadata, *new_tokens(case, 1))
        case.attend(backend)
        case.attend(backend)
        case.attend(gather)
        backend.copy_pages(case.pages, [0, 1], [1, 2])
        case.attend(gather)
        case.attend(backend)
        backend.write(case.metadata, *new_tokens(case, 1))
        backend.write(case.metadata, *new_tokens(case, 1))


def test_all_kernels_wait_for_each_other(case: Case, backend: Any) -> None:
    steps(case, backend)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reads without the writer's token", "tinykv_attend reads 'key_pages', which tinykv_write wrote"),
        ("writes without the reader's token", "tinykv_write writes 'key_pages', which tinykv_attend read"),
        ("writes without the last writer's token", "tinykv_write writes 'key_pages', which tinykv_write wrote"),
        ("forgets a read before another one", "tinykv_write writes 'key_pages', which tinykv_attend read"),
        ("gathers without the writer's token", "tinykv_gather reads 'key_pages', which tinykv_write wrote"),
        ("copies without the reader's token", "tinykv_copy writes 'key_pages', which tinykv_attend read"),
        ("forgets a gather", "tinykv_write writes 'key_pages', which tinykv_gather read"),
    ],
)
def test_planted_faults_of_order(case: Case, backend: Any, fault: str, message: str) -> None:
    pages = case.pages
    stale = pages.written
    with pytest.raises(OrderError, match=message):
        if fault == "reads without the writer's token":
            pages.written = None
            case.attend(backend)
        elif fault == "writes without the reader's token":
            case.attend(backend)
            pages.last_read = None
            backend.write(case.metadata, *new_tokens(case, 1))
        elif fault == "writes without the last writer's token":
            backend.write(case.metadata, *new_tokens(case, 1))
            pages.written = stale
            backend.write(case.metadata, *new_tokens(case, 1))
        elif fault == "forgets a read before another one":
            case.attend(backend)
            pages.last_read = None
            case.attend(backend)
            backend.write(case.metadata, *new_tokens(case, 1))
        elif fault == "gathers without the writer's token":
            pages.written = mx.zeros((1,), mx.int32)
            case.attend(GatherBackend())
        elif fault == "copies without the reader's token":
            case.attend(backend)
            pages.last_read = None
            backend.copy_pages(pages, [0], [1])
        else:
            case.attend(GatherBackend())
            pages.last_read = None
            backend.write(case.metadata, *new_tokens(case, 1))


def test_a_dependency_alone_is_no_order(case: Case) -> None:
    """What mlx's own operations read has no token: they are kept away from such pools."""
    with pytest.raises(AssertionError):
        case.pages.readable()
