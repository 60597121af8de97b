"""The file a node keeps everything in: SQLite, write-ahead logged, synced at every commit.

A commit returns when its write-ahead log is on the disk (`synchronous = FULL`). After a crash SQLite takes up the
committed part of that log and ignores the half-written tail, which `cut_tail` measures so that it can be reported.
"""

from __future__ import annotations

import secrets
import shutil
import sqlite3
from importlib.resources import files
from pathlib import Path

from evermark.embedded.lock import FileLock
from evermark.errors import BusyError, ConfigError, DiskFullError, EvermarkError, FormatError
from evermark.observe.logging import get_logger

FORMAT = 1
_FILE = "blocknode.db"
_PAGE_BYTES = 8192
_CHECKPOINT_PAGES = 2000
_CACHE_KIB_WRITER = 32 * 1024
_CACHE_KIB_READER = 4 * 1024
_BUSY_MS = 10_000
_SCARCE_BYTES = 1024 * 1024  # with less left SQLite fails in more ways than by saying that the disk is full
_WAL_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24


class Database:
    """The folder of a node, used by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / _FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"blocknode: cannot use {folder}: {error.strerror or error}",
                hint="name a folder that is writable with --data",
            ) from error
        self._lock = FileLock(folder / "lock")

    def open(self) -> tuple[sqlite3.Connection, int]:
        """The connection that writes, and how many bytes of a half-written tail were cut off (0 also where the disk is
        too full to find out)."""
        if not self._lock.try_alone():
            self._lock.release()
            raise BusyError(
                f"another node uses {self.folder}", hint="end it first, or give each node a folder of its own"
            )
        try:
            wal = _wal_of(self.path)
            connection = self._connect(_CACHE_KIB_WRITER)
            connection.execute(f"pragma page_size = {_PAGE_BYTES}")
            if connection.execute("pragma journal_mode = wal").fetchone()[0] != "wal":
                raise ConfigError(f"{self.folder} cannot hold a write-ahead log", hint="use a folder on a local disk")
            connection.execute("pragma synchronous = full")
            connection.execute(f"pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            self._prepare(connection)
            return connection, _cut_bytes(connection, wal)
        except sqlite3.DatabaseError as error:
            self._lock.release()
            raise self._cannot_open(error) from error
        except BaseException:
            self._lock.release()
            raise

    def reader(self) -> sqlite3.Connection:
        connection = self._connect(_CACHE_KIB_READER)
        connection.execute("pragma query_only = on")
        return connection

    def close(self) -> None:
        self._lock.release()

    def _cannot_open(self, error: sqlite3.DatabaseError) -> EvermarkError:
        """A full disk is no reason to restore anything."""
        kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
        unfit = kind in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
        if kind == sqlite3.SQLITE_FULL or (unfit and shutil.disk_usage(self.folder).free < _SCARCE_BYTES):
            hint = "free some space, then start it again: nothing that was accepted is lost"
            return DiskFullError(f"no space left for {self.path}", hint=hint)
        hint = "restore the folder from a copy, or follow another node"
        return FormatError(f"{self.path} cannot be read: {error}", hint=hint)

    def _connect(self, cache_kib: int) -> sqlite3.Connection:
        # Each connection is used by one thread at a time, but closed by another.
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute(f"pragma busy_timeout = {_BUSY_MS}")
        connection.execute(f"pragma cache_size = -{cache_kib}")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (found,) = connection.execute("pragma user_version").fetchone()
        if found > FORMAT:
            raise FormatError(
                f"{self.path} has format {found}, this program knows {FORMAT}", hint="update evermark before serving it"
            )
        if found == FORMAT:
            return
        script = files("evermark.blocknode").joinpath("schema.sql").read_text(encoding="utf-8")
        node = f"insert into meta values ('node', '{secrets.token_hex(8)}');"
        connection.executescript(f"begin;\n{script}\n{node}\npragma user_version = {FORMAT};\ncommit;")


def _cut_bytes(connection: sqlite3.Connection, wal: bytes) -> int:
    """SQLite says how much of its log it took up when it brings the log over. A full disk does not let it: the node
    starts all the same, for its readers."""
    try:
        _, frames, _ = connection.execute("pragma wal_checkpoint(passive)").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL:
            raise
        get_logger(part="blocknode").warning("the disk is full: a half-written tail would not be seen", error=error)
        return 0
    return cut_tail(wal, frames)


def _wal_of(path: Path) -> bytes:
    """The write-ahead log as a crash left it, page contents aside; empty after an orderly stop."""
    wal = path.with_name(path.name + "-wal")
    kept = bytearray()
    try:
        size = wal.stat().st_size
        with wal.open("rb") as file:
            kept += file.read(_WAL_HEADER_BYTES)
            page_bytes = int.from_bytes(kept[8:12], "big")
            for at in range(_WAL_HEADER_BYTES, size, _FRAME_HEADER_BYTES + page_bytes):
                file.seek(at)
                header = file.read(_FRAME_HEADER_BYTES)
                kept += header + min(page_bytes, size - at - len(header)).to_bytes(4, "big")
    except FileNotFoundError:
        return b""
    return bytes(kept)


def cut_tail(wal: bytes, frames: int) -> int:
    """Bytes written after the last commit: frames of this generation of the log (by their salt) beyond the `frames`
    that SQLite took up. Frames after them are left from earlier generations, and mean nothing."""
    if len(wal) < _WAL_HEADER_BYTES:
        return len(wal)
    salt, step, cut = wal[16:24], _FRAME_HEADER_BYTES + 4, 0
    for at in range(_WAL_HEADER_BYTES + frames * step, len(wal), step):
        header = wal[at : at + _FRAME_HEADER_BYTES]
        if len(header) >= 16 and header[8:16] != salt:
            break
        cut += min(len(header), _FRAME_HEADER_BYTES) + int.from_bytes(wal[at + _FRAME_HEADER_BYTES : at + step], "big")
    return cut
