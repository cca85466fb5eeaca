"""Outcomes: what self-tests found on this machine, in a file of the user's cache folder."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..cache_folder import default_cache_dir
from ..protocols import AttentionRequest

log = logging.getLogger("tinykv")


@dataclass(frozen=True)
class Outcome:
    """A self-test that passed. Decode with a longest row below ``gather_below`` tokens is faster by gather.

    ``gather_below`` is for a single row, ``gather_below_batch`` for several; 0: never.
    """

    gather_below: int = 0
    gather_below_batch: int = 0


class Outcomes:
    """Outcomes by a backend's ``selftest_key`` and the kind of call. A file that can't be read is as if empty."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_cache_dir() / "selftest.json"

    def find(self, key: str, request: AttentionRequest) -> Outcome | None:
        """The outcome for calls like ``request``."""
        found = self._read().get(key, {}).get(kind_of(request))
        try:
            return None if found is None else Outcome(**{name: int(value) for name, value in found.items()})
        except (AttributeError, TypeError, ValueError):
            return None

    def record(self, key: str, request: AttentionRequest, outcome: Outcome | None) -> None:
        """Keep an outcome; None forgets what was kept. A folder that can't be written costs a test each time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock")):
                everything = self._read()
                kinds = everything.setdefault(key, {})
                kinds.pop(kind_of(request), None)
                if outcome is not None:
                    kinds[kind_of(request)] = asdict(outcome)
                new = self.path.with_suffix(".new")
                new.write_text(json.dumps(everything, indent=1), encoding="utf-8")
                new.replace(self.path)
        except OSError as error:
            log.info("the outcome of a self-test can't be kept: %s", error)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and all(isinstance(kinds, dict) for kinds in found.values()) else {}


def kind_of(request: AttentionRequest) -> str:
    """A kind of call as text: its heads, dims, dtype, page size, query tokens and features."""
    window = f", window {request.window}" if request.window is not None else ""
    keep = f", keep {request.keep}" if request.keep else ""
    sinks = ", sinks" if request.sinks else ""
    mask = ", mask" if request.mask == "array" else ""
    softcap = f", softcap {request.softcap:g}" if request.softcap is not None else ""
    chunk = f", chunk {request.chunk}" if request.chunk is not None else ""
    opened = ", open pages" if request.open_page else ""
    dims = f"{request.key_dim}" if request.key_dim == request.value_dim else f"{request.key_dim}/{request.value_dim}"
    dtype = str(request.dtype).rsplit(".", 1)[-1]
    packed = "".join(
        f", {side} of {format_}"
        for side, format_ in (("keys", request.keys), ("values", request.values))
        if format_ is not None
    )
    return (
        f"{request.query_heads}/{request.kv_heads} heads of {dims}, {dtype}, page size {request.page_size}, "
        f"{request.query_len} new{window}{keep}{sinks}{mask}{softcap}{chunk}{packed}{opened}"
    )
