"""PageWriter: the thread that writes stored pages, so that generation doesn't wait for a disk."""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from .page_index import IMPATIENCE, PATIENCE, PageIndex

log = logging.getLogger("tinykv")

# Jobs that may wait: further pages are not written, so that generation never waits for the disk.
MAX_WAITING = 64

Job = Callable[[PageIndex], None]


class PageWriter:
    """Runs jobs one after the other on a connection of its own to the index at ``path``, ``first`` before all others.

    What goes wrong is logged. The thread ends with :meth:`close`, or when nobody has the writer any more.
    """

    def __init__(self, path: Path, first: Job) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        ended = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(path, first, self._jobs, ended), name="tinykv-prefix-store", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._jobs, ended)
        self._finalizer.atexit = False

    @property
    def is_full(self) -> bool:
        """Whether no further job is taken without waiting."""
        return self._jobs.full()

    def submit(self, job: Job, wait: bool = False) -> bool:
        """Have ``job`` run; False if too many wait. With ``wait`` it waits instead."""
        try:
            self._jobs.put(job, block=wait)
        except queue.Full:
            return False
        return True

    def flush(self) -> None:
        """Wait until everything is done."""
        if self._thread.is_alive():
            self._jobs.join()

    def close(self) -> None:
        """Do what waits, and end the thread. Closing again does nothing."""
        self._finalizer()
        self._thread.join()


def _end(jobs: queue.Queue[Job | None], ended: threading.Event) -> None:
    """Let the thread end when nothing waits any more; never waits itself: it may be called by a garbage collection."""
    ended.set()
    with contextlib.suppress(queue.Full):  # then it is not asleep
        jobs.put_nowait(None)


def _run(path: Path, first: Job, jobs: queue.Queue[Job | None], ended: threading.Event) -> None:
    index: PageIndex | None = None
    warned = failing = False
    while not (ended.is_set() and jobs.empty()):
        job = jobs.get()
        try:
            if job is None:
                continue
            if index is None:
                index = PageIndex(path)
                first(index)
            job(index)
            if failing:
                failing = False
                index.wait_at_most(PATIENCE)
        except Exception as error:
            # A full disk, a locked index, a folder that was removed: the page is computed again when it is needed.
            log.log(logging.DEBUG if warned else logging.WARNING, "a page was not stored: %s", str(error))
            warned = failing = True
            if index is not None:
                with contextlib.suppress(sqlite3.Error):
                    index.wait_at_most(IMPATIENCE)  # or what waits here would take that long each
        finally:
            job = None  # it keeps the store alive
            jobs.task_done()
    if index is not None:
        index.close()
