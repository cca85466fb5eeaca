"""attach(): a model's ``make_cache()`` makes paged caches until it is detached."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from mlx_lm.models import cache as mlx_cache

from . import blas, dispatch
from .config import KVCacheConfig
from .drafts import drafting
from .errors import CacheStateError, ConfigError, PluginError
from .group_info import GroupInfo
from .manager import PluginManager, default_manager
from .prefix_cache import PrefixCache
from .protocols import AttachContext, CacheSession, LayerPlan, Replacement, ReplacingAdapter
from .separate_rows import separately
from .session import PagedSession
from .stats import PoolStats
from .storing import storing

log = logging.getLogger("tinykv")

_HOOK = "make_cache"
_MISSING = object()
# The package has a function of this name in place of the module.
_GENERATE = importlib.import_module("mlx_lm.generate")
_STEPS, _DRAFTS = "generate_step", "speculative_generate_step"
_MAKE_PROMPT_CACHE = mlx_cache.make_prompt_cache.__code__

_lock = threading.RLock()
_live: weakref.WeakSet[Attachment] = weakref.WeakSet()


def attach(
    model: Any,
    config: KVCacheConfig | None = None,
    *,
    plugins: PluginManager | None = None,
    budget_of: Attachment | None = None,
    **fields: Any,
) -> Attachment:
    """Give ``model`` (an mlx-lm model) paged caches from now on.

    Settings come from ``config`` or from keyword ``fields``, see :class:`~tinykv_plugin.config.KVCacheConfig`.
    With ``budget_of``, another model's attachment (a draft model's target), pages are taken from that one's ``memory``.
    Sets ``model.make_cache``, the attention function in the model's module and mlx-lm's loop for drafts; the result's
    ``detach()`` (or leaving it as a context manager) restores them. Raises ConfigError or PluginError with nothing
    changed.
    """
    if config is not None and fields:
        raise ConfigError(next(iter(fields)), "give either a config or fields, not both")
    if config is None:
        config = KVCacheConfig(**fields)
    _hint_at_blas()
    return Attachment(model, config, plugins or default_manager(), budget_of)


class Attachment:
    """A model under the plugin. Its plan and pools are made at the first ``make_cache()``, after any sharding."""

    def __init__(
        self, model: Any, config: KVCacheConfig, plugins: PluginManager, budget_of: Attachment | None = None
    ) -> None:
        self.model = model
        self.config = config
        self._budget_of = budget_of
        self._provider = plugins.provider(config.cache)
        self._context = AttachContext(
            model=model,
            config=config,
            adapter=plugins.adapter(model),
            backends=plugins.backends(config.attention),
            gather=plugins.gather(),
            own_cache=self._own_cache,
            emit=plugins.emit,
        )
        self._session: CacheSession | None = None
        check = getattr(self._provider, "check", None)
        if check is not None:
            check(self._context)
        self._attached = True
        adapter = self._context.adapter
        self._replaced = [dispatch.attention_of(module) for module in adapter.attention_modules(model)]
        if isinstance(adapter, ReplacingAdapter):
            self._replaced += adapter.replacements(model)
        self._replaced += [Replacement(_GENERATE, _STEPS, storing), Replacement(_GENERATE, _DRAFTS, _drafting)]
        with _lock:
            self._install()
            self._make_cache = self.make_cache
            # Another attachment of this model, or a script, may have set the attribute: it is put back at detach.
            self._previous = vars(model).get(_HOOK, _MISSING)
            object.__setattr__(model, _HOOK, self._make_cache)
            _live.add(self)

    @property
    def attached(self) -> bool:
        """Whether the model still makes paged caches."""
        return self._attached

    @property
    def plan(self) -> Sequence[LayerPlan]:
        """One line per layer: how its K/V are kept and read, and why."""
        return self.session.plan

    @property
    def session(self) -> CacheSession:
        """The provider's session; made at first use."""
        with _lock:
            if self._session is None:
                if not self._attached:
                    raise CacheStateError("the model was detached from tinykv before any cache was made")
                context = self._context
                if self._budget_of is not None:
                    context = replace(context, shares_budget_of=self._budget_of.session)
                session = self._provider.open(context)
                if getattr(session, "separate", ""):
                    self._replace(Replacement(type(self.model), "__call__", separately))
                self._session = session
                self._budget_of = None
            return self._session

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """A new request's caches, as the model's own ``make_cache()`` would return, but in pages.

        ``max_kv_size`` limits the tokens attended to in full-attention layers; the default is the setting's.
        """
        return self.session.make_cache(max_kv_size or _asked_max_kv_size() or self.config.max_kv_size)

    @property
    def groups(self) -> Sequence[GroupInfo]:
        """The cache groups of paged caches; empty for another provider's."""
        return self.session.groups if isinstance(self.session, PagedSession) else ()

    @property
    def prefix_cache(self) -> PrefixCache:
        """The prompts stored for this model. Raises CacheStateError for a provider that stores none."""
        if not isinstance(self.session, PagedSession):
            raise CacheStateError(f'the provider {self.config.cache!r} has no prefix cache; cache="paged" has one')
        return self.session.prefix

    def stats(self) -> PoolStats:
        """Pages and bytes right now."""
        return self.session.stats()

    def check(self) -> None:
        """Verify every invariant of the bookkeeping; raises InvariantError at the first that fails."""
        if self._session is not None:
            self._session.check()

    def detach(self) -> None:
        """Restore the model and its module; doing it again is harmless. Caches still alive refuse further use."""
        with _lock:
            if not self._attached:
                return
            self._attached = False
            if vars(self.model).get(_HOOK) is self._make_cache:
                if self._previous is _MISSING:
                    object.__delattr__(self.model, _HOOK)
                else:
                    object.__setattr__(self.model, _HOOK, self._previous)
            else:
                # Attached again since: that attachment now restores what was there before this one.
                for other in _live:
                    if other.model is self.model and other._previous is self._make_cache:
                        other._previous = self._previous
            for replacement in self._replaced:
                dispatch.remove(replacement, self)
            if self._session is not None:
                self._session.close()
            _live.discard(self)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def _replace(self, replacement: Replacement) -> None:
        dispatch.install(replacement, self)
        self._replaced.append(replacement)

    def _install(self) -> None:
        installed = []
        try:
            for replacement in self._replaced:
                dispatch.install(replacement, self)
                installed.append(replacement)
        except PluginError:
            for replacement in installed:
                dispatch.remove(replacement, self)
            raise

    def _own_cache(self) -> list[Any]:
        """The caches the model has without the plugin."""
        own = getattr(type(self.model), _HOOK, None)
        if own is not None:
            return list(own(self.model))
        return [mlx_cache.KVCache() for _ in self.model.layers]


