"""The user's cache folder: what is made or found out once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "TINYKV_CACHE_DIR"


def default_cache_dir() -> Path:
    """The folder for what is made once: $TINYKV_CACHE_DIR, else ``tinykv`` in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tinykv"
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "tinykv"
