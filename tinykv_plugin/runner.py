"""Runner: the thread that runs a model, and how another one takes over."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import mlx.core as mx

from .errors import CacheStateError
from .unfinished import discard_unfinished

if TYPE_CHECKING:
    from .session import PagedSession

log = logging.getLogger("tinykv")


class Runner:
    """The thread whose arrays a session's pages are made of; ``ident`` is its number, as threading has it."""

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._thread = threading.current_thread()

    def take_over(self, session: PagedSession) -> None:
        """Make the arrays of ``session`` usable in this thread, if it isn't the one that runs the model already.

        Raises CacheStateError if that one left a step unevaluated (its arrays can't be used here), unless it has ended:
        then its unfinished requests are lost.
        """
        # Not by its number, which a new thread may have after it.
        thread = threading.current_thread()
        if thread is self._thread:
            return
        layers = [pages for pool in session.pools for pages in pool.layers.values()]
        try:
            mx.eval([pages.state() for pages in layers])
            # Reads of a thread that has ended, as of a prompt's chunk whose logits nobody wanted, change nothing.
            with contextlib.nullcontext() if self._thread.is_alive() else contextlib.suppress(RuntimeError):
                mx.eval([pages.last_read for pages in layers])
        except RuntimeError as error:
            if self._thread.is_alive():
                raise CacheStateError(
                    f"another thread is in the middle of a step of this model ({error}); "
                    f"let it finish (mx.eval its output) before this thread uses the model"
                ) from None
            log.warning("a thread ended in the middle of a step of this model: the prompt caches there are were lost")
            discard_unfinished(session)
        for pages in layers:
            pages.last_read = None  # that thread's, and over
        self.ident = threading.get_ident()
        self._thread = thread
