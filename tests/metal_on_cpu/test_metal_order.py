"""Dispatches that touch a pool are ordered by tokens, as nothing else orders them on a GPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from metal_case import Case, new_tokens
from msl_cpu.order import OrderError
from tinykv_plugin.errors import PluginError
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


def write(case: Case, backend: Any) -> None:
    backend.write(case.metadata, *new_tokens(case, 1))


def read_without_the_writers_token(case: Case, backend: Any) -> None:
    case.pages.written = None
    case.attend(backend)


def write_without_the_readers_token(case: Case, backend: Any) -> None:
    case.attend(backend)
    case.pages.last_read = None
    write(case, backend)


def write_with_the_token_of_an_older_write(case: Case, backend: Any) -> None:
    stale = case.pages.written
    write(case, backend)
    case.pages.written = stale
    write(case, backend)


def forget_a_read_before_another_one(case: Case, backend: Any) -> None:
    case.attend(backend)
    case.pages.last_read = None
    case.attend(backend)
    write(case, backend)


def gather_with_a_token_of_nobody(case: Case, backend: Any) -> None:
    case.pages.written = mx.zeros((1,), mx.int32)
    case.attend(GatherBackend())


def copy_without_the_readers_token(case: Case, backend: Any) -> None:
    case.attend(backend)
    case.pages.last_read = None
    backend.copy_pages(case.pages, [0], [1])


def forget_a_gather(case: Case, backend: Any) -> None:
    case.attend(GatherBackend())
    case.pages.last_read = None
    write(case, backend)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (read_without_the_writers_token, "attend reads 'key_pages', which tinykv_write wrote"),
        (write_without_the_readers_token, "write writes 'key_pages', which tinykv_attend read"),
        (write_with_the_token_of_an_older_write, "write writes 'key_pages', which tinykv_write wrote"),
        (forget_a_read_before_another_one, "write writes 'key_pages', which tinykv_attend read"),
        (gather_with_a_token_of_nobody, "gather reads 'key_pages', which tinykv_write wrote"),
        (copy_without_the_readers_token, "copy writes 'key_pages', which tinykv_attend read"),
        (forget_a_gather, "write writes 'key_pages', which tinykv_gather read"),
    ],
)
def test_planted_faults_of_order(case: Case, backend: Any, fault: Any, message: str) -> None:
    with pytest.raises(OrderError, match=message):
        fault(case, backend)


def test_a_dependency_alone_is_no_order(case: Case) -> None:
    """What mlx's own operations read has no token: they are kept away from such pools."""
    with pytest.raises(PluginError, match="must read them"):
        case.pages.readable()
