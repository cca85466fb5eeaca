"""The interfaces a plugin implements: provider, model adapter, attention backend, and what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import mlx.core as mx

    from .config import KVCacheConfig
    from .kv_format import Affine
    from .metadata import PagedKVMetadata, PagedMask
    from .pages import LayerPages
    from .stats import PoolStats

LayerKind = Literal["full", "window", "chunked", "dense"]
MaskKind = Literal["none", "causal", "array"]


@dataclass(frozen=True)
class LayerChoice:
    """What an adapter wants for one entry of the model's own cache list.

    ``window``: tokens a query may look back on, itself included (None: all). ``reason`` says why it is dense, or
    anything a user should know; it is shown in ``kv.plan``.
    """

    kind: LayerKind
    window: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class LayerPlan:
    """One line of ``kv.plan``: how one layer's K/V are kept and read.

    ``storage`` says what an element takes in the pages ("" where there are none).

    ``attention``: "direct" (the backend reads pages), "gather" (pages are copied together first), "dense" (mlx-lm's
    own cache). ``backend`` is the backend's name, ``reason`` why nothing faster serves.
    """

    layer: int
    kind: LayerKind
    attention: str
    backend: str
    reason: str
    window: int | None = None
    storage: str = ""


@dataclass(frozen=True)
class AttentionRequest:
    """What one attention call needs; a backend answers in :meth:`AttentionBackend.supports`.

    ``query_len`` is the number of query tokens per row (the longest); ``keep`` the number of first tokens that a
    window doesn't drop (``max_kv_size``). ``keys`` and ``values`` say how the pages pack them (None: they hold
    ``dtype``); only backends with an attribute ``reads_quantized`` that is true are asked about packed ones. The last
    three are asked only of backends that name them in their attribute ``features``: ``softcap``, scores are
    ``softcap * tanh(scores / softcap)`` before the softmax (``attend`` gets it as a keyword argument); ``chunk``, a
    query sees its own chunk of that many positions only (as its mask says); ``open_page``, a query reads the tokens of
    the page it is in from ``metadata.open``.
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    page_size: int
    query_len: int
    mask: MaskKind
    window: int | None
    keep: int
    sinks: bool
    keys: Affine | None = None
    values: Affine | None = None
    softcap: float | None = None
    chunk: int | None = None
    open_page: bool = False

    @property
    def features(self) -> set[str]:
        """What a backend must name among its ``features`` to be asked."""
        found = {name for name in ("softcap", "chunk") if getattr(self, name) is not None}
        return found | {"open_page"} if self.open_page else found


