"""What the backend serves, how its plugin behaves, and that its indices have 64 bits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tinykv_plugin as tinykv
from metal_case import Case
from tinykv_plugin.manager import PluginManager, default_manager
from tinykv_plugin.protocols import AttentionBackend, AttentionRequest, TriedBackend

REQUEST = AttentionRequest(8, 2, 64, 64, mx.float32, 32, 1, "none", None, 0, False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": mx.bfloat16, "query_len": 8, "mask": "causal", "sinks": True},
        {"key_dim": 576, "value_dim": 512, "page_size": 256},
        {"window": 128, "keep": 4},
        {"mask": "array"},
    ],
)
def test_what_it_serves(backend: Any, changes: dict[str, Any]) -> None:
    assert backend.supports(dataclasses.replace(REQUEST, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_len": 9}, "9 query tokens per row: mlx's attention over gathered pages is faster there"),
        ({"dtype": mx.float64}, "dtype mlx.core.float64"),
        ({"key_dim": 60}, "key dim 60 (multiples of 8 up to 576 are supported)"),
        ({"value_dim": 1024}, "value dim 1024"),
        ({"page_size": 7}, "page size 7 (multiples of 4 are supported)"),
        ({"query_heads": 7}, "7 query heads don't share 2 kv heads evenly"),
        ({"window": 128, "keep": 4, "query_len": 2}, "keep=4 with 2 query tokens per row"),
        ({"window": 128, "mask": "array"}, "an array as mask together with a window"),
        ({"window": 4, "keep": 4}, "window 4 is not more than keep=4"),
        ({"open_page": True, "mask": "array", "query_len": 2}, "open pages with 2 query tokens per row that aren't"),
        ({"open_page": True, "window": 40, "keep": 40 - 4}, "open pages of 32 tokens with keep=36"),
    ],
)
def test_what_it_does_not_serve(backend: Any, changes: dict[str, Any], reason: str) -> None:
    (found,) = backend.supports(dataclasses.replace(REQUEST, **changes))
    assert reason in found


def test_every_shape_fits_into_a_threadgroup() -> None:
    """32 KB of threadgroup memory, few enough numbers for a lane's registers, and a simdgroup for each vector."""
    from tinykv_metal.limits import reasons
    from tinykv_metal.variant import LANE_FLOATS, PART, SIMDGROUPS, Variant

    for dim in range(8, 577, 8):
        for group in (1, 2, 3, 4, 7, 8, 16, 32):
            for queries in (1, 8):
                assert reasons(dataclasses.replace(REQUEST, key_dim=dim, value_dim=dim, query_len=queries)) == []
                variant = Variant(dim, dim, 32, group, queries)
                one = variant.division
                assert one.passes * one.sets * one.size >= variant.vectors
                assert (one.passes - 1) * one.sets * one.size < variant.vectors
                assert variant.lane_floats(one.size, one.tokens) <= LANE_FLOATS
                assert variant.threadgroup_bytes <= 32768
                # Runs lie in a page and in a tile, tiles in a part, and every simdgroup has a run of a tile.
                assert 4 % one.tokens == one.tile % 4 == PART % one.tile == SIMDGROUPS % one.sets == 0
                assert SIMDGROUPS // one.sets * one.tokens <= one.tile


@pytest.mark.parametrize(
    ("key_dim", "group", "queries", "passes", "sets"),
    [(128, 8, 1, 1, 1), (64, 8, 1, 1, 1), (256, 2, 1, 1, 1), (128, 16, 1, 1, 2), (128, 4, 4, 1, 2), (512, 8, 1, 1, 4),
     (512, 16, 1, 1, 8), (576, 128, 1, 8, 8)],
)  # fmt: skip
def test_a_group_reads_keys_and_values_once(key_dim: int, group: int, queries: int, passes: int, sets: int) -> None:
    from tinykv_metal.variant import Variant

    division = Variant(key_dim, min(key_dim, 512), 32, group, queries).division
    assert (division.passes, division.sets) == (passes, sets)


def test_without_metal_it_says_so_and_gather_serves(monkeypatch: pytest.MonkeyPatch, tiny_llama: Any) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with tinykv.attach(tiny_llama(), attention="metal") as kv:
        assert {(line.backend, line.reason) for line in kv.plan} == {("gather", "metal: mlx has no Metal here")}


def test_on_another_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinykv_metal import device

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu, 0))
    assert device.problem() == "mlx computes on Device(cpu, 0) here"


def test_the_plugin_is_found() -> None:
    (info,) = (info for info in default_manager().plugins if info.name == "metal")
    assert (info.provides, info.problem) == (("backend metal",), "")
    first, last = PluginManager().backends("metal")
    assert isinstance(first, AttentionBackend) and isinstance(first, TriedBackend)
    assert (first.name, first.direct, last.name) == ("metal", True, "gather")


def test_a_plugin_list_does_not_load_mlx() -> None:
    program = "import sys, tinykv_metal.plugin as p; p.tinykv_attention_backends(); print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_the_key_of_a_selftest_names_device_mlx_and_kernels(backend: Any) -> None:
    from importlib.metadata import version

    key = backend.selftest_key()
    assert f"mlx {version('mlx')}, kernels " in key


def test_a_mask_that_is_not_known_is_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="mask 'windowed' is not known"):
        Case([9]).fill(backend).attend(backend, mask="windowed")


def test_offsets_into_pools_have_64_bits(device: Any) -> None:
    """Pools past 2^31 elements: the offsets that every kernel forms, on numbers that no test's memory would hold."""
    from tinykv_metal.kernel import source

    kernel = mx.fast.metal_kernel(
        name="tinykv_offsets",
        input_names=["at"],
        output_names=["offsets"],
        source="""
          const uint i = thread_position_in_grid.x;
          offsets[i] = token_offset(at[4 * i], at[4 * i + 1], at[4 * i + 2], 8, 32, at[4 * i + 3]);
        """,
        header=source("common"),
    )
    places = [
        (page, head, slot, dim)
        for page in (0, 70_000, 2**31 - 1)
        for head in (0, 7)
        for slot, dim in [(0, 64), (31, 576)]
    ]
    (offsets,) = kernel(
        inputs=[mx.array(places, mx.int32)], output_shapes=[(len(places),)], output_dtypes=[mx.int64],
        grid=(len(places), 1, 1), threadgroup=(32, 1, 1),
    )  # fmt: skip
    right = [((page * 8 + head) * 32 + slot) * dim for page, head, slot, dim in places]
    np.testing.assert_array_equal(np.array(offsets), np.array(right, np.int64))
    assert max(right) > 2**32


def test_no_kernel_indexes_pools_in_another_way() -> None:
    """Every index into a pool is one of token_offset, or one of copy.metal, whose factors have 64 bits."""
    import re

    from tinykv_metal.kernel import source

    for name in ("attend", "write", "gather", "copy"):
        indices = re.findall(r"(?:key_pages|value_pages)\)?\[([^\]]+)\]", source(name))
        indices += re.findall(r"(?:key_pages|value_pages) \+ (\w+)", source(name))
        assert indices, name
        for index in indices:
            first = index.split(" ")[0]
            declared = re.search(rf"const int64_t {first} = (.*?);", source(name))
            assert declared, (name, index)
            assert name == "copy" or declared.group(1).startswith("token_offset("), (name, index)
