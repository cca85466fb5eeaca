"""Every exception the plugin raises on purpose: one small tree, each carrying its numbers."""

from __future__ import annotations

from typing import Any

from .units import format_bytes


class TinyKVError(Exception):
    """Base of all errors of this package; the message is one line that says what to change."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries, where Exception would call __init__ with the message alone.
        return _restore, (type(self), self.args, self.__dict__)


class ConfigError(TinyKVError, ValueError):
    """A setting has a wrong value. ``field`` is the setting's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class PluginError(TinyKVError):
    """A plugin that was asked for by name is missing, disabled or broken."""


class CacheStateError(TinyKVError):
    """A cache was used in a way its state doesn't allow (rewound too far, detached, mixed owners)."""


class PromptCacheFileError(TinyKVError, ValueError):
    """A prompt-cache file can't be read, or doesn't fit the model; ``path`` is the file."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)


class DraftError(TinyKVError, ValueError):
    """A draft model can't be used with this model or these caches; nothing was computed."""


class HandleTouchedError(TinyKVError, TypeError):
    """Model code used a K/V handle or a mask other than by handing it to attention.

    ``layer`` is the layer whose handle was touched, ``what`` names the access.
    """

    def __init__(self, layer: int, what: str) -> None:
        super().__init__(f"layer {layer}: the model uses {what}, but its keys and values are in pages")
        self.layer = layer
        self.what = what


class InvariantError(TinyKVError, AssertionError):
    """``kv.check()`` found bookkeeping that contradicts itself: a bug in the plugin, please report it."""


class OutOfPagesError(TinyKVError, MemoryError):
    """The page budget is exhausted; nothing was changed by the call that raised it.

    ``needed`` pages were asked for, ``free`` of ``total`` were free, a page takes ``page_bytes`` bytes. ``would_fit``
    is the budget in bytes that would have done, if it's not for these pages alone. ``evictable``: there would be room
    if the prefix cache gave up all pages that nobody else holds.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        total: int,
        page_bytes: int,
        page_size: int,
        setting: str,
        would_fit: int | None = None,
        evictable: bool = False,
    ) -> None:
        would_fit = would_fit or (total - free + needed) * page_bytes
        raise_to = f"--kv-max-pages {total - free + needed}" if setting == "max_pages" else f"--kv-memory {would_fit}"
        super().__init__(
            f"out of KV pages: {needed} needed, {free} free of {total} ({format_bytes(page_bytes)} each, "
            f"{page_size} tokens); the limit is {setting}: {raise_to} ({format_bytes(would_fit)}) would fit, "
            f"or use a smaller max_kv_size"
        )
        self.needed = needed
        self.free = free
        self.total = total
        self.page_bytes = page_bytes
        self.setting = setting
        self.evictable = evictable


class RequestTooLargeError(TinyKVError, ValueError):
    """A request can't fit into the page budget even when it runs alone; it was refused before any computing."""

    def __init__(self, tokens: int, pages: int, need: int, budget: int, setting: str, limit: int | None = None) -> None:
        flag = f"--kv-max-pages {pages}" if setting == "max_pages" else f"--kv-memory {need}"
        total = f"{limit} pages" if setting == "max_pages" else format_bytes(budget)
        super().__init__(
            f"the request can reach {tokens} tokens and needs {pages} pages ({format_bytes(need)}) of {total} "
            f"({setting}): {flag} would fit, or a shorter prompt or smaller max_tokens"
        )
        self.tokens = tokens
        self.pages = pages
        self.need = need
        self.budget = budget
        self.setting = setting


class QueueFullError(TinyKVError):
    """The server's queue is full; the request was refused before anything was done for it.

    ``waiting`` requests were in the queue, ``max_queue`` may be; after ``retry_after`` seconds there may be a place.
    """

    def __init__(self, waiting: int, max_queue: int, retry_after: int) -> None:
        super().__init__(
            f"the queue is full: {waiting} requests are waiting, --kv-max-queue {max_queue} allows no more; "
            f"try again in {retry_after} s"
        )
        self.waiting = waiting
        self.max_queue = max_queue
        self.retry_after = retry_after


class PoolGrowthError(TinyKVError, MemoryError):
    """The system could not give the memory to resize a page pool, although the budget allows it.

    The pool has its old size again; ``bytes_wanted`` is what the arrays of one layer needed more for it.
    """

    def __init__(self, pages: int, more: int, bytes_wanted: int, cause: str) -> None:
        super().__init__(
            f"the page pool can't go from {pages} to {more} pages ({format_bytes(bytes_wanted)} more): {cause}; "
            f"lower --kv-memory or --kv-max-pages so that requests are refused before the system runs out"
        )
        self.pages = pages
        self.more = more
        self.bytes_wanted = bytes_wanted


class BlasError(TinyKVError):
    """TINYKV_BLAS names a library that is missing or can't serve."""


class DemoModelError(TinyKVError):
    """The demonstration's model can't be made here; the message says what to do instead."""


def _restore(kind: type[TinyKVError], args: tuple[Any, ...], fields: dict[str, Any]) -> TinyKVError:
    error: TinyKVError = Exception.__new__(kind, *args)
    error.__dict__.update(fields)
    return error
