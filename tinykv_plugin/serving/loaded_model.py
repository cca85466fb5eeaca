"""LoadedModel: the model a server has loaded, its page pools, and the room in them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..attachment import attachment_of
from ..batching.admission import Admission
from ..drafts import require_drafts
from ..errors import ConfigError, DraftError, OutOfPagesError, RequestTooLargeError, TinyKVError
from ..pool import Budget, PagePool, find_room
from ..prefix_cache import PrefixCache
from ..session import PagedSession
from .failures import InvalidRequestError, ModelNotFoundError, without_traceback
from .model_lookup import reason_of, require_adapter, require_model

log = logging.getLogger("tinykv")

DEFAULT = "default_model"
"""What a request calls the model, and the draft model, that the server was started with."""


class LoadedModel:
    """What mlx-lm's ModelProvider ``provider`` has loaded: one model, perhaps with a draft model.

    ``name`` is the folder or repository it was loaded from, ``vocabulary`` how many tokens it knows. ``paged`` says
    whether its caches are in pages (true while nothing is loaded), ``failed`` whether the server was started with a
    model that can't be loaded, or with a draft model that can't be used with it. Any thread may read these.
    """

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self.name: str | None = None
        self.vocabulary = 0
        self.sessions: dict[str, PagedSession] = {}
        self.paged = True
        self.failed = False
        self.max_kv_size: int | None = None

    def is_named(self, names: Any) -> bool:
        """Whether this is the model that a request names."""
        return bool(self.provider.model_key == self._key(names))

    def require(self, names: Any) -> Any:
        """``names``, if the model, the adapter and the draft model that a request names can be had.

        Raises InvalidRequestError otherwise, before anything is given up for them. The model of the start is known by
        any path to its folder, such as the one that ``/v1/models`` tells.
        """
        provider = self.provider
        if not isinstance(names.draft, str | None):
            raise InvalidRequestError(f"draft_model: it has to be a name, not {names.draft!r:.80}")
        names = self._as_at_the_start(names)
        if self.is_named(names):
            return names
        options = {"trust_remote_code": provider.cli_args.trust_remote_code, "whole": not provider.is_distributed}
        model, adapter, draft = self._key(names)
        if provider.is_distributed and (adapter is not None or draft is not None):
            raise InvalidRequestError("adapters and draft models can't be used with a model that is divided")
        if model is None:
            raise ModelNotFoundError("the server was started without --model, so a request has to name one")
        # Those of the start are what the server itself has to load: if that fails, it is no fault of a request.
        if names.model != DEFAULT:
            require_model(model, **options)
        if adapter is not None and names.model != DEFAULT:
            require_adapter(adapter)
        if draft is not None and names.draft != DEFAULT:
            require_model(draft, **options)
        return names

    def load_default(self) -> None:
        """Load the model given at the start. If that fails, each request will try again, and get the reason.

        So it will if drafts can't be used as the server was started; that is found and said here already.
        """
        try:
            self.provider.load_default()
            self._look()
        except Exception as error:
            reason = str(error) if isinstance(error, TinyKVError) else f"{type(error).__name__}: {reason_of(error)}"
            log.error("the model could not be loaded, requests that need it will fail: %s", reason)
            log.info("where it happened:", exc_info=True)
            self.failed = True
            return
        provider = self.provider
        if self.sessions and provider.draft_model is not None:
            try:
                require_drafts(provider.model, provider.draft_model, provider.cli_args.num_draft_tokens)
            except (ConfigError, DraftError) as error:
                log.error("%s; requests that need it will be refused", error)
                self.failed = True  # whoever sees it finds the reason in the log

    def load(self, names: Any) -> None:
        """Load what a request names, in place of what was loaded. Raises whatever goes wrong."""
        self.provider.load(names.model, names.adapter, names.draft)
        self._look()
        self.failed = False

    def finish(self) -> None:
        """Have computed what was begun: no other thread than this one, which ran the model, could do it."""
        for session in self.sessions.values():
            layers = [pages for pool in session.pools for pages in pool.layers.values()]
            try:
                with session.lock:
                    mx.eval([pages.state() for pages in layers], [pages.last_read for pages in layers])
            except Exception as error:
                log.info("what was under way can't be finished: %s", without_traceback(error))

    def forget(self) -> None:
        """Drop what would keep the model alive."""
        self.name = None
        self.sessions = {}

    @property
    def prefixes(self) -> list[PrefixCache]:
        """The stored prompts of the model and, if there is one, of its draft model; none unless all have pages."""
        labels = ["main", "draft"] if self.provider.draft_model is not None else ["main"]
        if not all(label in self.sessions for label in labels):
            return []
        return [self.sessions[label].prefix for label in labels]

    def make_room(self, tokens: int, drafted: int, chunk: int) -> None:
        """Have stored prompts give way until a request of ``tokens`` tokens, served alone, finds its pages.

        ``drafted`` tokens may be written beyond and taken back, ``chunk`` is the most it processes in one step. Raises
        RequestTooLargeError if it can never fit.
        """
        if "draft" in self.sessions:
            tokens += drafted + 1
        # A draft model shares its target's budget.
        needs: dict[Budget, list[tuple[PagePool, int]]] = {}
        for session in self.sessions.values():
            admission = Admission(session, chunk)
            admission.require_possible(tokens, self.max_kv_size)
            footprint = admission.footprint(tokens, self.max_kv_size)
            needs.setdefault(session.budget, []).extend(zip(session.pools, footprint.pages, strict=True))
        for budget, need in needs.items():
            total = sum(count * pool.page_bytes for pool, count in need)
            if total > budget.total:
                raise RequestTooLargeError(tokens, sum(count for _, count in need), total, budget.total, "memory")
            if need:
                self._make_room(need)

    def held_bytes(self) -> int:
        """Bytes of all used pages, of requests and stored prompts, each once."""
        total = 0
        for session in self.sessions.values():
            session.collect()
            with session.lock:
                total += sum(pool.allocator.used * pool.page_bytes for pool in session.pools)
        return total

    def _key(self, names: Any) -> tuple[str | None, str | None, str | None]:
        """By what mlx-lm knows a loaded model: its own name, an adapter's and a draft model's."""
        provider = self.provider
        return (
            provider._model_map.get(names.model, names.model),
            provider._adapter_map.get(names.model, names.adapter),
            provider._draft_model_map.get(names.draft, names.draft),
        )

    def _as_at_the_start(self, names: Any) -> Any:
        at_start = self.provider.cli_args.model
        if at_start is None or names.adapter is not None or self.provider.cli_args.adapter_path is not None:
            return names
        with contextlib.suppress(OSError, ValueError):  # of what can't be a path
            if Path(at_start).is_dir() and Path(names.model).resolve() == Path(at_start).resolve():
                return dataclasses.replace(names, model=DEFAULT)
        return names

    def _make_room(self, need: Sequence[tuple[PagePool, int]]) -> None:
        """Have stored prompts give way to ``need`` pages of each pool, as far as they can."""
        for session in self.sessions.values():
            session.collect()
        for session in self.sessions.values():
            with session.lock, contextlib.suppress(OutOfPagesError):
                session.prefix.eviction.with_room(
                    lambda: find_room([pool for pool, _ in need], [count for _, count in need], last_try=False)
                )
                return

    def _look(self) -> None:
        """Note what was loaded. Its pools are planned here, in the thread that will use them."""
        provider, sessions = self.provider, {}
        for label, model in (("main", provider.model), ("draft", provider.draft_model)):
            kv = attachment_of(model) if model is not None else None
            if kv is not None and isinstance(kv.session, PagedSession):
                sessions[label] = kv.session
                self.max_kv_size = kv.config.max_kv_size
        self.sessions = sessions
        self.paged = provider.model is None or "main" in sessions
        self.name = str(provider.model_key[0]) if provider.model_key else None
        self.vocabulary = _vocabulary(provider.model, provider.tokenizer)


def _vocabulary(model: Any, tokenizer: Any) -> int:
    """How many logits ``model`` returns for a token, as far as can be told without running it."""
    if model is None:
        return 0
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None) or {}
    nested = text.get("vocab_size") if isinstance(text, dict) else getattr(text, "vocab_size", None)
    return int(getattr(args, "vocab_size", None) or nested or tokenizer.vocab_size)
