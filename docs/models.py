"""docs/models.md, made from what the tests found: ``python docs/models.py`` writes it from docs/models.json.

``tox run -e archs -- --write-models`` runs every architecture and renews both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

HEAD = """\
# Models

<!-- Made by docs/models.py from docs/models.json; tox run -e archs -- --write-models renews both. -->

All {tested} model files of mlx-lm {version} were run with a tiny random model: prompt and decode, prompts in chunks, a
batch of three prompts of {lengths} tokens of which two join while the first decodes, a copied request, tokens taken
back, a draft model, a prompt cache saved and loaded, and a size limit. Tokens and log-probabilities must be those of
the same model with mlx-lm's own caches, one request at a time, in float32.

- **layers**: how the layers of the tiny model keep their K/V. *full*, *window* and *chunked* are in pages: attention to
  everything, to a sliding window, to the current chunk. *recurrent* layers keep a state that doesn't grow: there is
  nothing to page. *unused* ones have a cache that the model never writes.
- **attention**: *direct* means that the model leaves K/V to attention, so a backend that supports their shapes reads
  the pages in place. *gather* means that pages are copied together first; the reason follows.
- **batch**: requests in a batch get what they get alone; *one by one* where the model can run only one of them at a
  time. In brackets: mlx-lm's own batch of the same prompts, unless that is equal too.
- **drafts**: a draft model works: what it guessed wrong is taken back, and recurrent state put back.
- **8 bits**: quantized pages (`bits=8`) give nearly the same probabilities. These models have heads of 32 elements, as
  mlx quantizes no fewer together.
- **saved**: prompt caches can be saved and loaded, in mlx-lm's format.
- **limit**: `max_kv_size` bounds the layers with full attention.
- **adapter**: who serves it, and notices if another version of mlx-lm does something else: see [Adapters](adapters.md).
"""

COLUMNS = ("model file", "layers", "attention", "batch", "drafts", "8 bits", "saved", "limit", "adapter")


def page(table: Mapping[str, Any]) -> str:
    """The whole page."""
    models = table["models"]
    parts = [HEAD.format(version=table["mlx_lm"], lengths="21, 5 and 12", tested=len(models))]
    ordered = sorted(models, key=lambda name: (models[name]["family"], name.lower()))
    for family, names in groupby(ordered, key=lambda name: models[name]["family"]):
        rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(name, models[name]) for name in names)]
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n\n" + "\n".join(lines) + "\n")
    cannot = [
        f"- `{name}`, {what(path)}: {reason}."
        for name in sorted(models)
        for path, reason in sorted(models[name]["cannot"].items())
    ]
    parts.append("\n## What can't be had\n\n" + "\n".join(cannot) + "\n")
    return "".join(parts)


def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of one model."""
    layers = ", ".join(f"{count} {kind}" for kind, count in found["layers"].items())
    return (
        f"`{name}`",
        layers,
        "<br>".join(found["attention"]) or "-",
        found["batch"] + stock(found["stock_batch"]),
        found["drafts"],
        found["quantized"],
        found["save"],
        found["max_kv_size"],
        found["adapter"],
    )


def stock(batch: str) -> str:
    """What mlx-lm's own batch does, unless it is right."""
    return "" if batch == "equal" else f" (mlx-lm: {batch})"


def what(path: str) -> str:
    """A path as the table's columns call it."""
    return {"max_kv_size": "limit", "save": "saved", "trim": "taking tokens back"}.get(path, path)


def write() -> None:
    """Write docs/models.md."""
    table = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))
    (DOCS / "models.md").write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    write()
