"""PageIndex: the SQLite index of a folder of stored pages."""

from __future__ import annotations

import logging
import math
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("tinykv")

# Seconds to wait for another process that is writing; and after one such wait was in vain, until a write succeeds.
PATIENCE = 10.0
IMPATIENCE = 0.1
# Hashes in one query: SQLite takes 999 of them in its older versions.
QUERY_HASHES = 900

_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    hash BLOB PRIMARY KEY, parent BLOB, tokens BLOB NOT NULL, depth INTEGER NOT NULL, groups BLOB NOT NULL,
    state INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum BLOB NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pages_by_use ON pages (used, depth DESC);
CREATE INDEX IF NOT EXISTS partial_pages ON pages (parent) WHERE parent IS NOT NULL;
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

    def has_all(self, groups: Sequence[bool] | bytes, states: bool) -> bool:
        """Whether these groups' K/V and, if asked for, the states are there."""
        there = all(page >= 0 for page, group in zip(self.pages, groups, strict=True) if group)
        return there and (self.state is not None or not states)


class PageIndex:
    """A connection to the index; for one thread. Methods raise sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=PATIENCE, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)

    @classmethod
    def open(cls, path: Path) -> PageIndex:
        """The index; a damaged one is set aside, and the pages it knew are forgotten."""
        try:
            return cls(path)
        except sqlite3.OperationalError:
            raise  # locked, or the folder can't be written
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"index-damaged-{secrets.token_hex(4)}.sqlite")
            log.warning("the index of stored prompts is damaged (%s); it is set aside as %s", error, aside)
            path.replace(aside)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return cls(path)

    def find(self, key: bytes, tokens: bytes) -> StoredPage | None:
        """The page with this hash, if it has these tokens."""
        row = self._db.execute("SELECT tokens, groups, state, checksum FROM pages WHERE hash = ?", (key,)).fetchone()
        return StoredPage(key, tokens, row[1], bool(row[2]), row[3]) if row is not None and row[0] == tokens else None

    def partial_pages(self, parents: Sequence[bytes]) -> list[tuple[bytes, StoredPage]]:
        """The partial pages behind the pages with these hashes, with the hash that each is behind."""
        found: list[tuple[bytes, StoredPage]] = []
        for start in range(0, len(parents), QUERY_HASHES):
            some = parents[start : start + QUERY_HASHES]
            query = "SELECT parent, hash, tokens, groups, state, checksum FROM pages WHERE parent IN "
            rows = self._db.execute(f"{query} ({', '.join('?' * len(some))})", some)
            found += [(row[0], StoredPage(row[1], row[2], row[3], bool(row[4]), row[5])) for row in rows]
        return found

    def has(self, key: bytes) -> bool:
        """Whether there is a page with this hash."""
        return self._db.execute("SELECT 1 FROM pages WHERE hash = ?", (key,)).fetchone() is not None

    def put(
        self,
        key: bytes,
        tokens: bytes,
        depth: int,
        groups: bytes,
        state: bool,
        size: int,
        checksum: bytes,
        used: float,
        parent: bytes | None = None,
    ) -> None:
        """Enter a page that was used last at ``used``, in place of what was known of it.

        A partial page has the hash of its ``parent``: who looks for it can't know how many tokens it has.
        """
        row = (key, parent, tokens, depth, groups, state, size, checksum, used)
        with self._db as db:
            db.execute("INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)

    def touch(self, used: Mapping[bytes, float]) -> None:
        """Note when these pages were used."""
        with self._db as db:
            query = "UPDATE pages SET used = MAX(used, ?) WHERE hash = ?"
            db.executemany(query, [(at, key) for key, at in used.items()])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Take these pages out."""
        with self._db as db:
            db.executemany("DELETE FROM pages WHERE hash = ?", [(key,) for key in keys])

    def total(self) -> int:
        """Bytes of all pages."""
        (total,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM pages").fetchone()
        return int(total)

    def least_used(self, size: int, used: float = math.inf, depth: int = -1) -> tuple[list[bytes], int]:
        """Pages of ``size`` bytes together, or all there are, the least recently used first; and their bytes.

        The last pages of a prompt first: without those before them they would not be found. Only pages that go before
        one that was used at ``used`` and comes after ``depth`` others.
        """
        found, total = [], 0
        query = "SELECT hash, bytes FROM pages WHERE used < ? OR (used = ? AND depth > ?) ORDER BY used, depth DESC"
        for key, count in self._db.execute(query, (used, used, depth)):
            if total >= size:
                break
            total += count
            found.append(key)
        return found, total

    def hashes(self) -> set[bytes]:
        """All pages."""
        return {key for (key,) in self._db.execute("SELECT hash FROM pages")}

    def wait_at_most(self, seconds: float) -> None:
        """How long to wait for another process that is writing."""
        self._db.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    def close(self) -> None:
        """End the connection."""
        self._db.close()
