"""minimax_m3_vl: an indexer's blocks are counted from each row's own first token."""

from __future__ import annotations

from common import compare, restored
from mlx_lm.models import minimax_m3_vl
from tiny import registry

import tinykv_plugin as tinykv


def test_equals_mlx_lms_own() -> None:
    with restored(minimax_m3_vl.Attention, "_block_mask"):
        compare("minimax_m3_vl")


def test_only_the_indexers_keys_are_copied_together() -> None:
    with tinykv.attach(registry.shared("minimax_m3_vl"), attention="gather") as kv:
        leaves = [part._layer for entry in kv.make_cache() for part in entry.caches]
        assert [layer.handles for layer in leaves] == [True, True, False]
        assert [layer.spec.value_dim for layer in leaves] == [16, 16, 0]
