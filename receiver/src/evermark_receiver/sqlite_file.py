"""The file of `SqliteDedup`, version 1: made, checked and opened; and what its errors mean.

It holds hashes of ids and the times they were handled at, and nothing of the events.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from evermark_receiver.dedup import DedupError

VERSION = 1
APPLICATION_ID = 0x45764D6B  # "EvMk", where `file` looks for it

_RETRY_S = 0.01
_WAL_BYTES_KEPT = 4 * 1024 * 1024

# `turn` is the order in which ids were handled. Triggers keep `held` right, whatever is deleted and why.
_SCHEMA = (
    "CREATE TABLE streams (number INTEGER PRIMARY KEY, place BLOB NOT NULL UNIQUE, held INTEGER NOT NULL)",
    """CREATE TABLE done (
        turn INTEGER PRIMARY KEY, stream INTEGER NOT NULL, identity BLOB NOT NULL UNIQUE, at REAL NOT NULL
    )""",
    "CREATE INDEX done_by_stream ON done (stream)",
    "CREATE TABLE in_progress (identity BLOB PRIMARY KEY, token INTEGER NOT NULL, since REAL NOT NULL) WITHOUT ROWID",
    """CREATE TRIGGER done_more AFTER INSERT ON done BEGIN
        UPDATE streams SET held = held + 1 WHERE number = new.stream;
    END""",
    """CREATE TRIGGER done_less AFTER DELETE ON done BEGIN
        UPDATE streams SET held = held - 1 WHERE number = old.stream;
        DELETE FROM streams WHERE number = old.stream AND held <= 0;
    END""",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)

_START_ANEW = "stop all workers, move it away with its -wal and -shm, start them: what it held is forgotten"
_MEANINGS = {
    sqlite3.SQLITE_BUSY: "is locked by another program; look for a backup, a shell or a worker that hangs",
    sqlite3.SQLITE_LOCKED: "is locked by another program; look for a backup, a shell or a worker that hangs",
    sqlite3.SQLITE_FULL: "the disk is full; make room",
    sqlite3.SQLITE_IOERR: "cannot be read or written; look at the disk",
    sqlite3.SQLITE_READONLY: "may not be written; look at the permissions of the file and its folder",
    sqlite3.SQLITE_PERM: "may not be opened; look at the permissions of the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; its folder has to exist and to be writable",
    sqlite3.SQLITE_CORRUPT: f"is damaged; {_START_ANEW}",
    sqlite3.SQLITE_NOTADB: f"is no SQLite file, or damaged; {_START_ANEW}",
}


def explained(error: sqlite3.Error) -> str:
    """What happened and what to do about it, for a log."""
    meaning = _MEANINGS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "cannot be used")
    return f"{meaning} ({getattr(error, 'sqlite_errorname', '') or type(error).__name__}: {error})"


def check_file(path: Path, wait_s: float) -> None:
    """Make the file if it is missing, and look at all of it: 0.3 s for a million ids, while others may write."""
    try:
        db = open_file(path, time.monotonic() + wait_s)
        try:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise DedupError(f"{path}: {explained(error)}") from error
    if found != "ok":
        raise DedupError(f"{path}: is damaged; {_START_ANEW} ({found})")


def open_file(path: Path, deadline: float) -> sqlite3.Connection:
    """A connection in autocommit mode, to a file that is ours, whole, and in WAL mode."""
    wait_s = max(0.0, deadline - time.monotonic())
    db = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
    try:
        empty = _is_empty(db, path)
        _use_wal(db, path, deadline)
        if empty:
            _make(db, path)
        db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_KEPT}")
    except BaseException:
        db.close()
        raise
    return db


def _is_empty(db: sqlite3.Connection, path: Path) -> bool:
    """Whether the tables have to be made. A file of another program is not touched."""
    (owner,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if owner == APPLICATION_ID and version == VERSION:
        return False
    if owner == APPLICATION_ID:
        raise DedupError(
            f"{path}: has version {version}, this evermark-receiver knows {VERSION}; install the newer one"
        )
    if owner or version or tables:
        raise DedupError(f"{path}: belongs to another program; choose a file of its own")
    return True


def _use_wal(db: sqlite3.Connection, path: Path, deadline: float) -> None:
    tries = 0
    while True:
        tries += 1
        try:
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            # When several workers start at once SQLite may not wait here; and when it did, the time may be over.
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or (tries > 1 and time.monotonic() >= deadline):
                raise
            time.sleep(_RETRY_S)
    if mode != "wal":
        raise DedupError(f"{path}: SQLite cannot keep a write-ahead log here ({mode}); choose a file on a local disk")


def _make(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")
    if _is_empty(db, path):  # another worker may have been faster
        for statement in _SCHEMA:
            db.execute(statement)
    db.execute("COMMIT")
