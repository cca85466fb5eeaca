"""LiveView: what a server is doing, for those who watch. While nobody does, nothing is computed."""

from __future__ import annotations

import base64
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..labels import model_label
from ..page_map import CACHED, OTHERS, SHARED, USED, PoolMap, page_maps
from .failures import TooManyWatchersError
from .metrics import ServerState

if TYPE_CHECKING:
    from ..sequence import PagedSequence
    from ..session import PagedSession
    from .ticket import Ticket

INTERVAL = 0.5
"""Seconds between two pictures."""

MOST_WATCHERS = 16
MOST_CELLS = 2048
MOST_REQUESTS = 64

# Seconds that the speed of the whole server is taken over.
SPEED_SPAN = 5.0


class LiveView:
    """Pictures of a server as JSON: one every :data:`INTERVAL` seconds, however many watch.

    A picture has a bounded size: :data:`MOST_CELLS` cells a model, however many pages there are, and
    :data:`MOST_REQUESTS` requests. It is made in the thread of a watcher. No text of a prompt is in it.
    """

    def __init__(
        self,
        state: Callable[[], ServerState],
        counts: Callable[[], dict[str, dict[str, int]]],
        tickets: Callable[[], list[Ticket]],
        sessions: Callable[[], dict[str, PagedSession]],
    ) -> None:
        self._state = state
        self._counts = counts
        self._tickets = tickets
        self._sessions = sessions
        self._running: dict[int, weakref.ref[PagedSequence]] = {}
        self._watchers = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._made = float("-inf")
        self._picture = b""
        self._speeds: deque[tuple[float, int]] = deque()

    # The generation thread ------------------------------------------------------------------------------------------

    @property
    def watched(self) -> bool:
        """Whether anybody watches."""
        return self._watchers > 0

    def note(self, running: dict[int, weakref.ref[PagedSequence]]) -> None:
        """The page tables of the requests that run, by the numbers of their tickets."""
        self._running = running

    def close(self) -> None:
        """The server stops: nobody watches any longer."""
        self._closed.set()

    # Watchers' threads ----------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[Iterator[bytes]]:
        """Pictures as they come, until the server stops; empty ones while nothing changes.

        Raises TooManyWatchersError.
        """
        with self._lock:
            if self._watchers >= MOST_WATCHERS:
                raise TooManyWatchersError(f"{MOST_WATCHERS} watch /kv/events already; close one of them")
            self._watchers += 1
        try:
            yield self._pictures()
        finally:
            with self._lock:
                self._watchers -= 1

    def _pictures(self) -> Iterator[bytes]:
        seen = b""
        while not self._closed.is_set():
            with self._lock:
                if time.monotonic() - self._made >= INTERVAL:
                    self._picture = json.dumps(self._look(), separators=(",", ":")).encode()
                    self._made = time.monotonic()
                picture = self._picture
            yield b"" if picture == seen else picture
            seen = picture
            self._closed.wait(INTERVAL)

    def _look(self) -> dict[str, Any]:
        state, counts, tickets = self._state(), self._counts(), self._tickets()
        noted, shown = self._running, tickets[:MOST_REQUESTS]
        running = {ticket.number: noted[ticket.number] for ticket in tickets if ticket.number in noted}
        named = {ticket.number: running[ticket.number] for ticket in shown if ticket.number in running}
        sessions = self._sessions()
        maps = {
            label: page_maps(session, MOST_CELLS // max(1, len(session.pools)), named)
            for label, session in sessions.items()
        }
        # A request that is served alone isn't noted: what belongs to nobody else is its.
        started = [ticket.number for ticket in tickets if ticket.started]
        alone = started[0] if len(started) == 1 and not running else None
        prompt = counts["prompt_tokens"]
        known = prompt["reused"] + prompt["computed"]
        return {
            "version": __version__,
            "model": model_label(Path(state.model)) if state.model else None,
            "running": state.running,
            "waiting": state.waiting,
            "tokens_per_second": self._speed(counts["work"]["generated_tokens"]),
            "hit_rate": round(prompt["reused"] / known, 4) if known else None,
            "stored_prompts": state.stored_prompts,
            "evictions": sum(pool.evictions for pool in state.pools.values()),
            "requests_ended": counts["requests"],
            "prompt_tokens": prompt,
            "work": counts["work"],
            "pools": {
                label: {
                    "bytes_total": pool.bytes_total,
                    "bytes_reserved": pool.bytes_reserved,
                    "bytes_used": pool.bytes_used,
                    "pages_total": pool.pages_total,
                    "waste": round(pool.waste, 4),
                    "groups": [_drawn(drawn) for drawn in maps.get(label, ())],
                }
                for label, pool in state.pools.items()
            },
            "requests": [_told(ticket, maps, alone, running) for ticket in shown],
            "more_requests": len(tickets) - len(shown),
        }

    def _speed(self, generated: int) -> float | None:
        """Tokens per second over the last seconds; None at first."""
        now, speeds = time.monotonic(), self._speeds
        while speeds and now - speeds[0][0] > SPEED_SPAN:
            speeds.popleft()
        speeds.append((now, generated))
        (begin, before), seconds = speeds[0], now - speeds[0][0]
        return round((generated - before) / seconds, 1) if begin < now else None


def _drawn(pool: PoolMap) -> dict[str, Any]:
    """A map as a page draws it: for each cell three bytes, the shares of used, shared and cached pages, 255 for all."""
    in_cell = np.maximum(1, pool.counts.sum(axis=0))
    shares = np.rint(pool.counts[[USED, SHARED, CACHED]] * 255 / in_cell).astype(np.uint8)
    return {
        "name": pool.group,
        "layers": pool.layers,
        "page_size": pool.page_size,
        "page_bytes": pool.page_bytes,
        "storage": pool.storage,
        "quantized": pool.quantized,
        "pages": pool.pages,
        "per_cell": pool.per_cell,
        "states": [int(count) for count in pool.counts.sum(axis=1)],
        "cells": _packed(shares.T),
    }


def _told(ticket: Ticket, maps: dict[str, list[PoolMap]], alone: int | None, running: dict[int, Any]) -> dict[str, Any]:
    key = OTHERS if ticket.number == alone else ticket.number
    pages = size = 0
    cells: dict[str, list[str]] = {}
    for label, pools in maps.items():
        cells[label] = [_bits(pool.masks.get(key)) for pool in pools]
        pages += sum(pool.pages_of.get(key, 0) for pool in pools)
        size += sum(pool.pages_of.get(key, 0) * pool.page_bytes for pool in pools)
    meter = ticket.meter
    if not ticket.started:
        state = "waiting"
    elif running and ticket.number not in running:
        state = "paused"
    else:
        state = "answering" if meter.generated else "reading"
    speed = meter.tokens_per_second
    return {
        "id": ticket.number,
        "state": state,
        "prompt_tokens": ticket.prompt_tokens,
        "computed": meter.computed,
        "reused": meter.reused,
        "generated": meter.generated,
        "max_tokens": int(getattr(ticket.args, "max_tokens", 0)),
        "tokens_per_second": None if speed is None else round(speed, 1),
        "seconds": round(time.monotonic() - meter.arrived, 1),
        "pages": pages,
        "bytes": size,
        "cells": cells,
    }


def _bits(mask: NDArray[np.bool_] | None) -> str:
    return "" if mask is None else _packed(np.packbits(mask, bitorder="little"))


def _packed(numbers: NDArray[np.uint8]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()
