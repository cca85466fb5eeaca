"""PagedLayer: how one layer's K/V are kept and which backend reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .chunks import segments_of, without_chunk
from .errors import HandleTouchedError
from .metadata import PagedKV, PagedKVMetadata, PagedMask
from .pages import LayerPages, LayerSpec
from .protocols import AttentionBackend, AttentionRequest, LayerChoice, LayerPlan, MaskKind
from .selftest.outcomes import Outcome
from .selftest.trial import Trial, try_out
from .table import PageTable

if TYPE_CHECKING:
    from .step import GroupStep


class NotSerializable:
    """A leaf of ``state`` that makes mlx-lm's save_prompt_cache refuse instead of writing the whole pool."""

    def __repr__(self) -> str:
        return "a paged KV cache; save it with tinykv_plugin.save_prompt_cache"


_NOT_SERIALIZABLE = NotSerializable()


@dataclass(frozen=True)
class Reader:
    """Who serves a kind of call: ``refusals`` are of backends before it, ``outcome`` says when gather is faster."""

    backend: AttentionBackend
    refusals: tuple[str, ...]
    outcome: Outcome | None

    def timings(self) -> str:
        """What the self-test's timings change, for the plan."""
        if self.outcome is None:
            return ""
        single, batch = self.outcome.gather_below, self.outcome.gather_below_batch
        return f"gathered below {single:,} tokens (a batch: {batch:,}), where that was faster in the self-test"


class PagedLayer:
    """One leaf of the model's cache list whose K/V are in pages.

    ``handles``: the model gets PagedKV handles and attention reads pages; otherwise (the model does something else
    with keys or values) it gets gathered arrays. ``reason`` says why. ``group`` is the index of its cache group. If it
    ``opens``, a query reads its own page in the model's dtype.
    """

    def __init__(
        self, index: int, choice: LayerChoice, group: int, handles: bool, reason: str, spec: LayerSpec | None
    ) -> None:
        self.index = index
        self.bit = 1 << index
        self.choice = choice
        self.group = group
        self.handles = handles
        self.opens = False
        self.reason = reason
        self.spec = spec
        self.pages: LayerPages | None = None
        self.request: AttentionRequest | None = None  # its decode step, as the dry trace saw it
        self.backends: Sequence[AttentionBackend] = ()
        self._readers: dict[tuple[object, ...], Reader] = {}

    @property
    def chunk(self) -> int | None:
        """Positions of a chunk, if a query sees its own chunk only."""
        return self.choice.window if self.choice.kind == "chunked" else None

    def handed_out(self, metadata: PagedKVMetadata) -> tuple[PagedKV, PagedKV]:
        """The handles of a step."""
        return PagedKV(self, metadata, "keys"), PagedKV(self, metadata, "values")

    def state(self) -> list[Any]:
        """What mlx-lm evaluates as a cache's ``state``: it forces every write to this layer, and can't be saved."""
        return [*(self.pages.state() if self.pages is not None else []), _NOT_SERIALIZABLE]

    def held_bytes(self, tables: Sequence[PageTable]) -> int:
        """Bytes of this layer's pages that ``tables`` list, each page once."""
        if self.pages is None:
            return 0
        return len({page for table in tables for page in table.live_pages()}) * self.pages.page_bytes

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
        """Attention over this layer's pages by the best backend that supports the call."""
        kind = mask_kind(mask)
        chunk = mask.chunk if isinstance(mask, PagedMask) else None
        if chunk is not None and (segments := segments_of(metadata.step, chunk)):
            outputs = [
                self.attend(
                    queries[:, :, part.start : part.stop],
                    metadata.of(part.step),
                    scale=scale,
                    mask="causal" if part.stop - part.start > 1 else None,
                    sinks=sinks,
                    softcap=softcap,
                )
                for part in segments
            ]
            return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        length = queries.shape[2]
        step = metadata.step
        key = (length if length <= 8 else 9, kind, sinks is not None, step.window, step.keep, softcap, chunk)
        reader = self._readers.get(key)
        if reader is None:
            request = self._request(queries, metadata, kind, sinks is not None, softcap, chunk)
            reader = self._readers[key] = self.choose_reader(request)
        backend = reader.backend
        if reader.outcome is not None and self._gathers(step, reader.outcome):
            backend = self.backends[-1]
        # Only passed on where it is needed: a backend that doesn't know it is not sent it.
        if softcap is None:
            return backend.attend(queries, metadata, scale=scale, mask=mask, sinks=sinks)
        more = {"softcap": softcap}
        return backend.attend(queries, metadata, scale=scale, mask=mask, sinks=sinks, **more)

    def choose_reader(self, request: AttentionRequest) -> Reader:
        """The first backend that supports ``request`` and passes its self-test, and why those before it don't."""
        refusals: list[str] = []
        for backend in self.backends:
            reasons = reasons_against(backend, request)
            trial = Trial() if reasons else try_out(backend, self.backends[-1], request)
            if not reasons and not trial.problem:
                return Reader(backend, tuple(refusals), trial.outcome if any(astuple(trial.outcome)) else None)
            refusals.append(f"{backend.name}: {', '.join(reasons) or trial.problem}")
        raise AssertionError("the last backend supports everything")

    @staticmethod
    def _gathers(step: GroupStep, outcome: Outcome) -> bool:
        """Whether gather is faster, by the self-test's timings, for rows of these lengths."""
        rows = step.context_lens
        return max(rows) < (outcome.gather_below if len(rows) == 1 else outcome.gather_below_batch)

    def describe(self, request: AttentionRequest | None) -> LayerPlan:
        """This layer's line in ``kv.plan``; ``request`` is its decode step as traced."""
        self.request = request
        gather = self.backends[-1].name
        attention, backend, reason = "gather", gather, self.reason
        if self.handles and request is not None:
            reader = self.choose_reader(without_chunk(request))
            attention, backend = ("direct" if reader.backend.direct else "gather"), reader.backend.name
            reason = "; ".join(part for part in (self.reason, *reader.refusals, reader.timings()) if part)
            if not reader.backend.direct and not reason:
                reason = "no backend that reads pages directly is installed or chosen"
        storage = self.spec.storage() if self.spec is not None else ""
        return LayerPlan(self.index, self.choice.kind, attention, backend, reason, self.choice.window, storage)

    def _request(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        kind: MaskKind,
        sinks: bool,
        softcap: float | None,
        chunk: int | None,
    ) -> AttentionRequest:
        spec = metadata.pages.spec
        return AttentionRequest(
            query_heads=queries.shape[1],
            kv_heads=spec.kv_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            dtype=spec.dtype,
            page_size=metadata.page_size,
            query_len=queries.shape[2],
            mask=kind,
            window=metadata.window,
            keep=metadata.keep,
            sinks=sinks,
            softcap=softcap,
            chunk=chunk,
            keys=spec.keys,
            values=spec.values,
            open_page=metadata.open_pages is not None,
        )


