"""The attention backend "cpu": reads pages through the block table, and writes them in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from tinykv_plugin.config import KVCacheConfig
    from tinykv_plugin.kv_format import Affine
    from tinykv_plugin.metadata import PagedKVMetadata, PagedMask
    from tinykv_plugin.pages import LayerPages
    from tinykv_plugin.protocols import AttentionRequest

_DIM_STEP = 8
_MOST_DIM = 1024


class CpuBackend:
    """Reads and writes pages by compiled operations of mlx's graph.

    Pages are written in place, whatever else holds their arrays. What orders reads and writes is a token: each write
    leaves one in ``pages.written`` and each read one in ``pages.last_read``, and later ones take them as inputs.
    """

    name = "cpu"
    direct = True
    priority = 10
    features = frozenset({"softcap", "keys_only", "open_page"})
    reads_quantized = True

    def supports(self, request: AttentionRequest) -> list[str]:
        """Reasons why this backend can't serve ``request`` here; empty if it can."""
        import mlx.core as mx

        from .extension import extension

        problem = extension().problem
        if problem:
            return [problem]
        reasons = []
        if mx.default_device().type != mx.DeviceType.cpu:
            reasons.append(f"mlx computes on {mx.default_device()} here")
        if request.dtype not in (mx.float32, mx.bfloat16, mx.float16):
            reasons.append(f"dtype {request.dtype} (float32, bfloat16 and float16 are supported)")
        for what, dim in (("key", request.key_dim), ("value", request.value_dim)):
            if dim % _DIM_STEP or not 0 < dim <= _MOST_DIM:
                reasons.append(f"{what} dim {dim} (multiples of {_DIM_STEP} up to {_MOST_DIM} are supported)")
        if request.query_heads % request.kv_heads:
            reasons.append(f"{request.query_heads} query heads don't share {request.kv_heads} kv heads evenly")
        if request.keep and request.query_len > 1:
            reasons.append(f"keep={request.keep} with {request.query_len} query tokens per row (one is supported)")
        if request.mask == "array" and request.window is not None:
            reasons.append("an array as mask together with a window")
        if request.open_page:
            if request.query_len > 1 and request.mask != "causal":
                reasons.append(f"open pages with {request.query_len} query tokens per row that aren't causal")
            if request.keep > request.page_size:
                reasons.append(f"open pages of {request.page_size} tokens with keep={request.keep}")
        if request.window is not None and request.window <= request.keep:
            reasons.append(f"window {request.window} is not more than keep={request.keep}")
        return reasons

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        """Give ``pages`` room for ``num_pages`` pages; what is in the first pages stays where it is.

        Address space is reserved at the first call, for as much as the machine has memory; the system gives memory for
        a page when it is written, and gets it back when there are fewer pages again.
        Raises MemoryError with ``pages`` unchanged.
        """
        native = self._native()
        if num_pages == 0:
            pages.keys = pages.values = pages.written = pages.last_read = None
            return
        if pages.keys is not None and (num_pages < pages.num_pages or not native.fits(pages.keys, num_pages)):
            self.wait(pages)  # pages have to be copied, or lose their memory
        key_shape, value_shape = pages.shape(num_pages)
        key_dtype, value_dtype = pages.dtypes
        keys = native.resize_pages(pages.keys, list(key_shape), key_dtype, 0)
        if pages.spec.value_dim:
            values = native.resize_pages(pages.values, list(value_shape), value_dtype, 0)
        else:
            import mlx.core as mx

            values = mx.zeros(value_shape, value_dtype)
        pages.keys, pages.values = keys, values

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        """Put new tokens, as the pages store them, into the slots of ``metadata``, after all reads."""
        pages = metadata.pages
        self._changed(
            pages,
            self._native().write_pages(
                pages.keys,
                _values_of(pages),
                metadata.slot_mapping,
                keys,
                values if pages.spec.value_dim else keys,
                written=pages.written,
                last_read=pages.last_read,
            ),
        )

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in order."""
        if pages.keys is None:
            return
        self._changed(
            pages,
            self._native().copy_pages(
                pages.keys,
                _values_of(pages),
                list(sources),
                list(targets),
                written=pages.written,
                last_read=pages.last_read,
            ),
        )

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
        or added to the scores, has a column for each position of the longest row at least.
        """
        import mlx.core as mx

        pages, opened = metadata.pages, metadata.open
        window, keep, array = metadata.window, metadata.keep, None
        if isinstance(mask, mx.array):
            array = mask
        elif isinstance(mask, str):
            if mask != "causal":
                raise ValueError(f"mask {mask!r} is not known; there is 'causal'")
        elif mask is not None and (window is None or mask.window < window):
            # A model that looks back less far than its cache doesn't see what the cache keeps.
            window, keep = mask.window, 0
        output: mx.array
        output, pages.last_read = self._native().attend(
            queries,
            pages.keys,
            pages.values,
            metadata.page_ids,
            metadata.context_lens,
            metadata.query_lens,
            row_starts=metadata.row_starts,
            scale=scale,
            causal=mask is not None and array is None,
            window=window or 0,
            keep=keep,
            softcap=softcap or 0.0,
            keys=_packing(pages.spec.keys, pages.spec.key_dim, pages.spec.dtype),
            values=_packing(pages.spec.values, pages.spec.value_dim, pages.spec.value_dtype),
            mask=array,
            sinks=sinks,
            written=pages.written,
            last_read=pages.last_read,
            open=None if opened is None else _open_rows(opened),
        )
        if opened is not None:
            opened.pages.last_read = pages.last_read
        return output

    def wait(self, pages: LayerPages) -> None:
        """Evaluate the reads and writes of ``pages`` so far."""
        import mlx.core as mx

        mx.eval([token for token in (pages.written, pages.last_read) if token is not None])

    @property
    def threads(self) -> int:
        """Threads that share the work of one operation."""
        return int(self._native().threads())

    def configure(self, config: KVCacheConfig) -> None:
        """Take over the setting ``threads``, for the whole process."""
        from .extension import extension

        if config.threads is not None and not extension().problem:
            self.set_threads(config.threads)

    def set_threads(self, threads: int) -> None:
        """Use ``threads`` threads from now on in the whole process; 0 for one per processor."""
        self._native().set_threads(threads)

    def _changed(self, pages: LayerPages, token: mx.array) -> None:
        pages.written = token
        pages.last_read = None  # the token comes after it

    def _native(self) -> Any:
        from .extension import extension

        loaded = extension()
        if loaded.module is None:
            raise RuntimeError(f"the backend {self.name!r} can't be used: {loaded.problem}")
        return loaded.module


def _values_of(pages: LayerPages) -> mx.array | None:
    """The pages that values are written to: those of the keys, once more, where a model keeps keys only."""
    return pages.values if pages.spec.value_dim else pages.keys


def _open_rows(opened: PagedKVMetadata) -> tuple[mx.array | None, ...]:
    """Open pages as the compiled operation takes them."""
    pages = opened.pages
    rows = opened.page_ids, opened.row_starts, opened.step.full_until()
    return pages.keys, pages.values, *rows, pages.written, pages.last_read


def _packing(packed: Affine | None, dim: int, dtype: mx.Dtype) -> tuple[int, int, int, mx.Dtype] | None:
    return None if packed is None else (packed.bits, packed.group_size, dim, dtype)
