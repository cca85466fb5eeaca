"""LayerPages: the K and V page arrays of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import PluginError
from .kv_format import Affine, KVFormat

if TYPE_CHECKING:
    from .metadata import PagedKVMetadata

# The positions each row's queries may see, as one or two ascending (start, stop): kept tokens and newest ones.
Spans = Sequence[Sequence[tuple[int, int]]]
CopyOut = Callable[["PagedKVMetadata", Spans], tuple[mx.array, mx.array]]

WRITES_PENDING = 256


@dataclass(frozen=True)
class LayerSpec:
    """Shapes of one layer's K and V: heads, head dims (K and V may differ), dtypes; and how each is packed, if it is.

    ``dtype`` and ``value_dtype`` are the model's; a packed side is stored as uint32.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    value_dtype: mx.Dtype
    keys: Affine | None = field(default=None, repr=False)
    values: Affine | None = field(default=None, repr=False)

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> LayerSpec:
        """The spec of ``keys`` and ``values`` as a model passes them, ``(batch, kv_heads, tokens, head_dim)``."""
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)

    def stored_as(self, kv_format: KVFormat) -> LayerSpec:
        """The same K and V in another format. Raises ConfigError if it can't hold them."""
        return replace(self, keys=kv_format.keys(self.key_dim), values=kv_format.values(self.value_dim))

    @property
    def stored(self) -> tuple[tuple[int, mx.Dtype], tuple[int, mx.Dtype]]:
        """Elements a head and dtype of K and of V, as they are in the pages."""
        return _stored(self.keys, self.key_dim, self.dtype), _stored(self.values, self.value_dim, self.value_dtype)

    def token_bytes(self) -> int:
        """Bytes of one token's K and V in the pages."""
        return self.kv_heads * sum(dim * dtype.size for dim, dtype in self.stored)

    @property
    def packed(self) -> bool:
        """Whether K or V is quantized."""
        return self.keys is not None or self.values is not None

    @property
    def unpacked(self) -> LayerSpec:
        """The same K and V in the model's dtypes."""
        return replace(self, keys=None, values=None)

    def model_token_bytes(self) -> int:
        """Bytes of one token's K and V as the model makes them."""
        return self.kv_heads * (self.key_dim * self.dtype.size + self.value_dim * self.value_dtype.size)

    def encode(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """K and V ``(…, head_dim)`` as they are stored."""
        return (
            keys if self.keys is None else self.keys.encode(keys),
            values if self.values is None else self.values.encode(values),
        )

    def decode(self, keys: mx.array, values: mx.array, to: mx.Dtype | None = None) -> tuple[mx.array, mx.array]:
        """Stored K and V as the model made them, but for what quantization lost; with ``to`` in that dtype."""
        return (
            _decoded(self.keys, keys, self.key_dim, self.dtype, to),
            _decoded(self.values, values, self.value_dim, self.value_dtype, to),
        )

    def storage(self) -> str:
        """How K and V are stored, in words."""
        sides = [
            str(dtype).removeprefix("mlx.core.") if packed is None else str(packed)
            for packed, dtype in ((self.keys, self.dtype), (self.values, self.value_dtype))
        ]
        return sides[0] if sides[0] == sides[1] else f"keys {sides[0]}, values {sides[1]}"


def _decoded(packed: Affine | None, rows: mx.array, dim: int, dtype: mx.Dtype, to: mx.Dtype | None) -> mx.array:
    if packed is None:
        return rows if to is None else rows.astype(to)
    return packed.decode(rows, dim, dtype, to)


def _stored(packed: Affine | None, dim: int, dtype: mx.Dtype) -> tuple[int, mx.Dtype]:
    return (dim, dtype) if packed is None else (packed.words(dim, dtype), mx.uint32)


class LayerPages:
    """K and V pages of one layer, HND: ``(num_pages, kv_heads, page_size, elements)`` each, see ``spec.stored``.

    Nothing but this object may hold the arrays: mlx writes in place only into an array with one holder, and copies
    the whole pool otherwise. A backend that writes in place by its own primitive sets ``written``, a small array
    that a later read must depend on, and keeps ``keys`` and ``values``; ``last_read`` is the latest attention output,
    for a backend that must order a write after a pending read. ``due`` are arrays that a model wants evaluated with
    this layer's next write. ``open`` are the same layer's pages in the model's dtype, where tokens are read from until
    their page is full; None if they are always read from here.

    Where a dependency alone doesn't order mlx's own operations after such a write (Metal: kernels overlap unless one
    takes what the other made), the backend also sets ``copy_out``: K and V of the rows' spans, copied together as
    :meth:`~tinykv_plugin.protocols.GatheringBackend.dense` returns them, and noted in ``last_read``.
    """

    __slots__ = (
        "copy_out",
        "due",
        "keys",
        "last_read",
        "open",
        "packed",
        "page_size",
        "spec",
        "values",
        "writes",
        "written",
    )

    def __init__(self, spec: LayerSpec, page_size: int, opens: bool = False) -> None:
        self.spec = spec
        self.open = LayerPages(spec.unpacked, page_size) if opens else None
        self.packed = spec.packed  # asked for at every write and read
        self.page_size = page_size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.written: mx.array | None = None
        self.last_read: mx.array | None = None
        self.due: list[mx.array] = []
        self.writes = 0
        self.copy_out: CopyOut | None = None

    @property
    def num_pages(self) -> int:
        """Pages the arrays have room for."""
        return 0 if self.keys is None else self.keys.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V."""
        return self.spec.token_bytes() * self.page_size

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.num_pages * self.page_bytes

    @property
    def dtypes(self) -> tuple[mx.Dtype, mx.Dtype]:
        """The dtypes of the K and V arrays."""
        (_, keys), (_, values) = self.spec.stored
        return keys, values

    def shape(self, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the K and V arrays for ``num_pages`` pages."""
        heads = self.spec.kv_heads
        (key_dim, _), (value_dim, _) = self.spec.stored
        return (num_pages, heads, self.page_size, key_dim), (num_pages, heads, self.page_size, value_dim)

    def readable(self) -> tuple[mx.array, mx.array]:
        """K and V pages as mlx operations must read them: after every write so far. Don't hold them over a write.

        What is read must be copied, and the copies be given to :meth:`note_read`. Raises PluginError if only the
        backend that writes these pages can read them.
        """
        if self.copy_out is not None:
            raise PluginError(
                "the backend that writes these pages in place must read them, too: mlx can't order others"
            )
        assert self.keys is not None
        assert self.values is not None
        if self.written is None:
            return self.keys, self.values
        keys, values = mx.depends([self.keys, self.values], self.written)
        return keys, values

    def read_page(self, page: int) -> tuple[mx.array, mx.array]:
        """Evaluated copies of a page's K and V, ``(1, kv_heads, page_size, head_dim)``."""
        keys, values = self.readable()
        # By an index: a view would be a holder of the pool's array, which the next write would have to copy.
        index = mx.array([page])
        copies = keys[index], values[index]
        mx.eval(copies)
        return copies

    def note_read(self, *copies: mx.array) -> None:
        """Order later writes in place after the reads that ``copies`` (no views) were made by.

        Only needed where a backend writes in place: mlx orders its own operations by their arrays.
        """
        if self.written is not None:
            before = [] if self.last_read is None else [self.last_read]
            self.last_read = mx.depends(self.written, [*copies, *before])

    def state(self) -> list[mx.array]:
        """Arrays whose evaluation forces every write so far."""
        own = [array for array in (self.keys, self.values, self.written) if array is not None]
        return [*own, *self.due, *(self.open.state() if self.open is not None else ())]

    def before_write(self, keys: mx.array) -> mx.array:
        """``keys`` about to be written, after what is due.

        Where a model doesn't read what it writes (an indexer, while the context is short) the writes would pile up
        unevaluated: now and then they are started.
        """
        self.writes += 1
        if self.writes % WRITES_PENDING == 0:
            mx.async_eval(self.state())  # type: ignore[no-untyped-call]
        if self.due:
            keys = mx.depends(keys, self.due)
            self.due = []
        return keys
