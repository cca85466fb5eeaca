"""Pages move together also where they are written in place, by tokens that order writes after reads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from crowded import check_alone, check_batch, small_model
from native_case import Case, error

from tinykv_plugin.pages import LayerPages, LayerSpec


@pytest.mark.parametrize(
    ("kind", "bits", "fields"),
    [("gemma3_text", None, {}), ("gpt_oss", None, {}), ("gemma3_text", 8, {"head_dim": 32})],
)
def test_a_request_that_fits_alone_passes_beside_stored_prompts(kind: str, bits: int | None, fields: Any) -> None:
    check_alone(small_model(kind, **fields), attention="cpu", **({"bits": bits} if bits else {}))


def test_a_batch_beside_stored_prompts_gets_the_same_tokens() -> None:
    check_batch(small_model("gemma3_text"), attention="cpu")


def test_a_pending_read_of_a_page_that_moves_away_finds_it(backend: Any) -> None:
    """Nothing is evaluated before the page's old place is given back, taken again and written."""
    case = Case([16], page_size=16)
    case.fill(backend)
    pages, right = case.metadata.pages, case.expected()
    page, count = case.metadata.block_table[0, 0].item(), pages.num_pages
    backend.resize(pages, count + 4)
    backend.copy_pages(pages, [page], [count + 3])
    case.metadata.block_table = mx.array([[count + 3]], mx.int32)
    before = case.attend(backend)
    backend.copy_pages(pages, [count + 3], [0])
    case.metadata.block_table = mx.array([[0]], mx.int32)
    backend.resize(pages, 1)
    after = case.attend(backend)
    backend.resize(pages, count + 4)
    backend.copy_pages(pages, [1], [count + 3])
    mx.eval(pages.written, before, after)
    assert error(before, right) < 3e-5
    assert error(after, right) < 3e-5


def test_fewer_pages_take_less_memory(backend: Any, native: Any) -> None:
    before = native.pool_bytes()[2]
    pages = LayerPages(LayerSpec(2, 64, 64, mx.float32, mx.float32), 16)
    backend.resize(pages, 1024)
    backend.copy_pages(pages, list(range(512)), list(range(512, 1024)))
    mx.eval(pages.written)
    full = native.pool_bytes()[2] - before
    backend.resize(pages, 256)
    mx.eval(pages.written)
    assert native.pool_bytes()[2] - before <= full // 4
