"""What the tests found for each architecture: a row of docs/models.json, which docs/models.md is made from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.layout import leaves
from tinykv_plugin.unused import UnusedCache

DOCS = Path(__file__).parents[2] / "docs"
Row = dict[str, Any]


class Found:
    """The rows of this run; ``stored`` are those of the last run that wrote them."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.stored: Row = json.loads((DOCS / "models.json").read_text()) if (DOCS / "models.json").exists() else {}

    def row_of(self, name: str) -> Row | None:
        row: Row | None = self.stored.get("models", {}).get(name)
        return row

    @property
    def comparable(self) -> bool:
        """Whether the stored rows are of this version of mlx-lm."""
        return self.stored.get("mlx_lm") == version("mlx-lm")

    def write(self) -> None:
        """Rows of this run take the place of stored ones."""
        models = {**self.stored.get("models", {}), **self.rows}
        table = {
            "mlx_lm": version("mlx-lm"),
            "models": {name: models[name] for name in registry.NAMES if name in models},
        }
        (DOCS / "models.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        subprocess.run([sys.executable, str(DOCS / "models.py")], check=True)


def layers_of(kv: tinykv.Attachment) -> Row:
    """How the layers of an attached model are kept and read."""
    kinds: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    for leaf in leaves(kv.make_cache()):
        if isinstance(leaf, PagedKVCache):
            layer = leaf._layer
            kinds[layer.choice.kind] += 1
            attention["direct" if layer.handles else f"gather: {layer.reason}"] += 1
        elif isinstance(leaf, UnusedCache):
            kinds["unused"] += 1
        else:
            kinds["recurrent" if type(leaf).__name__ == "ArraysCache" else type(leaf).__name__] += 1
    return {"layers": dict(sorted(kinds.items())), "attention": sorted(attention)}
