"""One comparison of a backend with gather, on a small input with everything that happens to pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def samples_of(request: AttentionRequest) -> list[list[int]]:
    """Contexts of the rows: a short row alone, and nine rows of which one has more than a part of a kernel."""
    size = request.page_size
    return [[40], [530, 1, size, size + 1, 7, 40, 2, 100, 2 * size]]


def compare(backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest) -> Comparison:
    """Compare ``backend`` with ``gather`` in calls of the kind of ``request``. Never raises."""
    allowed = ALLOWED.get(request.dtype, ALLOWED[mx.bfloat16])
    worst = 0.0
    try:
        for contexts in samples_of(request):
            for got, right in zip(
                _results(backend, request, contexts), _references(gather, request, contexts), strict=True
            ):
                worst = max(worst, _difference(got, right))
                if not worst <= allowed:
                    return Comparison(worst, allowed, f"its result differs from gather's by {worst:.1g}")
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Comparison(float("nan"), allowed, f"it fails: {type(error).__name__}: {lines[0] if lines else ''}")
    return Comparison(worst, allowed, "")


def _results(backend: AttentionBackend, request: AttentionRequest, contexts: Sequence[int]) -> list[mx.array]:
    """What pages hold first; after they were overwritten with that read still pending; after they were copied."""
    sample = Sample(request, contexts)
    pages = sample.pages(backend)
    sample.write(backend, pages)
    first = sample.attend(backend, pages)
    sample.write(backend, pages, 1)
    second = sample.attend(backend, pages)
    mx.eval(second, first)
    backend.resize(pages, sample.num_pages + 1)
    backend.copy_pages(pages, [0], [sample.num_pages])
    sample.write(backend, pages)
    backend.copy_pages(pages, [sample.num_pages], [0])
    third = sample.attend(backend, pages)
    mx.eval(third)
    return [sample.valid(output) for output in (first, second, third)]


def _references(gather: AttentionBackend, request: AttentionRequest, contexts: Sequence[int]) -> list[mx.array]:
    """The same by gather in float32, evaluated step by step."""
    sample = Sample(request, contexts)
    pages = sample.pages(gather, mx.float32)
    results = []
    for which in (0, 1):
        sample.write(gather, pages, which)
        results.append(sample.attend(gather, pages))
        mx.eval(results[-1])
    page = _page(pages, 0)
    sample.write(gather, pages)
    assert pages.keys is not None
    assert pages.values is not None
    pages.keys[0], pages.values[0] = page
    results.append(sample.attend(gather, pages))
    mx.eval(results[-1])
    return [sample.valid(output) for output in results]


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
