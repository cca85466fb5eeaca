"""What a model is called in tables and on pages."""

from __future__ import annotations

from pathlib import Path


def model_label(path: Path) -> str:
    """A short name for the folder of a model: ``owner/name`` inside Hugging Face's cache, else the folder's name."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name or str(path)