def reasons_against(backend: AttentionBackend, request: AttentionRequest) -> list[str]:
    """Reasons why ``backend`` can't serve ``request``; it is asked only about what it says that it knows."""
    reasons = [f"{name} is not supported" for name in sorted(request.features - set(getattr(backend, "features", ())))]
    packed = request.keys is not None or request.values is not None
    if packed and not getattr(backend, "reads_quantized", False):
        reasons.append("quantized pages are not supported")
    if reasons:
        return reasons
    try:
        return backend.supports(request)
    except Exception as error:  # a plugin's, which is done without
        return [f"it failed when asked: {type(error).__name__}: {error}"]


def mask_kind(mask: object) -> MaskKind:
    """How a backend has to treat ``mask``; a PagedMask is causal within its window or chunk."""
    if mask is None:
        return "none"
    if isinstance(mask, str | PagedMask):
        return "causal"
    return "array"


def attend_handles(
    queries: mx.array,
    keys: PagedKV,
    values: object,
    cache: object = None,
    scale: float = 1.0,
    mask: mx.array | str | PagedMask | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """mlx-lm's ``scaled_dot_product_attention`` for handles. ``cache`` is not needed: the handle knows its pages.

    Raises HandleTouchedError if keys and values don't belong together, or were cast to what the queries are not.
    """
    if type(values) is not PagedKV or values.metadata is not keys.metadata:
        raise HandleTouchedError(keys.layer.index, "keys and values of different origin in attention")
    if (keys.cast is not None and keys.cast != queries.dtype) or (
        values.cast is not None and values.cast != queries.dtype
    ):
        raise HandleTouchedError(keys.layer.index, "keys or values in another dtype than the queries'")
    out: mx.array = keys.layer.attend(queries, keys.metadata, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
    return out
