"""Pools: written and copied in place, grown without a copy, memory on demand and given back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from native_case import Case, Metadata, error

from tinykv_plugin.pages import LayerPages, LayerSpec


def make_pages(backend: Any, num_pages: int, page_size: int = 4, dim: int = 8, dtype: Any = mx.float32) -> LayerPages:
    pages = LayerPages(LayerSpec(2, dim, dim, dtype, dtype), page_size)
    backend.resize(pages, num_pages)
    return pages


def slots_of(pages: LayerPages, slots: Any) -> Metadata:
    nothing = mx.zeros((1,), mx.int32)
    return Metadata(pages, nothing, nothing, nothing, mx.array(np.array(slots, dtype=np.int32)))


def read(pages: LayerPages, slot: int) -> tuple[Any, Any]:
    keys, values = pages.readable()
    page, offset = divmod(slot, pages.page_size)
    return np.array(keys[page, :, offset]), np.array(values[page, :, offset])


@pytest.mark.parametrize("dim", [8, 12, 33])
def test_tokens_go_to_their_slots(backend: Any, dim: int) -> None:
    pages = make_pages(backend, 5, dim=dim)
    keys, values = (mx.random.normal((2, 2, 3, dim), key=mx.random.key(i)) for i in range(2))
    backend.write(slots_of(pages, [[7, -1, 0], [19, 3, -1]]), keys, values)
    for row, token, slot in ((0, 0, 7), (0, 2, 0), (1, 0, 19), (1, 1, 3)):
        key, value = read(pages, slot)
        assert (key == np.array(keys[row, :, token])).all()
        assert (value == np.array(values[row, :, token])).all()
    assert not read(pages, 8)[0].any()


def test_writes_take_any_strides_and_dtype(backend: Any) -> None:
    pages = make_pages(backend, 4)
    keys = mx.arange(2 * 3 * 8, dtype=mx.float32).reshape(1, 3, 2, 8).transpose(0, 2, 1, 3)
    values = mx.arange(2 * 3 * 8, dtype=mx.int32).reshape(1, 2, 8, 3).transpose(0, 1, 3, 2)
    backend.write(slots_of(pages, [[5, 6, 7]]), keys, values)
    for token in range(3):
        key, value = read(pages, 5 + token)
        assert (key == np.array(keys[0, :, token])).all()
        assert (value == np.array(values[0, :, token])).all()


def test_many_tokens_at_once(backend: Any, native: Any) -> None:
    native.set_threads(4)
    pages = make_pages(backend, 300, page_size=16, dim=64)
    keys = mx.random.normal((1, 2, 4800, 64))
    slots = np.random.default_rng(0).permutation(4800)
    backend.write(slots_of(pages, slots[None]), keys, -keys)
    got, negative = (np.array(x).transpose(0, 2, 1, 3).reshape(4800, 2, 64) for x in pages.readable())
    assert (got[slots] == np.array(keys[0]).transpose(1, 0, 2)).all()
    assert (negative == -got).all()


def test_pages_are_copied_in_order(backend: Any) -> None:
    pages = make_pages(backend, 5)
    keys = mx.random.normal((1, 2, 4, 8))
    backend.write(slots_of(pages, [[0, 1, 2, 3]]), keys, -keys)
    backend.copy_pages(pages, [0, 1], [1, 4])
    for page in (0, 1, 4):
        assert mx.array_equal(pages.readable()[0][page], keys[0])
        assert mx.array_equal(pages.readable()[1][page], -keys[0])


def test_a_pool_is_never_copied(backend: Any, native: Any) -> None:
    """Writes stay in place although Python, views and pending reads hold the arrays."""
    case = Case([64, 64])
    case.fill(backend)
    pages = case.metadata.pages
    pointers = [native.data_pointer(x) for x in (pages.keys, pages.values)]
    holders = [pages.keys, pages.keys[:2], pages.values.reshape(-1)]
    mx.eval(holders, pages.written)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(20):
        output = case.attend(backend)
        backend.write(case.metadata, case.keys, case.values)
        backend.copy_pages(pages, [0], [1])
        mx.async_eval(output)
    mx.eval(pages.written)
    del output
    assert [native.data_pointer(x) for x in (pages.keys, pages.values)] == pointers
    assert mx.get_active_memory() - before < 1 << 16
    assert mx.get_peak_memory() - before < pages.nbytes // 2


def test_growth_copies_nothing(backend: Any, native: Any) -> None:
    case = Case([200])
    case.fill(backend)
    pages = case.metadata.pages
    pointer, right = native.data_pointer(pages.keys), case.expected()
    for num_pages in (100, 10_000, 50):
        backend.resize(pages, num_pages)
        assert pages.num_pages == num_pages
        assert native.data_pointer(pages.keys) == pointer
        assert error(case.attend(backend), right) < 3e-5


def test_growth_beyond_the_reserved_space_keeps_the_tokens(backend: Any, native: Any) -> None:
    spec = LayerSpec(2, 64, 64, mx.float32, mx.float32)
    keys = mx.random.normal((1, 2, 16, 64))
    pool = native.resize_pages(None, [2, 2, 16, 64], mx.float32, 2)
    values = native.resize_pages(None, [2, 2, 16, 64], mx.float32, 2)
    pages = LayerPages(spec, 16)
    pages.keys, pages.values = pool, values
    assert native.fits(pool, 2)
    assert not native.fits(pool, 200)
    backend.write(slots_of(pages, [list(range(16))]), keys, -keys)
    backend.resize(pages, 200)  # the write is still pending
    assert pages.num_pages == 200
    assert mx.array_equal(pages.readable()[0][0], keys[0])
    assert mx.array_equal(pages.readable()[1][0], -keys[0])


def test_no_pages_is_no_arrays(backend: Any) -> None:
    pages = make_pages(backend, 5)
    backend.resize(pages, 0)
    assert pages.num_pages == 0
    assert pages.keys is None
    backend.copy_pages(pages, [], [])


def test_memory_is_committed_on_write_and_given_back(backend: Any, native: Any) -> None:
    before = native.pool_bytes()
    pages = make_pages(backend, 4096, page_size=16, dim=64)
    reserved, usable, committed = (now - then for now, then in zip(native.pool_bytes(), before, strict=True))
    assert usable == pages.nbytes == 64 << 20
    assert reserved >= usable
    assert committed == 0
    tokens = mx.ones((1, 2, 16384, 64))
    backend.write(slots_of(pages, [list(range(16384))]), tokens, tokens)
    mx.eval(pages.written)
    assert native.pool_bytes()[2] - before[2] == 16 << 20
    backend.resize(pages, 512)
    assert native.pool_bytes()[2] - before[2] == 8 << 20
    backend.resize(pages, 4096)
    assert native.pool_bytes()[2] - before[2] == 8 << 20
    assert pages.readable()[0][511].sum().item() == 2 * 16 * 64
    backend.write(slots_of(pages, [list(range(16384))]), 2 * tokens, tokens)
    assert pages.readable()[0][1023].sum().item() == 4 * 16 * 64
    del pages
    assert native.pool_bytes()[1] == before[1]


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc to see the process's memory")
def test_a_process_gets_smaller_with_its_pool(backend: Any) -> None:
    pages = make_pages(backend, 4096, page_size=16, dim=64)
    tokens = mx.ones((1, 2, 65536, 64))
    backend.write(slots_of(pages, [list(range(65536))]), tokens, tokens)
    output = pages.readable()[0][0] + 1  # a read that is still pending when the pool gets smaller
    mx.eval(pages.written)
    before = resident()
    backend.resize(pages, 64)
    assert before - resident() > 56 << 20
    assert output.sum().item() == 2 * 2 * 16 * 64


def test_more_than_there_is_raises_memory_error(backend: Any) -> None:
    pages = make_pages(backend, 4)
    keys = pages.keys
    # Pages of 2^30 tokens' worth of numbers: no machine's address space has room for these.
    huge = LayerPages(LayerSpec(1 << 10, 1 << 10, 1 << 10, mx.float32, mx.float32), 1 << 10)
    with pytest.raises(MemoryError):
        backend.resize(huge, 1 << 20)
    assert huge.keys is None
    assert pages.keys is keys
