"""PrefixStore: pages of stored prompts on disk, found again by their hash, by any process and after a restart."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from .errors import ConfigError

log = logging.getLogger("tinykv")

# Pages that may wait to be written: further ones are not written, so that generation never waits for the disk.
MAX_WAITING = 64
CHECKSUM_BYTES = 16
# A file without an entry that is older than this was left by a process that was killed.
ORPHAN_SECONDS = 3600.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    hash BLOB PRIMARY KEY, tokens BLOB NOT NULL, depth INTEGER NOT NULL, groups BLOB NOT NULL, state INTEGER NOT NULL,
    bytes INTEGER NOT NULL, checksum BLOB NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pages_by_use ON pages (used, depth DESC);
"""


class StoredPage:
    """A page on disk, where :mod:`.prefix_cut` looks for a node of the tree.

    ``pages`` has 0 for the cache groups whose K/V are in the file and -1 for the others. ``state`` is None if nothing
    of layers without pages is.
    """

    __slots__ = ("checksum", "children", "hash", "pages", "state", "tokens")

    def __init__(self, key: bytes, tokens: bytes, groups: bytes, state: bool, checksum: bytes) -> None:
        self.hash = key
        self.tokens = tokens
        self.pages = [0 if group else -1 for group in groups]
        self.state: Any = True if state else None
        self.checksum = checksum
        self.children: dict[bytes, Any] = {}

    @property
    def count(self) -> int:
        """Tokens in the page."""
        return len(self.tokens) // 8


