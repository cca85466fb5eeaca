"""What a self-test finds out: a wrong backend is caught in every feature that it claims."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.kv_format import Affine
from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
from tinykv_plugin.protocols import AttentionRequest
from tinykv_plugin.retention import Retention
from tinykv_plugin.selftest.comparison import LONGEST, compare, samples_of
from tinykv_plugin.selftest.outcomes import kind_of
from tinykv_plugin.step import GroupStep
from tinykv_plugin.table import PageTable

DECODE = AttentionRequest(4, 2, 32, 32, mx.float32, 8, 1, "none", None, 0, False)
DRAFTS = dataclasses.replace(DECODE, query_len=3, mask="causal")
Arguments = dict[str, Any]


class Faulty(GatherBackend):
    """Gather's operations, with a fault."""

    def __init__(self, fault: Callable[[Arguments], None] | None = None) -> None:
        self.fault = fault

    def attend(self, queries: mx.array, metadata: PagedKVMetadata, **options: Any) -> mx.array:
        arguments = {"queries": queries, "metadata": metadata, **options}
        if self.fault is not None:
            self.fault(arguments)
        return super().attend(**arguments)


def without(name: str) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: None})


def retained(change: Callable[[Retention], Retention]) -> Callable[[Arguments], None]:
    """The step's pages as if they were kept otherwise, where no page is missing."""

    def fault(arguments: Arguments) -> None:
        metadata = arguments["metadata"]
        old, tables = metadata.step, []
        for table in old.tables:
            tables.append(PageTable(table._allocator, table._journal, table.page_size, change(table.retention)))
            tables[-1].pages = array("i", [max(0, page) for page in table.pages])
        step = GroupStep(tables, old.context_lens, old.query_lens, old.width)
        arguments["metadata"] = PagedKVMetadata(metadata.pages, step)

    return fault


def masked(change: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(mask=change(arguments["mask"]))


def other_heads(arguments: Arguments) -> None:
    arguments["sinks"] = arguments["sinks"][::-1]


def no_biases(arguments: Arguments) -> None:
    """Of values of 4 bits and 32 elements: 4 words, a scale and a bias."""
    pages = arguments["metadata"].pages
    pages.values = mx.concatenate([pages.values[..., :5], mx.zeros_like(pages.values[..., 5:])], axis=-1)


FAULTS: dict[str, tuple[AttentionRequest, Callable[[Arguments], None]]] = {
    "no softcap": (dataclasses.replace(DECODE, softcap=50.0), without("softcap")),
    "another softcap": (
        dataclasses.replace(DECODE, softcap=50.0),
        lambda arguments: arguments.update(softcap=1.2 * arguments["softcap"]),
    ),
    "no softcap for drafts": (dataclasses.replace(DRAFTS, softcap=30.0), without("softcap")),
    "no sinks": (dataclasses.replace(DECODE, sinks=True), without("sinks")),
    "sinks of other heads": (dataclasses.replace(DECODE, sinks=True), other_heads),
    "a window one token longer": (
        dataclasses.replace(DECODE, window=24),
        retained(lambda own: Retention(own.window + 1)),  # type: ignore[operator]
    ),
    "a window one token shorter": (
        dataclasses.replace(DRAFTS, window=24),
        masked(lambda mask: PagedMask(mask.window - 1)),
    ),
    "no window, a long one": (dataclasses.replace(DECODE, window=1024), retained(lambda _: Retention())),
    "no kept tokens": (
        dataclasses.replace(DECODE, window=24, keep=4),
        retained(lambda own: Retention(own.window - 4)),  # type: ignore[operator]
    ),
    "no chunks": (
        dataclasses.replace(DECODE, window=20, chunk=20),
        masked(lambda mask: PagedMask(mask.window)),
    ),
    "chunks of another length": (
        dataclasses.replace(DRAFTS, window=600, chunk=600),
        masked(lambda mask: PagedMask(mask.window, mask.chunk - 1)),
    ),
    "drafts that see later ones": (DRAFTS, without("mask")),
    "no mask": (dataclasses.replace(DECODE, mask="array"), without("mask")),
    "an added mask as a boolean one": (
        dataclasses.replace(DECODE, mask="array"),
        masked(lambda mask: mask if mask.dtype == mx.bool_ else mask > -mx.inf),
    ),
    "a boolean mask as an added one": (
        dataclasses.replace(DECODE, mask="array"),
        masked(lambda mask: mask.astype(mx.float32)),
    ),
    "quantized values without biases": (
        dataclasses.replace(DECODE, keys=Affine(8, 32), values=Affine(4, 32)),
        no_biases,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_feature_is_found(name: str) -> None:
    request, fault = FAULTS[name]
    right = compare(Faulty(), GatherBackend(), request)
    assert right.problem == "", "the backend without the fault passes"
    assert right.error <= right.allowed
    assert "differs from gather's by" in compare(Faulty(fault), GatherBackend(), request).problem


@pytest.mark.parametrize(("key_dim", "value_dim"), [(48, 32), (16, 64)])
def test_values_of_another_dim_are_compared(key_dim: int, value_dim: int) -> None:
    request = dataclasses.replace(DECODE, key_dim=key_dim, value_dim=value_dim)

    class Cut(Faulty):
        def attend(self, *args: Any, **options: Any) -> mx.array:
            return super().attend(*args, **options)[..., :key_dim]

    assert compare(Faulty(), GatherBackend(), request).problem == ""
    assert bool(compare(Cut(), GatherBackend(), request).problem) == (value_dim > key_dim)


def test_pages_behind_a_window_are_gone() -> None:
    """A backend that reads them finds no page, as it would in a model."""
    seen: list[int] = []

    class Looks(Faulty):
        def attend(self, queries: mx.array, metadata: PagedKVMetadata, **options: Any) -> mx.array:
            seen.extend(metadata.step.block_rows()[0, :4].tolist())
            return super().attend(queries, metadata, **options)

    assert compare(Looks(), GatherBackend(), dataclasses.replace(DECODE, window=24, keep=9)).problem == ""
    # 40 tokens: the query reads the 15 up to its own, and the 9 kept ones.
    assert [page == -1 for page in seen[:4]] == [False, False, True, False]


def test_some_row_is_longer_than_a_window_or_a_chunk() -> None:
    for window, chunk in ((1024, None), (8192, 8192), (500, None), (40, 10)):
        request = dataclasses.replace(DECODE, window=window, chunk=chunk)
        assert max(map(max, samples_of(request))) >= window + 30
    assert max(map(max, samples_of(dataclasses.replace(DECODE, window=131072)))) == LONGEST


def test_the_kind_of_a_call_names_every_feature() -> None:
    """Outcomes are kept by it: calls that differ must not have the same."""
    plain = kind_of(DECODE)
    changes: list[Arguments] = [
        {"query_heads": 8}, {"kv_heads": 1}, {"key_dim": 64}, {"value_dim": 64}, {"dtype": mx.float16},
        {"page_size": 16}, {"query_len": 2}, {"mask": "array"}, {"window": 9}, {"keep": 4}, {"sinks": True},
        {"keys": Affine(8, 32)}, {"values": Affine(8, 32)}, {"softcap": 50.0}, {"chunk": 64},
            {"open_page": True},
    ]  # fmt: skip
    assert {name for change in changes for name in change} == {field.name for field in dataclasses.fields(DECODE)}
    kinds = {kind_of(dataclasses.replace(DECODE, **change)) for change in changes}
    assert len(kinds) == len(changes) and plain not in kinds