@functools.cache
def _hint_at_blas() -> None:
    """Once in a process."""
    hint = blas.hint()
    if hint:
        log.warning("%s", hint)


def live_attachments() -> list[Attachment]:
    """The attachments of this process that were not detached."""
    with _lock:
        return list(_live)


def attachment_of(model: Any) -> Attachment | None:
    """The attachment whose caches ``model`` makes now."""
    owner = getattr(vars(model).get(_HOOK), "__self__", None)
    return owner if isinstance(owner, Attachment) else None


def is_paged(model: Any) -> bool:
    """Whether ``model`` makes paged caches now."""
    kv = attachment_of(model)
    return kv is not None and isinstance(kv.session, PagedSession)


def _drafting(own_loop: Callable[..., Any]) -> Callable[..., Any]:
    return drafting(own_loop, is_paged)


def _asked_max_kv_size() -> int | None:
    """The ``max_kv_size`` that mlx-lm's make_prompt_cache was called with.

    It calls ``make_cache()`` without it, so that models with a cache of their own ignore it; it is still there in the
    caller's frame.
    """
    frame = sys._getframe(2)
    if frame.f_code is not _MAKE_PROMPT_CACHE:
        return None
    asked = frame.f_locals.get("max_kv_size")
    return asked if isinstance(asked, int) else None
