"""One comparison of a backend with gather, on a small input with everything that happens to pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..pages import LayerPages
from ..protocols import AttentionBackend, AttentionRequest
from .sample import Sample

# Largest difference from gather in float32, relative where the result is above 1: some roundings of the output.
ALLOWED = {mx.float32: 1e-3, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@dataclass(frozen=True)
class Comparison:
    """``error`` is the largest difference, ``allowed`` the limit; ``problem`` says what is wrong ("": nothing)."""

    error: float
    allowed: float
    problem: str


# Tokens of the longest row: larger windows and chunks are compared as if they were a little smaller than this.
LONGEST = 16384


def samples_of(request: AttentionRequest) -> list[list[int]]:
    """Contexts of the rows: a short row alone, nine of which one has more than a part of a kernel, a long one alone.

    Some row has more tokens than a window or a chunk.
    """
    size = request.page_size
    samples = [[40], [530, 1, size, size + 1, 7, 40, 2, 100, 2 * size]]
    reach = max(request.window or 0, request.chunk or 0)
    return samples if reach <= 500 else [*samples, [min(LONGEST, reach + 61)]]


def comparable(request: AttentionRequest) -> AttentionRequest:
    """``request`` with a window and a chunk that a sample's rows are longer than."""
    most = LONGEST - 61
    return replace(
        request,
        window=None if request.window is None else min(request.window, most),
        chunk=None if request.chunk is None else min(request.chunk, most),
    )


def compare(backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest) -> Comparison:
    """Compare ``backend`` with ``gather`` in calls of the kind of ``request``. Never raises."""
    allowed = ALLOWED.get(request.dtype, ALLOWED[mx.bfloat16])
    request = comparable(request)
    worst = 0.0
    try:
        for contexts in samples_of(request):
            for got, right in zip(
                _results(backend, gather, request, contexts), _references(gather, request, contexts), strict=True
            ):
                worst = max(worst, _difference(got, right))
                if not worst <= allowed:
                    return Comparison(worst, allowed, f"its result differs from gather's by {worst:.1g}")
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Comparison(float("nan"), allowed, f"it fails: {type(error).__name__}: {lines[0] if lines else ''}")
    return Comparison(worst, allowed, "")


def _results(
    backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest, contexts: Sequence[int]
) -> list[mx.array]:
    """What pages hold first; after they were overwritten with that read still pending; after they were copied.

    The first with each mask; last what gather finds in the pages, as it does for a prefill.
    """
    sample = Sample(request, contexts)
    masks = sample.masks()
    pages = sample.pages(backend)
    sample.write(backend, pages)
    first = [sample.attend(backend, pages, mask) for mask in masks]
    sample.write(backend, pages, 1)
    second = sample.attend(backend, pages, masks[0])
    mx.eval(second, first)
    sample.resize(backend, pages, sample.num_pages + 1)
    sample.copy_page(backend, pages, 0, sample.num_pages)
    sample.write(backend, pages)
    sample.copy_page(backend, pages, sample.num_pages, 0)
    third = sample.attend(backend, pages, masks[0])
    dense = sample.dense(gather, pages)
    mx.eval(third, dense)
    return [*(sample.valid(output) for output in (*first, second, third)), *dense]


def _references(gather: AttentionBackend, request: AttentionRequest, contexts: Sequence[int]) -> list[mx.array]:
    """The same by gather in float32, evaluated step by step."""
    sample = Sample(request, contexts)
    masks = sample.masks()
    pages = sample.pages(gather, mx.float32)
    results = []
    for which, some in ((0, masks), (1, masks[:1])):
        sample.write(gather, pages, which)
        results += [sample.attend(gather, pages, mask) for mask in some]
        mx.eval(results)
    stores = [pages] if pages.open is None else [pages, pages.open]
    kept = [_page(store, 0) for store in stores]
    sample.write(gather, pages)
    for store, page in zip(stores, kept, strict=True):
        assert store.keys is not None
        assert store.values is not None
        store.keys[0], store.values[0] = page
    results.append(sample.attend(gather, pages, masks[0]))
    dense = sample.dense(gather, pages)
    mx.eval(results[-1], dense)
    return [*(sample.valid(output) for output in results), *dense]


def _page(pages: LayerPages, index: int) -> tuple[mx.array, mx.array]:
    assert pages.keys is not None
    assert pages.values is not None
    page = mx.array(pages.keys[index]), mx.array(pages.values[index])
    mx.eval(page)
    return page


def _difference(got: mx.array, right: mx.array) -> float:
    """The largest difference; infinite if one isn't a number or shapes differ."""
    if got.shape != right.shape:
        return float("inf")
    difference = mx.abs(got.astype(mx.float32) - right) / mx.maximum(1, mx.abs(right))
    return float(mx.where(mx.isnan(difference), mx.inf, difference).max())
