"""ModelFingerprint: tells whether K/V were computed by the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

# Arrays of up to this many bytes are read whole, so that two LoRA adapters never look alike; of larger ones a sample.
WHOLE_BYTES = 1 << 18
SAMPLES = 1024


class ModelFingerprint:
    """A digest of a model's parameters: names, shapes, dtypes and values (large arrays are sampled).

    Computed again only when a parameter was replaced, as loading or removing an adapter does.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: Sequence[tuple[str, int]] = ()
        self._digest = b""

    def digest(self) -> bytes:
        """16 bytes that are equal for equal parameters, in any process."""
        named: list[tuple[str, mx.array]] = tree_flatten(self._model.parameters())  # type: ignore[assignment]
        seen = [(name, id(array)) for name, array in named]
        if seen != self._seen or not self._digest:
            self._seen, self._digest = seen, _digest(named)
        return self._digest


def _digest(named: Sequence[tuple[str, mx.array]]) -> bytes:
    samples = [_sample(array) for _, array in named]
    mx.eval(samples)
    found = hashlib.blake2b(digest_size=16)
    for (name, array), sample in sorted(zip(named, samples, strict=True), key=lambda item: item[0][0]):
        found.update(f"{name} {array.shape} {array.dtype};".encode())
        found.update(np.asarray(sample).tobytes())
    return found.digest()


def _sample(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    if array.nbytes > WHOLE_BYTES:
        flat = flat[:: max(1, array.size // SAMPLES)]
    # numpy has no bfloat16.
    return flat.astype(mx.float32) if flat.dtype == mx.bfloat16 else flat
