"""The attention backend "metal": reads pages through the block table, and writes them in place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

    from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
    from tinykv_plugin.pages import LayerPages
    from tinykv_plugin.protocols import AttentionRequest

    from .kernels import Kernels


class MetalBackend:
    """Reads and writes pages by Metal kernels that mlx compiles at first use.

    Pages are written in place. What orders reads and writes is a token: each write leaves one in ``pages.written``
    and each read one in ``pages.last_read``, and later kernels take both as inputs. mlx's own operations can't, so
    ``pages.copy_out`` copies tokens together for them.
    """

    name = "metal"
    direct = True
    priority = 10
    features = frozenset({"softcap", "keys_only", "open_page"})
    reads_quantized = True

    @functools.cached_property
    def kernels(self) -> Kernels:
        """The kernels; loaded late, as listing plugins must not load mlx."""
        from .kernels import Kernels

        return Kernels()

    def supports(self, request: AttentionRequest) -> list[str]:
        """Reasons why this backend can't serve ``request`` here; empty if it can."""
        from . import device
        from .limits import reasons

        problem = device.problem()
        return [problem] if problem else reasons(request)

    def selftest_key(self) -> str:
        """What the outcome of a self-test holds for: this device, this system and these kernels."""
        from . import device

        return f"{device.name()}; {self.kernels.fingerprint}"

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        """Give ``pages`` room for ``num_pages`` pages, evaluated; what is in the first pages stays.

        Raises MemoryError or RuntimeError with ``pages`` unchanged.
        """
        import mlx.core as mx

        if num_pages == 0:
            pages.keys = pages.values = pages.written = pages.last_read = pages.copy_out = None
            return
        mx.eval([token for token in (pages.written, pages.last_read) if token is not None])
        key_shape, value_shape = pages.shape(num_pages)
        key_dtype, value_dtype = pages.dtypes
        keys = _resized(pages.keys, key_shape, key_dtype)
        values = _resized(pages.values, value_shape, value_dtype)
        mx.eval(keys, values)
        # ``last_read`` stays: with a few pages fewer, mlx may go on with the same buffer.
        pages.keys, pages.values = keys, values
        pages.copy_out = self._copy_out

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        """Put new tokens, as the pages store them, into the slots of ``metadata``, after all reads."""
        self._changed(metadata.pages, self.kernels.write(metadata.pages, metadata.slot_mapping, keys, values))

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in order."""
        if pages.keys is None:
            return
        for moves in _independent(sources, targets):
            self._changed(pages, self.kernels.copy(pages, moves))

    def attend(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        *,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
        softcap: float | None = None,
    ) -> mx.array:
        """Attention of ``queries`` over each row's pages, ``(batch, query_heads, tokens, value_dim)``.

        With ``mask`` None a query sees its whole row, within the window. An array ``(…, tokens, positions)``, boolean
        or added to the scores, has a column for each position of the longest row at least. ``softcap`` c makes
        scores ``c * tanh(score / c)``, before the mask.
        """
        output, token = self.kernels.attend(queries, metadata, scale, mask, sinks, softcap)
        metadata.pages.last_read = token
        if metadata.open is not None:
            metadata.open.pages.last_read = token
        return output

    def _copy_out(
        self, metadata: PagedKVMetadata, spans: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[mx.array, mx.array]:
        keys, values, metadata.pages.last_read = self.kernels.gather(metadata, spans)
        return keys, values

    def _changed(self, pages: LayerPages, token: mx.array) -> None:
        pages.written = token
        pages.last_read = None  # the token comes after it


def _resized(old: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array of ``shape`` that begins with what ``old`` holds, as far as there is room."""
    import mlx.core as mx

    if old is None:
        return mx.zeros(shape, dtype)
    more = shape[0] - old.shape[0]
    if more > 0:
        return mx.pad(old, [(0, more)] + 3 * [(0, 0)])
    return old if more == 0 else mx.contiguous(old[: shape[0]])


def _independent(sources: Sequence[int], targets: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The copies in order, cut so that in no part a page is touched that an earlier copy of the part wrote."""
    parts: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in zip(sources, targets, strict=True):
        if not parts or source in written or target in written or target in read:
            parts.append([])
            read, written = set(), set()
        parts[-1].append((source, target))
        read.add(source)
        written.add(target)
    return parts
