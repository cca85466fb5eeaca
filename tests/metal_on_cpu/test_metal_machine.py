"""Random histories of pages: whatever happens to them, in whatever order, reads see what was written last."""

from __future__ import annotations

from array import array
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_case import wide
from metal_device import install
from msl_cpu import build
from msl_cpu.device import Device
from tinykv_plugin.allocator import PageAllocator
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.journal import Journal
from tinykv_plugin.metadata import PagedKVMetadata
from tinykv_plugin.pages import LayerPages, LayerSpec
from tinykv_plugin.retention import Retention
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable

PAGE, HEADS, DIM, PAGES = 4, 2, 32, 12
SPEC = LayerSpec(HEADS, DIM, DIM, mx.float32, mx.float32)


class History:
    """Pages under a backend, and the same in numpy; rows of pages in any order, some shared."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.pages = LayerPages(SPEC, PAGE)
        backend.resize(self.pages, PAGES)
        self.model = np.full((2, PAGES, HEADS, PAGE, DIM), np.nan)
        self.pages.keys, self.pages.values = (mx.full((PAGES, HEADS, PAGE, DIM), mx.nan) for _ in range(2))
        mx.eval(self.pages.keys, self.pages.values)
        self.seed = 0

    def step(self, rows: list[list[int]], contexts: list[int], query_lens: list[int]) -> PagedKVMetadata:
        journal = Journal()
        tables = [PageTable(PageAllocator(journal), journal, PAGE, Retention()) for _ in rows]
        for table, ids in zip(tables, rows, strict=True):
            table.pages = array("i", ids)
        return PagedKVMetadata(self.pages, GroupStep(tables, contexts, query_lens, max(query_lens)))

    def random(self, *shape: int) -> mx.array:
        self.seed += 1
        return mx.random.normal(shape, key=mx.random.key(self.seed))

    def write(self, ids: list[int], context: int) -> None:
        """All tokens of a row, as a new owner of its pages writes them."""
        sides = [self.random(1, HEADS, context, DIM) for _ in range(2)]
        self.backend.write(self.step([ids], [context], [context]), *sides)
        for position in range(context):
            for side, tensor in enumerate(sides):
                self.model[side, ids[position // PAGE], :, position % PAGE] = wide(tensor)[0, :, position]

    def copy(self, source: int, target: int) -> None:
        self.backend.copy_pages(self.pages, [source], [target])
        self.model[:, target] = self.model[:, source]

    def read(self, rows: list[list[int]], contexts: list[int], reader: Any) -> None:
        queries = self.random(len(rows), HEADS, 1, DIM)
        got = wide(reader.attend(queries, self.step(rows, contexts, [1] * len(rows)), scale=0.2, mask=None, sinks=None))
        for row, (ids, context) in enumerate(zip(rows, contexts, strict=True)):
            positions = np.arange(context)
            pages = np.array(ids)[positions // PAGE]
            keys, values = (side[pages, :, positions % PAGE].transpose(1, 0, 2) for side in self.model)
            scores = np.einsum("hd,htd->ht", wide(queries)[row, :, 0], keys) * 0.2
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            right = np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), values)
            np.testing.assert_allclose(got[row, :, 0], right, atol=1e-5)


ROW = st.permutations(range(PAGES)).flatmap(
    lambda ids: st.integers(1, 3 * PAGE).map(lambda context: (ids[: -(-context // PAGE)], context))
)


@pytest.mark.skipif(bool(build.problem()), reason=build.problem())
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_history_of_pages(data: st.DataObject) -> None:
    from tinykv_metal.backend import MetalBackend

    with pytest.MonkeyPatch.context() as monkeypatch:
        install(Device(), monkeypatch)
        history = History(MetalBackend())
        history.write(list(range(PAGES)), PAGES * PAGE)
        for _ in range(data.draw(st.integers(1, 8))):
            action = data.draw(st.sampled_from(["write", "copy", "read", "gather"]))
            if action == "write":
                history.write(*data.draw(ROW))
            elif action == "copy":
                history.copy(*data.draw(st.permutations(range(PAGES)))[:2])
            else:
                rows = data.draw(st.lists(ROW, min_size=1, max_size=9))
                reader = history.backend if action == "read" else GatherBackend()
                history.read([list(ids) for ids, _ in rows], [context for _, context in rows], reader)
