"""paged_server(): mlx-lm's server with the classes of this package."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

from mlx_lm import server as mlx_server

from ..errors import TinyKVError
from .handler import PagedAPIHandler
from .http_server import PagedHTTPServer
from .prompt_cache import PagedPromptCache
from .response_generator import PagedResponseGenerator

log = logging.getLogger("tinykv")

MOST_PORT = 65535

_own_scan_cache_dir = mlx_server.scan_cache_dir
_own_run_http_server = mlx_server._run_http_server


class AddressError(TinyKVError):
    """The server can't listen where it was told to."""


def _run_http_server(host: str, port: int, response_generator: Any) -> None:
    """Serve until ctrl-C or SIGTERM, then end the thread that generates, which would keep the process.

    Raises AddressError.
    """
    try:
        if not 0 <= port <= MOST_PORT:
            raise AddressError(f"--port {port}: a port is a number from 0 to {MOST_PORT}")
        try:
            with _ended_by_sigterm():
                _own_run_http_server(
                    host, port, response_generator, server_class=PagedHTTPServer, handler_class=PagedAPIHandler
                )
        except OSError as error:
            reason = error.strerror or str(error)
            raise AddressError(
                f"--host {host} --port {port}: the server can't listen there ({reason}); try another one"
            ) from error
    finally:
        response_generator.stop_and_join()


def _scan_cache_dir() -> Any:
    """For ``/v1/models``: what Hugging Face's cache holds, which is nothing on a machine that has none."""
    try:
        return _own_scan_cache_dir()
    except Exception as error:
        log.info("no fetched models can be listed: %s", error)
        return SimpleNamespace(repos=())


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which is what service managers and ``kill`` send, counts as ctrl-C: stored prompts reach the disk."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which has no say about signals
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def paged_server(max_queue: int | None = None) -> Iterator[None]:
    """While the block runs, ``mlx_lm.server.main()`` and ``run()`` serve with paged caches; mlx-lm is restored after.

    The models still have to be attached. At most ``max_queue`` requests wait (None: any number).
    """
    ours: dict[str, Any] = {
        "ResponseGenerator": functools.partial(PagedResponseGenerator, max_queue=max_queue),
        "LRUPromptCache": PagedPromptCache,
        "scan_cache_dir": _scan_cache_dir,
        # run() doesn't pass a handler on: it is a default argument, bound when mlx-lm was imported.
        "_run_http_server": _run_http_server,
    }
    before = {name: getattr(mlx_server, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(mlx_server, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(mlx_server, name, value)
