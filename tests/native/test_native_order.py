"""Reads and writes of the same slots happen in the order they were asked for, however late they are evaluated."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import mlx.core as mx
import pytest
from native_case import Case, Metadata, error

ROW: dict[str, Any] = {"contexts": [600], "query_heads": 4, "kv_heads": 2, "page_size": 16}


def other_tokens(case: Case, seed: int) -> tuple[mx.array, mx.array]:
    keys = [mx.random.key(2 * seed + i) for i in range(2)]
    return mx.random.normal(case.keys.shape, key=keys[0]), mx.random.normal(case.values.shape, key=keys[1])


def rewrite(case: Case, backend: Any, seed: int) -> None:
    """Overwrite all tokens of the case, as a new owner of recycled pages would."""
    case.keys, case.values = other_tokens(case, seed)
    backend.write(case.metadata, case.keys, case.values)


@pytest.mark.parametrize("first", ["read", "write", "together", "async"])
def test_a_recycled_page_waits_for_pending_reads(backend: Any, first: str) -> None:
    case = Case(**ROW)
    case.fill(backend)
    right, output = case.expected(), case.attend(backend)
    rewrite(case, backend, 1)
    after = case.attend(backend)
    if first == "read":
        mx.eval(output)
    elif first == "write":
        mx.eval(case.metadata.pages.written)
    elif first == "together":
        mx.eval(after, output)
    else:
        mx.async_eval(after)
    assert error(output, right) < 3e-5
    assert error(after, case.expected()) < 3e-5


def test_all_reads_since_the_last_write_count(backend: Any) -> None:
    case = Case(**ROW)
    case.fill(backend)
    right = case.expected()
    outputs = [case.attend(backend) for _ in range(3)]
    rewrite(case, backend, 1)
    mx.eval(case.metadata.pages.written)
    assert all(error(output, right) < 3e-5 for output in outputs)


def test_copies_wait_too(backend: Any) -> None:
    case = Case([16], page_size=16)
    case.fill(backend)
    pages, right = case.metadata.pages, case.expected()
    page = case.metadata.block_table[0, 0].item()
    free = next(i for i in range(pages.num_pages) if i != page)
    output = case.attend(backend)
    backend.copy_pages(pages, [free], [page])
    mx.eval(pages.written)
    assert error(output, right) < 3e-5


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_async_steps_ahead(backend: Any, ahead: int, layers: int) -> None:
    """Each step overwrites the same slots while the steps before are under way."""
    cases = [Case(**ROW, seed=layer) for layer in range(layers)]
    for case in cases:
        case.fill(backend)
    pending: list[tuple[list[mx.array], list[Any]]] = []
    for step in range(12):
        outputs = []
        for layer, case in enumerate(cases):
            rewrite(case, backend, 100 * layer + step)
            outputs.append(case.attend(backend))
        mx.async_eval(outputs)
        pending.append((outputs, [case.expected() for case in cases]))
        if len(pending) > ahead:
            for output, right in zip(*pending.pop(0), strict=True):
                assert error(output, right) < 3e-5
    for outputs, rights in pending:
        assert all(error(output, right) < 3e-5 for output, right in zip(outputs, rights, strict=True))


def test_two_streams(backend: Any) -> None:
    """The read is under way in another stream when the write is evaluated."""
    case = Case(contexts=[3000], queries=300, query_heads=4, kv_heads=2)
    case.fill(backend)
    mx.eval(case.metadata.pages.written)
    slow, right = mx.new_stream(mx.cpu), case.expected()
    fresh = [other_tokens(case, seed) for seed in range(3)]
    mx.eval(fresh)
    for keys, values in fresh:
        with mx.stream(slow):
            output = case.attend(backend)
        mx.async_eval(output)
        case.keys, case.values = keys, values
        backend.write(case.metadata, keys, values)
        after = case.attend(backend)
        mx.eval(after)
        assert error(output, right) < 3e-5
        right = case.expected()
        assert error(after, right) < 3e-5


def test_steps_in_two_threads(backend: Any) -> None:
    failures: list[object] = []

    def run(seed: int) -> None:
        try:
            case = Case(contexts=[700, 30], query_heads=8, kv_heads=2, seed=seed)
            with mx.stream(mx.new_stream(mx.cpu)):
                case.fill(backend)
                for step in range(10):
                    rewrite(case, backend, 50 * seed + step)
                    output = case.attend(backend)
                    mx.async_eval(output)
                    assert error(output, case.expected()) < 3e-5
        except BaseException as problem:
            failures.append(problem)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_forks_share_pages_until_they_write(backend: Any) -> None:
    """Two rows read the same page; one gets a copy and writes there, all of it pending."""
    case = Case([16], page_size=16)
    case.fill(backend)
    pages, right = case.metadata.pages, case.expected()
    page = case.metadata.block_table[0, 0].item()
    free = next(i for i in range(pages.num_pages) if i != page)
    before = case.attend(backend)
    backend.copy_pages(pages, [page], [free])
    token = mx.zeros((1, 2, 1, 64))
    slot = mx.array([[free * 16 + 15]], dtype=mx.int32)
    backend.write(Metadata(pages, slot, slot, slot, slot), token, token)
    forked = Case([16], page_size=16)
    forked.q, forked.values = case.q, mx.concatenate([case.values[:, :, :15], token], axis=2)
    forked.keys = mx.concatenate([case.keys[:, :, :15], token], axis=2)
    table = mx.array([[free]], dtype=mx.int32)
    forked.metadata = Metadata(pages, table, case.metadata.context_lens, case.metadata.query_lens, slot)
    after, again = forked.attend(backend), case.attend(backend)
    mx.eval(after, again, before)
    assert error(before, right) < 3e-5
    assert error(again, right) < 3e-5
    assert error(after, forked.expected()) < 3e-5


FORK = """
import os, sys
import mlx.core as mx
from native_case import Case, error
from tinykv_native.backend import CpuBackend

backend = CpuBackend()
backend.set_threads(4)
case = Case([3000, 500], query_heads=8, kv_heads=2)
case.fill(backend)
right = case.expected()
assert error(case.attend(backend), right) < 3e-5
child = os.fork()
if child == 0:
    # mlx's own stream threads are gone in the child; a new stream has a new one.
    with mx.stream(mx.new_stream(mx.cpu)):
        for _ in range(20):
            assert error(case.attend(backend), right) < 3e-5
        backend.write(case.metadata, 2 * case.keys, case.values)
        mx.eval(case.metadata.pages.written)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
# What the child wrote is the child's own.
assert error(case.attend(backend), right) < 3e-5
"""


def test_a_forked_process_goes_on(native: Any, request: pytest.FixtureRequest) -> None:
    here = str(request.path.parent)
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], cwd=here, check=True, timeout=60)
