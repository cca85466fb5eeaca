"""The gather backend: pages copied together by mlx operations, then mlx's own attention. Serves everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .arrays import attend_arrays
from .columns import Buckets, Spans, buckets_of, column_count, page_columns, token_columns, visible
from .hookspecs import hookimpl
from .masks import causal_array, prior_tokens, row_masks
from .metadata import PagedKVMetadata, PagedMask, int32
from .open_columns import with_open
from .step import GroupStep

if TYPE_CHECKING:
    from .pages import LayerPages
    from .protocols import AttentionBackend, AttentionRequest


class GatherBackend:
    """The reference: exact on every device, at the price of copying the context once a step and layer.

    Writes are mlx scatters that are donated the pool's buffer: in place when nothing pending reads it, else a copy.
    """

    name = "gather"
    direct = False
    priority = 0
    features = frozenset({"softcap", "chunk", "keys_only", "open_page"})
    reads_quantized = True

    def supports(self, request: AttentionRequest) -> list[str]:
        """Nothing is refused."""
        return []

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        """Give ``pages`` other arrays, evaluated, with what was in the first pages. Modifies ``pages``."""
        shapes = pages.shape(num_pages)
        for side, shape, dtype in zip(("keys", "values"), shapes, pages.dtypes, strict=True):
            old: mx.array | None = getattr(pages, side)
            if num_pages == 0:
                setattr(pages, side, None)
            elif old is None:
                new = mx.zeros(shape, dtype)
                mx.eval(new)
                setattr(pages, side, new)
            elif old.shape[0] != num_pages:
                more = num_pages - old.shape[0]
                kept = mx.pad(old, [(0, more)] + 3 * [(0, 0)]) if more > 0 else old[mx.arange(num_pages)]
                mx.eval(kept)
                setattr(pages, side, kept)

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        """Scatter new tokens, as the pages store them, into the slots of ``metadata``. Modifies its pages."""
        step, pages = metadata.step, metadata.pages
        assert pages.keys is not None
        assert pages.values is not None
        if step.alone and step.width == 1:
            # The usual decode step: one slot, known on the host; K and V have the shape of its place in the pages.
            place = step.cached("slot", lambda: mx.array(_one_slot(step), mx.int32))
            pages.keys = mx.slice_update(pages.keys, keys, place, (0, 2))
            if values.size:
                pages.values = mx.slice_update(pages.values, values, place, (0, 2))
            return
        page_ids, slots, tokens = step.cached("scatter", lambda: _scatter(step))
        if page_ids.size:
            pages.keys[page_ids, :, slots] = _by_token(keys, tokens)
            if values.size:
                pages.values[page_ids, :, slots] = _by_token(values, tokens)

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in order. Modifies ``pages``."""
        if pages.keys is None or pages.values is None:
            return
        # At once, unless a page is copied that was copied to before, or is copied to twice.
        at_once = set(sources).isdisjoint(targets) and len(set(targets)) == len(targets)
        for start, stop in [(0, len(sources))] if at_once else [(i, i + 1) for i in range(len(sources))]:
            index, place = int32(sources[start:stop]), int32(targets[start:stop])
            keys = pages.keys[index]
            values = pages.values[index] if pages.spec.value_dim else None
            # Read before the write is made: mlx copies a whole pool that it writes to while a read of it is pending.
            mx.eval(keys, values)
            pages.keys[place] = keys
            if values is not None:
                pages.values[place] = values

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
        """Attention by mlx over copies of each row's tokens, ``(batch, query_heads, tokens, value_dim)``.

        Rows of unlike length are divided, so that padding stays small.
        """
        step = metadata.step
        if not step.alone:
            buckets = step.cached("buckets", lambda: buckets_of(step))
            if len(buckets.parts) > 1:
                return self._attend_buckets(queries, metadata, buckets, scale, mask, sinks, softcap)
        keys, values = self.dense(metadata)
        opened = metadata.open
        if mask is not None or not step.alone:
            mask = _array_mask(step, mask)
        if opened is not None:
            keys, values, mask = with_open(metadata, opened, keys, values, mask)
        return attend_arrays(queries, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)

    def dense(self, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
        """K and V ``(batch, kv_heads, columns, head_dim)`` of what the step's queries may see, dequantized."""
        keys, values = self.stored(metadata)
        return metadata.pages.spec.decode(keys, values) if metadata.pages.packed else (keys, values)

    def stored(self, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
        """As :meth:`dense`, but ``(batch, kv_heads, columns, elements)`` as the pages store them."""
        step = metadata.step
        pages = metadata.pages
        if pages.copy_out is not None:
            return pages.copy_out(
                metadata, step.cached("visible", lambda: [visible(step, row) for row in range(len(step.tables))])
            )
        keys, values = pages.readable()
        if step.alone:
            # A single run of pages can be joined by a view, which a write in place would show through.
            views = pages.written is None
            spans = step.cached(("spans", views), lambda: Spans(step, views))
            keys, values = spans.join(keys, step), spans.join(values, step)
        else:
            columns = step.cached("columns", lambda: page_columns(step) if step.window is None else token_columns(step))
            keys, values = columns.of(keys), columns.of(values)
        if pages.written is not None:
            pages.note_read(keys, values)
        return keys, values

    def _attend_buckets(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        buckets: Buckets,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
        softcap: float | None,
    ) -> mx.array:
        outputs = []
        for rows, part in buckets.parts:
            part_mask = mask
            if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] == queries.shape[0]:
                part_mask = mask[rows]
            if isinstance(part_mask, mx.array):
                part_mask = part_mask[..., : column_count(part)]
            outputs.append(
                self.attend(queries[rows], metadata.of(part), scale=scale, mask=part_mask, sinks=sinks, softcap=softcap)
            )
        return mx.concatenate(outputs)[buckets.order]


def _one_slot(step: GroupStep) -> tuple[int, int]:
    position = step.context_lens[0] - 1
    return step.tables[0].pages[position // step.page_size], position % step.page_size


def _scatter(step: GroupStep) -> tuple[mx.array, mx.array, mx.array | None]:
    """Page ids and slots of the valid new tokens, and their places in the flattened tensors (None: all of them)."""
    slots = step.slots().reshape(-1)
    tokens = np.flatnonzero(slots >= 0)
    kept = slots[tokens]
    return (
        int32(kept // step.page_size),
        int32(kept % step.page_size),
        None if len(tokens) == len(slots) else int32(tokens),
    )


def _by_token(tensor: mx.array, tokens: mx.array | None) -> mx.array:
    """``(batch, heads, tokens, dim)`` as ``(token, heads, dim)``, only ``tokens`` if given."""
    batch, heads, width, dim = tensor.shape
    flat = tensor.transpose(0, 2, 1, 3).reshape(batch * width, heads, dim)
    return flat if tokens is None else flat[tokens]


def _array_mask(step: GroupStep, mask: mx.array | str | PagedMask | None) -> mx.array | str | None:
    """The mask over gathered columns; the cache's own window is exact in the columns and needs none for one token."""
    if isinstance(mask, mx.array) or (mask is None and step.alone):
        return mask
    if step.alone and step.window is None and isinstance(mask, str):
        return mask if step.width > 1 else None
    limit = mask.window if isinstance(mask, PagedMask) else step.window if isinstance(mask, str) else None
    chunk = mask.chunk if isinstance(mask, PagedMask) else None
    causal = mask is not None or step.width == 1
    keep = step.keep if step.stepwise and limit == step.window else 0

    def make() -> mx.array | str | None:
        priors = [prior_tokens(start, step.window) for start in step.starts]
        if not step.alone:
            columns = max(1, max(prior + query for prior, query in zip(priors, step.query_lens, strict=True)))
            return row_masks(step.width, priors, step.query_lens, columns, limit, causal, step.starts, chunk)
        if chunk is not None or (limit is not None and priors[0] + step.width > limit):
            return causal_array(step.width, priors[0], limit, keep, step.starts[0], chunk)
        return "causal" if step.width > 1 else None

    return step.cached(("mask", limit, causal, chunk), make)


_BACKEND = GatherBackend()


@hookimpl
def tinykv_attention_backends() -> list[AttentionBackend]:
    """The backend of last resort."""
    return [_BACKEND]
