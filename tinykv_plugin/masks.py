"""What ``make_mask`` answers, and the array masks of keys that were copied together."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .metadata import PagedMask

Bools = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


def prior_tokens(start: int, window: int | None) -> int:
    """How many earlier tokens stand before a step's own in gathered keys: all, or what the window can reach."""
    return start if window is None else min(start, window - 1)


def sequence_mask(
    count: int,
    start: int,
    window: int | None,
    handles: bool,
    return_array: bool,
    window_size: int | None,
    keep: int = 0,
    chunk: int | None = None,
) -> mx.array | str | PagedMask | None:
    """The mask for ``count`` tokens after ``start`` others, as mlx-lm's caches answer for one sequence.

    ``window`` is the cache's own, ``window_size`` the model's argument; with ``chunk`` only the query's own chunk of
    that many positions is seen. With ``handles`` a PagedMask stands for an array; without, the array's columns are the
    gathered keys: :func:`prior_tokens` earlier ones and the new ones. ``keep`` is :func:`causal_array`'s.
    """
    sizes = [size for size in (window, window_size) if size is not None]
    prior = prior_tokens(start, window)
    if chunk is not None and start + count > chunk:
        limit = min([*sizes, chunk])
        if handles and not return_array:
            return PagedMask(limit, chunk)
        return mx.array(_causal(count, prior, limit, start, chunk))
    if not sizes:
        if count == 1:
            return None
        return causal_array(count, start, None) if return_array else "causal"
    limit = min(sizes)
    if limit != window:
        keep = 0  # the model itself looks back no further
    reaches_all = prior + count <= limit
    if count == 1:
        # The cache's own window is exact without a mask.
        if reaches_all or window_size is None or limit == window:
            return None
        return PagedMask(limit) if handles and not return_array else causal_array(1, prior, limit)
    if return_array:
        return causal_array(count, prior, limit, keep)
    if reaches_all:
        return "causal"
    return PagedMask(limit) if handles else causal_array(count, prior, limit, keep)


def causal_array(
    count: int, prior: int, window: int | None, keep: int = 0, start: int = 0, chunk: int | None = None
) -> mx.array:
    """Boolean ``(count, prior + count)``: query i, at column ``prior + i``, sees the ``window`` columns up to it.

    With ``keep``, the first columns are among those that each query sees, as if the queries came one by one. With
    ``chunk``, a query sees the columns of its own chunk only; query 0 is at position ``start``.
    """
    seen = _causal(count, prior, window, start, chunk)
    if keep and window is not None:
        seen = _causal(count, prior, window - keep)
        seen[:, : min(keep, prior)] = True
    return mx.array(seen)


def row_masks(
    width: int,
    priors: Sequence[int],
    query_lens: Sequence[int],
    columns: int,
    window: int | None,
    causal: bool,
    starts: Sequence[int] | None = None,
    chunk: int | None = None,
) -> mx.array:
    """Boolean ``(rows, 1, width, columns)``: :func:`causal_array` of each row, right-padded to one shape.

    A padding query sees the row's first column, so that its softmax has something to normalise. Without ``causal``
    every query sees all of its row's columns. ``chunk`` needs the rows' ``starts``.
    """
    masks = np.zeros((len(priors), 1, width, columns), dtype=bool)
    masks[..., 0] = True
    for row, (mask, prior, count) in enumerate(zip(masks, priors, query_lens, strict=True)):
        start = 0 if starts is None else starts[row]
        mask[0, :count, : prior + count] = _causal(count, prior, window, start, chunk) if causal else True
    return mx.array(masks)


def _causal(count: int, prior: int, window: int | None, start: int = 0, chunk: int | None = None) -> Bools:
    queries, columns = np.arange(prior, prior + count)[:, None], np.arange(prior + count)[None]
    seen: Bools = columns <= queries
    if window is not None:
        seen &= columns > queries - window
    if chunk is not None:
        first = start - prior  # the position of column 0
        seen = seen & ((queries + first) // chunk == (columns + first) // chunk)
    return seen