@runtime_checkable
class AttentionBackend(Protocol):
    """Reads and writes pages. One backend writes all layers of an attachment; each layer may be read by another.

    ``direct`` is False for a backend that copies pages together before it attends. ``priority`` orders the
    candidates of ``attention="auto"``, highest first. An attribute ``features`` may name what a backend knows beyond
    this interface: see :class:`AttentionRequest`, and "keys_only" for layers whose values have no dims.
    """

    name: str
    direct: bool
    priority: int

    def supports(self, request: AttentionRequest) -> list[str]:
        """Reasons why this backend can't serve ``request`` here; empty if it can."""
        ...

    def resize(self, pages: LayerPages, num_pages: int) -> None:
        """Give ``pages`` room for ``num_pages`` pages, evaluated; what is in the first pages stays.

        Modifies ``pages.keys`` and ``pages.values`` (None before the first call). Raises MemoryError or
        RuntimeError if the memory can't be had, with ``pages`` unchanged.
        """
        ...

    def write(self, metadata: PagedKVMetadata, keys: mx.array, values: mx.array) -> None:
        """Put new tokens, ``(batch, kv_heads, tokens, elements)`` as the pages store them, into ``metadata``'s slots.

        Modifies ``metadata.pages``. Tokens with slot -1 are skipped.
        """
        ...

    def copy_pages(self, pages: LayerPages, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, in order: for copy-on-write, and to move them. Modifies ``pages``.

        Raises MemoryError or RuntimeError if the memory can't be had; what is in the target pages doesn't matter then.
        """
        ...

    def attend(
        self,
        queries: mx.array,
        metadata: PagedKVMetadata,
        *,
        scale: float,
        mask: mx.array | str | PagedMask | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of ``queries`` ``(batch, query_heads, tokens, key_dim)`` over each row's pages.

        Returns ``(batch, query_heads, tokens, value_dim)`` in the dtype of ``queries``. Slots at and past a row's
        ``context_lens`` are never used, whatever they hold.
        """
        ...


@runtime_checkable
class TriedBackend(AttentionBackend, Protocol):
    """A backend that is compared with gather on the user's device before it serves a kind of call there."""

    def selftest_key(self) -> str:
        """What a comparison's outcome holds for: the device, and versions of what computes there."""
        ...


@runtime_checkable
class ConfigurableBackend(AttentionBackend, Protocol):
    """A backend that looks at the settings of the attachments it serves."""

    def configure(self, config: KVCacheConfig) -> None:
        """Called before a model's layers are planned."""
        ...


@runtime_checkable
class GatheringBackend(AttentionBackend, Protocol):
    """The backend of last resort: supports every request, and copies pages together for models that need arrays."""

    def stored(self, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
        """As :meth:`dense`, but ``(batch, kv_heads, columns, elements)`` as the pages store them."""
        ...

    def dense(self, metadata: PagedKVMetadata) -> tuple[mx.array, mx.array]:
        """K and V ``(batch, kv_heads, columns, head_dim)`` of what the step's queries may see.

        Columns are each row's kept tokens, then its newest ones in order, then zeros up to the longest row.
        """
        ...


@runtime_checkable
class ModelAdapter(Protocol):
    """Knows one family of mlx-lm model classes."""

    name: str

    def matches(self, model: Any) -> bool:
        """Whether this adapter serves ``model``; the first that says yes is taken, third parties' before ours."""
        ...

    def attention_modules(self, model: Any) -> Sequence[ModuleType]:
        """The Python modules whose global ``scaled_dot_product_attention`` this model calls."""
        ...

    def choose(self, model: Any, own: Sequence[Any]) -> Sequence[LayerChoice]:
        """One choice for each leaf cache of ``own``, what the model's own ``make_cache()`` returned, flattened."""
        ...


@dataclass(frozen=True)
class Replacement:
    """A function of a model's module or class that is replaced while a model is attached.

    ``make`` gets the function that is there and returns the new one, which must behave as the old one for caches that
    are not paged: other models in the process may use the same class.
    """

    owner: ModuleType | type
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]


@runtime_checkable
class ReplacingAdapter(ModelAdapter, Protocol):
    """An adapter for models whose own code stands in the way of reading pages."""

    def replacements(self, model: Any) -> Sequence[Replacement]:
        """What to replace in the code of ``model`` until it is detached."""
        ...


@dataclass(frozen=True)
class SeenLayer:
    """What the dry trace saw of one leaf cache of a model.

    ``cache`` is the name of mlx-lm's class for it, ``kind`` how it will be kept, ``touched`` what the model does with
    K/V other than attention ("": nothing, so that pages can be read in place), ``kv_heads`` how many there are (None:
    the model never wrote it, or it has no pages).
    """

    cache: str
    kind: LayerKind
    touched: str
    kv_heads: int | None


@runtime_checkable
class VerifyingAdapter(ModelAdapter, Protocol):
    """An adapter that knows what its models do, and notices when they do something else."""

    def verify(self, model: Any, seen: Sequence[SeenLayer]) -> str:
        """How ``model`` differs from what the adapter is written for; "" if it doesn't.

        A model that differs is read by gather, and the requests of a batch are run one after the other.
        """
        ...


class CacheSession(Protocol):
    """The caches of one attached model."""

    @property
    def plan(self) -> Sequence[LayerPlan]:
        """How each entry of the model's cache list is kept."""
        ...

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """A new request's caches, one per entry of the model's own list. ``max_kv_size`` as in mlx-lm."""
        ...

    def stats(self) -> PoolStats:
        """Pages and bytes right now."""
        ...

    def check(self) -> None:
        """Raise :class:`~tinykv_plugin.errors.InvariantError` at the first broken invariant."""
        ...

    def close(self) -> None:
        """Called at detach: caches still alive refuse further use with a typed error."""
        ...


@dataclass(frozen=True)
class AttachContext:
    """What a provider gets: the model, its settings, and what the plugin manager found for it.

    ``own_cache()`` makes the caches the model would have without the plugin. ``backends`` are in order of
    preference; the last one, ``gather``, serves everything. ``emit`` sends a notification hook by name, e.g.
    ``emit("tinykv_pool_grown", event)``. ``shares_budget_of`` is the session of the model whose ``memory`` this one
    takes its pages from too (a draft model's target).
    """

    model: Any
    config: KVCacheConfig
    adapter: ModelAdapter
    backends: Sequence[AttentionBackend]
    gather: GatheringBackend
    own_cache: Callable[[], list[Any]]
    emit: Callable[[str, object], None]
    shares_budget_of: CacheSession | None = None


@runtime_checkable
class CacheProvider(Protocol):
    """Makes caches for models; chosen by name with the setting ``cache``.

    A provider may also have a method ``check(context)``, called when a model is attached, that raises ConfigError for
    settings that it can't serve with this model.
    """

    name: str

    def open(self, context: AttachContext) -> CacheSession:
        """A session for one model; called at the first ``make_cache()``, after any sharding of the model."""
        ...
