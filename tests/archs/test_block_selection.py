"""minimax_m3_vl: an indexer's blocks are counted from each row's own first token."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
from common import compare, restored
from mlx_lm.models import minimax_m3_vl
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.pages import LayerSpec
from tinykv_plugin.plan import _able
from tinykv_plugin.protocols import LayerChoice
from tinykv_plugin.trace import LayerTrace, TraceResult


def test_equals_mlx_lms_own() -> None:
    with restored(minimax_m3_vl.Attention, "_block_mask"):
        compare("minimax_m3_vl")


def test_only_the_indexers_keys_are_copied_together() -> None:
    with tinykv.attach(registry.shared("minimax_m3_vl"), attention="gather") as kv:
        leaves = [part._layer for entry in kv.make_cache() for part in entry.caches]
        assert [layer.handles for layer in leaves] == [True, True, False]
        assert [layer.spec.value_dim for layer in leaves] == [16, 16, 0]


def test_a_backend_that_cant_write_keys_without_values_owns_no_pages_of_it() -> None:
    plain = SimpleNamespace(name="plain", features=frozenset())
    able = SimpleNamespace(name="able", features=frozenset({"keys_only"}))
    for value_dim, expected in ((16, [plain, able]), (0, [able])):
        layer = LayerTrace(0, LayerChoice("full"), LayerSpec(1, 16, value_dim, mx.float32, mx.float32))
        found, reasons = _able([plain, able], TraceResult({0: layer}))  # type: ignore[list-item]
        assert found == expected
        assert reasons == ([] if value_dim else ["plain: layers with keys only are not supported"])
