"""FileHeader: what our prompt-cache files say about themselves, beside what stock mlx-lm needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .errors import PromptCacheFileError

VERSION = 1
KEY = "tinykv"


@dataclass(frozen=True)
class FileHeader:
    """``model`` is the fingerprint of the weights that computed the K/V ("" if they came from elsewhere)."""

    version: int
    model: str
    checksum: str

    @classmethod
    def of(cls, cache: Sequence[Any], model: str, more: Mapping[str, mx.array]) -> FileHeader:
        """The header of a file that ``cache``, mlx-lm's own caches, and ``more`` arrays are written to."""
        state: Any = tree_flatten([leaf.state for leaf in cache])
        arrays = {name: item for name, item in state if isinstance(item, mx.array)}
        return cls(VERSION, model, checksum({**arrays, **more}))

    @classmethod
    def read(cls, path: str) -> FileHeader | None:
        """The header of a file, checked against its arrays; None if mlx-lm wrote it.

        Raises PromptCacheFileError for another version or content that was changed.
        """
        loaded: Any = mx.load(path, return_metadata=True)
        arrays, metadata = loaded
        text = metadata.get(f"0.{KEY}")
        if text is None:
            return None
        try:
            found = json.loads(text)
            version = found["version"]
            header = cls(**found) if version == VERSION else None
        except (ValueError, TypeError, KeyError):
            raise PromptCacheFileError(path, "its header can't be read; make it anew") from None
        if header is None:
            raise PromptCacheFileError(
                path, f"is of version {version} of the format, this program reads version {VERSION}; make it anew"
            )
        scalars = {metadata[name] for name in metadata if name.startswith("2.") and name.endswith(".0")}
        if checksum({name: array for name, array in arrays.items() if name not in scalars}) != header.checksum:
            raise PromptCacheFileError(path, "its content was changed or damaged (wrong checksum); make it anew")
        return header

    def metadata(self) -> dict[str, str]:
        """As an entry of the file's metadata."""
        return {KEY: json.dumps(asdict(self))}


def checksum(arrays: Mapping[str, mx.array]) -> str:
    """A digest of names, shapes, dtypes and bytes."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.shape} {array.dtype};".encode())
        if array.size:
            found.update(np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).data)
    return found.hexdigest()
