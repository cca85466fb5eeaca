"""PrefixStore: pages of stored prompts on disk, found again by their hash, by any process and after a restart."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .errors import ConfigError
from .page_index import PageIndex, StoredPage
from .page_writer import PageWriter
from .whole_file import write_whole

log = logging.getLogger("tinykv")

CHECKSUM_BYTES = 16
# With less room left, a file that can't be written can't be for want of room.
FULL_BYTES = 64 << 20
# A file without an entry that is older than this was left by a process that was killed.
ORPHAN_SECONDS = 3600.0


class PrefixStore:
    """A folder of page files with an SQLite index, at most ``limit`` bytes, the least recently used go first.

    Several processes may use one folder. A file is written beside its place and moved there before its entry is made,
    and an entry goes before its file, so whoever is killed leaves a store that works; files are checked when they are
    read. Raises ConfigError if the folder can't be used.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int) -> None:
        self._folder = Path(folder).expanduser() / "tinykv-pages-2"
        self._limit = limit
        self.skipped = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._index = PageIndex.open(self._folder / "index.sqlite")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("prefix_dir", f"{str(folder)!r} can't be used: {error}; a writable folder will") from None
        folder = self._folder
        self._writer = PageWriter(folder / "index.sqlite", lambda index: _remove_orphans(folder, index))

    def find(self, key: bytes, tokens: bytes) -> StoredPage | None:
        """The page with this hash, if it has these tokens."""
        try:
            return self._index.find(key, tokens)
        except sqlite3.Error as error:
            log.warning("the prefix store can't be read: %s", error)
            return None

    def partial_pages(self, parents: Sequence[bytes]) -> list[tuple[bytes, StoredPage]]:
        """The partial pages behind the pages with these hashes, with the hash that each is behind."""
        try:
            return self._index.partial_pages(parents)
        except sqlite3.Error as error:
            log.warning("the prefix store can't be read: %s", error)
            return []

    def load(self, page: StoredPage) -> dict[str, mx.array] | None:
        """The arrays of a page, evaluated; None, and it is forgotten, if the file is gone or damaged."""
        try:
            data = self._path(page.hash).read_bytes()
            if _checksum(data) != page.checksum[:CHECKSUM_BYTES]:
                raise ValueError("the checksum is wrong")
            arrays: dict[str, mx.array] = mx.load(io.BytesIO(data), format="safetensors")  # type: ignore[assignment]
            mx.eval(arrays)
            return arrays
        except Exception as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("a stored page is not used: %s: %s", self._path(page.hash), error)
            self._submit(lambda index: self._forget(index, [page.hash]))
            return None

    def load_state(self, page: StoredPage) -> list[Any] | None:
        """What layers without pages held at the end of the page; None if it can't be read."""
        try:
            path = self._state_path(page.hash)
            if _checksum(path.read_bytes()) != page.checksum[CHECKSUM_BYTES:]:
                raise ValueError("the checksum is wrong")
            return list(mlx_cache.load_prompt_cache(str(path)))
        except Exception as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("stored states are not used: %s: %s", self._state_path(page.hash), error)
            self._submit(lambda index: self._forget(index, [page.hash]))
            return None

    def save(
        self,
        key: bytes,
        tokens: bytes,
        depth: int,
        groups: Sequence[bool],
        arrays: Callable[[], Mapping[str, mx.array]],
        states: Sequence[Any] | None,
        used: float,
        wait: bool = False,
        after: bytes | None = None,
        parent: bytes | None = None,
    ) -> None:
        """Write a page in the background, unless it is there or, without ``wait``, too many wait.

        ``arrays()`` makes what it consists of; ``depth`` is how many pages come before, ``used`` when it was used last.
        With ``after``, the hash of the page before it, only if that one is stored: it would not be found without. A
        partial page is found by the hash of its ``parent``.
        """
        known = self.find(key, tokens)
        if known is not None and known.has_all(groups, states is not None):
            return
        if not wait and self._writer.is_full:
            self.skipped += 1
            return
        made = dict(arrays()) or {"none": mx.zeros((1,))}  # a model without pages, but a file needs something
        mx.eval(made)
        if states is not None:
            mx.eval([leaf.state for leaf in states])

        def job(index: PageIndex) -> None:
            if after is None or index.has(after):
                self._save(index, key, tokens, depth, bytes(groups), made, states, used, parent)

        self._submit(job, wait)

    def touch(self, used: Mapping[bytes, float], wait: bool = False) -> None:
        """Note when these pages were used, unless, without ``wait``, too much waits to be written."""
        self._submit(lambda index: index.touch(used), wait)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.flush()

    def close(self) -> None:
        """Write what waits, and end the writer. Closing again does nothing."""
        self._writer.close()
        self._index.close()

    # The writer's thread --------------------------------------------------------------------------------------------

    def _save(
        self,
        index: PageIndex,
        key: bytes,
        tokens: bytes,
        depth: int,
        groups: bytes,
        arrays: dict[str, mx.array],
        states: Sequence[Any] | None,
        used: float,
        parent: bytes | None,
    ) -> None:
        known = index.find(key, tokens)  # by now: another process, or a job before this one, may have had it
        if known is not None and known.has_all(groups, states is not None):
            return
        needed: int = sum(item.nbytes for item in arrays.values()) + sum(leaf.nbytes for leaf in states or ())
        over = index.total() + needed - self._limit
        if over > 0 and index.least_used(over, used, depth)[1] < over:
            return  # it would be the first to go
        path, state_path = self._path(key), self._state_path(key)
        path.parent.mkdir(exist_ok=True)

        def write_state(temporary: str) -> None:
            mlx_cache.save_prompt_cache(temporary, list(states or ()))

        def make_room() -> bool:
            """On a full disk, what was used less recently gives way, as at the limit."""
            keys, size = index.least_used(2 * needed, used, depth)
            self._forget(index, [each for each in keys if each != key])
            return size >= needed

        size = self._place(path, lambda temporary: mx.save_safetensors(temporary, arrays), make_room)
        checksum = _checksum(path.read_bytes())
        if states is not None:
            size += self._place(state_path, write_state, make_room)
            checksum += _checksum(state_path.read_bytes())
        elif known is not None and known.state is not None:
            size += state_path.stat().st_size
            checksum += known.checksum[CHECKSUM_BYTES:]
        index.put(key, tokens, depth, groups, len(checksum) > CHECKSUM_BYTES, size, checksum, used, parent)
        over = index.total() - self._limit
        if over > 0:
            self._forget(index, index.least_used(over)[0])

    def _place(self, path: Path, write: Callable[[str], object], make_room: Callable[[], bool]) -> int:
        """Have ``write`` fill a file that appears at ``path`` whole or not at all; returns its size.

        If the disk is full it is tried once more if there is ``make_room()``.
        """
        try:
            write_whole(path, write)
        except (OSError, RuntimeError) as error:  # mlx has no other for a disk that is full
            if not self._is_full(error) or not make_room():
                raise
            write_whole(path, write)
        return path.stat().st_size

    def _is_full(self, error: Exception) -> bool:
        if isinstance(error, OSError):
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return bool(shutil.disk_usage(self._folder).free < FULL_BYTES)

    def _forget(self, index: PageIndex, keys: Sequence[bytes]) -> None:
        index.forget(keys)
        for key in keys:
            self._path(key).unlink(missing_ok=True)
            self._state_path(key).unlink(missing_ok=True)

    # Odds and ends --------------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[PageIndex], None], wait: bool = False) -> None:
        if not self._writer.submit(job, wait):
            self.skipped += 1

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.safetensors"

    def _state_path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.state.safetensors"


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _remove_orphans(folder: Path, index: PageIndex) -> None:
    """Delete old page files that the index doesn't list."""
    known = {key.hex() for key in index.hashes()}
    limit = time.time() - ORPHAN_SECONDS
    for path in folder.glob("??/*.safetensors"):
        if path.name.split(".")[0] not in known and path.stat().st_mtime < limit:
            path.unlink(missing_ok=True)
