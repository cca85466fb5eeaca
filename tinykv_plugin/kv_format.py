"""KVFormat: how K and V are stored in pages, in the model's dtype or in mlx's affine quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import KVCacheConfig

GROUP_SIZES = (128, 64, 32)
"""What mlx can quantize with."""

USUAL_GROUP_SIZE = 64

CLOSED_BITS = 8
"""From so many bits on a token is as well read rounded while its page is being filled (benchmarks/open_page.py)."""


@dataclass(frozen=True)
class KVFormat:
    """What the settings ask for: bits of keys and of values (None: the model's dtype), and the group size.

    ``group_size`` elements share a scale and a bias (None: 64, or 32 where that divides the head dim and 64 doesn't).
    Tokens before position ``start`` read in the model's dtype.
    Hashable: pages of different formats must never be taken for each other.
    """

    key_bits: int | None = None
    value_bits: int | None = None
    group_size: int | None = None
    start: int = 0

    @classmethod
    def of(cls, config: KVCacheConfig) -> KVFormat:
        """The format that the settings ask for."""
        key_bits, value_bits = config.key_bits or config.bits, config.value_bits or config.bits
        if not key_bits and not value_bits:
            return cls()
        return cls(key_bits, value_bits, config.group_size, config.quantized_start)

    @property
    def quantized(self) -> bool:
        """Whether keys or values are."""
        return self.key_bits is not None or self.value_bits is not None

    @property
    def opens(self) -> bool:
        """Whether tokens are read in the model's dtype until their page is full.

        With few bits most of what is lost is lost in the tokens just before the one that reads them.
        """
        return self.start > 0 or any(
            bits is not None and bits < CLOSED_BITS for bits in (self.key_bits, self.value_bits)
        )

    def keys(self, dim: int) -> Affine | None:
        """How keys of ``dim`` elements are packed; None: not at all. Raises ConfigError if no group size divides."""
        return self._side("keys", self.key_bits, dim)

    def values(self, dim: int) -> Affine | None:
        """As :meth:`keys`, for values."""
        return self._side("values", self.value_bits, dim)

    def _side(self, side: str, bits: int | None, dim: int) -> Affine | None:
        if bits is None or not dim:
            return None
        fitting = [size for size in GROUP_SIZES if dim % size == 0]
        if not fitting:
            raise ConfigError(
                "bits",
                f"{bits} is not possible here: the model's {side} have {dim} elements a head, which no group size of "
                f"mlx ({', '.join(map(str, reversed(GROUP_SIZES)))}) divides; leave bits unset for this model",
            )
        wanted = self.group_size or next(size for size in (USUAL_GROUP_SIZE, *reversed(fitting)) if size in fitting)
        if wanted not in fitting:
            raise ConfigError(
                "group_size",
                f"{wanted} doesn't divide the {dim} elements of the model's {side}: it must be one of "
                f"{', '.join(map(str, reversed(fitting)))}",
            )
        return Affine(bits, wanted)


@dataclass(frozen=True)
class Affine:
    """mlx's affine quantization of a token's elements in one head, as one row of 32-bit words.

    A row is what ``mx.quantize(x, group_size, bits)`` returns, one after the other: packed elements, scales, biases,
    the latter two in the dtype of ``x``. An element is ``scale * q + bias`` of its group.
    """

    bits: int
    group_size: int

    def words(self, dim: int, dtype: mx.Dtype) -> int:
        """Words of a row of ``dim`` elements that were ``dtype``."""
        return self.packed_words(dim) + 2 * (dim // self.group_size) * dtype.size // 4

    def packed_words(self, dim: int) -> int:
        """Words of a row before its scales."""
        return dim * self.bits // 32

    def encode(self, x: mx.array) -> mx.array:
        """``(…, dim)`` as uint32 rows ``(…, words)``."""
        return self.join(*mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def decode(self, rows: mx.array, dim: int, dtype: mx.Dtype, to: mx.Dtype | None = None) -> mx.array:
        """Rows ``(…, words)`` as ``(…, dim)`` in ``dtype``, the one they were made of, or computed in another one."""
        packed, scales, biases = self.split(rows, dim, dtype)
        if to is not None:
            scales, biases = scales.astype(to), biases.astype(to)
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)

    def join(self, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """Rows of what ``mx.quantize`` returned."""
        return mx.concatenate([packed, mx.concatenate([scales, biases], axis=-1).view(mx.uint32)], axis=-1)

    def split(self, rows: mx.array, dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
        """Packed elements, scales and biases, as ``mx.dequantize`` takes them."""
        packed = self.packed_words(dim)
        scales, biases = mx.split(rows[..., packed:].view(dtype), 2, axis=-1)
        return rows[..., :packed], scales, biases

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"
