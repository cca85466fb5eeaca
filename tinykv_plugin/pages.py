"""LayerPages: the K and V page arrays of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import PluginError

if TYPE_CHECKING:
    from .metadata import PagedKVMetadata

# The positions each row's queries may see, as one or two ascending (start, stop): kept tokens and newest ones.
Spans = Sequence[Sequence[tuple[int, int]]]
CopyOut = Callable[["PagedKVMetadata", Spans], tuple[mx.array, mx.array]]

WRITES_PENDING = 256


@dataclass(frozen=True)
class LayerSpec:
    """Shapes of one layer's K and V: heads, head dims (K and V may differ), dtypes."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    value_dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> LayerSpec:
        """The spec of ``keys`` and ``values`` as a model passes them, ``(batch, kv_heads, tokens, head_dim)``."""
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)

    def token_bytes(self) -> int:
        """Bytes of one token's K and V."""
        return self.kv_heads * (self.key_dim * self.dtype.size + self.value_dim * self.value_dtype.size)


class LayerPages:
    """K and V pages of one layer, HND: ``(num_pages, kv_heads, page_size, head_dim)`` each.

    Nothing but this object may hold the arrays: mlx writes in place only into an array with one holder, and copies
    the whole pool otherwise. A backend that writes in place by its own primitive sets ``written``, a small array
    that a later read must depend on, and keeps ``keys`` and ``values``; ``last_read`` is the latest attention output,
    for a backend that must order a write after a pending read. ``due`` are arrays that a model wants evaluated with
    this layer's next write.

    Where a dependency alone doesn't order mlx's own operations after such a write (Metal: kernels overlap unless one
    takes what the other made), the backend also sets ``copy_out``: K and V of the rows' spans, copied together as
    :meth:`~tinykv_plugin.protocols.GatheringBackend.dense` returns them, and noted in ``last_read``.
    """

    __slots__ = ("copy_out", "due", "keys", "last_read", "page_size", "spec", "values", "writes", "written")

    def __init__(self, spec: LayerSpec, page_size: int) -> None:
        self.spec = spec
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

    def shape(self, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the K and V arrays for ``num_pages`` pages."""
        spec = self.spec
        return (
            (num_pages, spec.kv_heads, self.page_size, spec.key_dim),
            (num_pages, spec.kv_heads, self.page_size, spec.value_dim),
        )

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
        return [*(array for array in (self.keys, self.values, self.written) if array is not None), *self.due]

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
