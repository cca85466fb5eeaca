"""ModelFingerprint: tells whether K/V were computed by the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

# Arrays of up to this many bytes are hashed whole; of larger ones a sample and the sum of each row's bits.
WHOLE_BYTES = 1 << 18
SAMPLES = 1024
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class ModelFingerprint:
    """A digest of what a model computes K/V with.

    Its parameters' names, shapes, dtypes and values (of large arrays a sample and the sums of rows), and the numbers
    and texts its modules are made with, such as a LoRA scale or a RoPE base. Computed again only when a parameter was
    replaced, as loading or removing an adapter does; an array that is changed in place is not noticed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # The arrays themselves: an id could come again.
        self._seen: Sequence[tuple[str, mx.array]] = ()
        self._digest = b""

    def forget(self) -> None:
        """Compute the digest anew next time."""
        self._digest = b""

    def digest(self) -> bytes:
        """16 bytes that are equal for equal parameters, in any process."""
        named: list[tuple[str, mx.array]] = tree_flatten(self._model.parameters())  # type: ignore[assignment]
        if not self._digest or not _same(named, self._seen):
            self._seen, self._digest = named, _digest(named, _settings(self._model))
        return self._digest


def _same(one: Sequence[tuple[str, mx.array]], other: Sequence[tuple[str, mx.array]]) -> bool:
    return len(one) == len(other) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))


def _settings(model: Any) -> list[str]:
    """What the modules of ``model`` are made with, besides arrays."""
    named: Sequence[tuple[str, Any]] = model.named_modules() if hasattr(model, "named_modules") else ()
    return sorted(
        f"{name}.{key}={value!r}"
        for name, module in named
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, int | float | str | bool | tuple)
    )


def _digest(named: Sequence[tuple[str, mx.array]], settings: Sequence[str]) -> bytes:
    contents = [_content(array) for _, array in named]
    mx.eval(contents)
    found = hashlib.blake2b("\n".join(settings).encode(), digest_size=16)
    for (name, array), content in sorted(zip(named, contents, strict=True), key=lambda item: item[0][0]):
        found.update(f"{name} {array.shape} {array.dtype};".encode())
        for part in content:
            found.update(np.asarray(part).tobytes())
    return found.digest()


def _content(array: mx.array) -> list[mx.array]:
    """What is hashed of an array: its bits (numpy has no bfloat16), or less of a large one."""
    bits = array.reshape(array.shape or (1,)).view(_BITS[array.itemsize])
    flat = bits.reshape(-1)
    if array.nbytes <= WHOLE_BYTES:
        return [flat]
    # Overflow is no matter: sums of integers are the same in any order.
    return [flat[:: max(1, array.size // SAMPLES)], bits.sum(axis=-1)]