class PrefixStore:
    """A folder of page files with an SQLite index, at most ``limit`` bytes, the least recently used go first.

    Several processes may use one folder. A file is written beside its place and moved there before its entry is made,
    and an entry goes before its file, so whoever is killed leaves a store that works; files are checked when they are
    read. Raises ConfigError if the folder can't be used.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int) -> None:
        self._folder = Path(folder).expanduser() / "tinykv-pages-1"
        self._limit = limit
        self.skipped = 0
        self._failed = False  # one warning is enough
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._db = self._open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("prefix_dir", f"{str(folder)!r} can't be used: {error}; a writable folder will") from None
        self._jobs: queue.Queue[Callable[[sqlite3.Connection], None] | None] = queue.Queue(MAX_WAITING)
        self._writer = threading.Thread(target=self._write, name="tinykv-prefix-store", daemon=True)
        self._writer.start()

    def find(self, key: bytes, tokens: bytes) -> StoredPage | None:
        """The page with this hash, if it has these tokens."""
        try:
            row = self._db.execute(
                "SELECT tokens, groups, state, checksum FROM pages WHERE hash = ?", (key,)
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("the prefix store can't be read: %s", error)
            return None
        return StoredPage(key, tokens, row[1], bool(row[2]), row[3]) if row is not None and row[0] == tokens else None

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
            self._submit(lambda db: self._forget(db, [page.hash]))
            return None

    def load_state(self, page: StoredPage) -> list[Any] | None:
        """What layers without pages held at the end of the page; None if it can't be read."""
        try:
            path = self._state_path(page.hash)
            if _checksum(path.read_bytes()) != page.checksum[CHECKSUM_BYTES:]:
                raise ValueError("the checksum is wrong")
            return list(mlx_cache.load_prompt_cache(str(path)))
        except Exception as error:
            log.warning("stored states are not used: %s: %s", self._state_path(page.hash), error)
            self._submit(lambda db: self._forget(db, [page.hash]))
            return None

    def save(
        self,
        key: bytes,
        tokens: bytes,
        depth: int,
        groups: Sequence[bool],
        arrays: Callable[[], Mapping[str, mx.array]],
        states: Sequence[Any] | None,
        wait: bool = False,
    ) -> None:
        """Write a page in the background, unless it is there or, without ``wait``, too many wait.

        ``arrays()`` makes what it consists of; ``depth`` is how many pages come before.
        """
        known = self.find(key, tokens)
        if known is not None and _has_all(known, groups, states):
            return
        if not wait and self._jobs.full():
            self.skipped += 1
            return
        made = dict(arrays()) or {"none": mx.zeros((1,))}  # a model without pages, but a file needs something
        mx.eval(made)
        if states is not None:
            mx.eval([leaf.state for leaf in states])
        job = lambda db: self._save(db, key, tokens, depth, bytes(groups), made, states)  # noqa: E731
        self._submit(job, wait)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these pages were used."""
        now = time.time()
        rows = [(now, key) for key in keys]
        self._submit(lambda db: _commit(db, lambda: db.executemany("UPDATE pages SET used = ? WHERE hash = ?", rows)))

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._writer.is_alive():
            self._jobs.join()

    def close(self) -> None:
        """Write what waits, and end the writer. Closing again does nothing."""
        if not self._writer.is_alive():
            return
        self._jobs.put(None)
        self._writer.join()
        self._db.close()

    # The writer's thread --------------------------------------------------------------------------------------------

    def _write(self) -> None:
        db: sqlite3.Connection | None = None
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if db is None:
                    db = self._connect()
                    self._remove_orphans(db)
                job(db)
            except Exception as error:
                # A full disk, or a folder that was removed: the page is computed again when it is needed.
                log.log(logging.DEBUG if self._failed else logging.WARNING, "a page was not stored: %s", error)
                self._failed = True
            finally:
                self._jobs.task_done()
                if job is None and db is not None:
                    db.close()

    def _save(
        self,
        db: sqlite3.Connection,
        key: bytes,
        tokens: bytes,
        depth: int,
        groups: bytes,
        arrays: dict[str, mx.array],
        states: Sequence[Any] | None,
    ) -> None:
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        size = self._place(path, lambda temporary: mx.save_safetensors(temporary, arrays))
        checksum = _checksum(path.read_bytes())
        if states is not None:
            write = lambda temporary: mlx_cache.save_prompt_cache(temporary, list(states))  # noqa: E731
            size += self._place(self._state_path(key), write)
            checksum += _checksum(self._state_path(key).read_bytes())
        row = (key, tokens, depth, groups, states is not None, size, checksum, time.time())
        _commit(db, lambda: db.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row))
        self._keep_limit(db)

    def _place(self, path: Path, write: Callable[[str], object]) -> int:
        """Have ``write`` fill a file that appears at ``path`` whole or not at all; returns its size."""
        temporary = path.with_name(f".{secrets.token_hex(8)}.safetensors")
        try:
            write(os.fspath(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path.stat().st_size

    def _keep_limit(self, db: sqlite3.Connection) -> None:
        (total,) = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM pages").fetchone()
        if total <= self._limit:
            return
        gone = []
        # The last pages of a prompt first: without those before them they would not be found.
        for key, size in db.execute("SELECT hash, bytes FROM pages ORDER BY used, depth DESC"):
            if total <= self._limit:
                break
            total -= size
            gone.append(key)
        self._forget(db, gone)

    def _forget(self, db: sqlite3.Connection, keys: Sequence[bytes]) -> None:
        _commit(db, lambda: db.executemany("DELETE FROM pages WHERE hash = ?", [(key,) for key in keys]))
        for key in keys:
            self._path(key).unlink(missing_ok=True)
            self._state_path(key).unlink(missing_ok=True)

    def _remove_orphans(self, db: sqlite3.Connection) -> None:
        known = {key.hex() for (key,) in db.execute("SELECT hash FROM pages")}
        limit = time.time() - ORPHAN_SECONDS
        for path in self._folder.glob("??/*.safetensors"):
            if path.name.split(".")[0] not in known and path.stat().st_mtime < limit:
                path.unlink(missing_ok=True)

    # Odds and ends --------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        """The index; a damaged one is set aside, and the pages it knew are forgotten."""
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise  # locked, or the folder can't be written
        except sqlite3.DatabaseError as error:
            aside = self._index.with_name(f"index-damaged-{secrets.token_hex(4)}.sqlite")
            log.warning("the index of stored prompts is damaged (%s); it is set aside as %s", error, aside)
            self._index.replace(aside)
            for suffix in ("-wal", "-shm"):
                self._index.with_name(self._index.name + suffix).unlink(missing_ok=True)
            return self._connect()

    @property
    def _index(self) -> Path:
        return self._folder / "index.sqlite"

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._index, timeout=10, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
        return db

    def _submit(self, job: Callable[[sqlite3.Connection], None], wait: bool = False) -> None:
        try:
            self._jobs.put(job, block=wait)
        except queue.Full:
            self.skipped += 1

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.safetensors"

    def _state_path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.state.safetensors"


def _has_all(known: StoredPage, groups: Sequence[bool], states: Sequence[Any] | None) -> bool:
    """Whether a stored page has everything that would be written."""
    there = all(page >= 0 for page, group in zip(known.pages, groups, strict=True) if group)
    return there and (known.state is not None or states is None)


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _commit(db: sqlite3.Connection, change: Callable[[], object]) -> None:
    with db:
        change()
