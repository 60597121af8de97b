"""What Postgres says, as our errors. The one place that reads SQLSTATEs; texts never decide alone."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import errors as pg

from evermark.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    DiskFullError,
    EvermarkError,
    GapError,
    SetupError,
    UnreachableError,
)

INSTALL_HINT = "run `evermark source install` (or `--print` for a DBA)"
RECOVER_HINT = "see `evermark doctor`, then `evermark source recover`"

GRANT_HINT = "as a superuser: alter role … replication; and the grants that `evermark source install --print` ends with"

_GONE = (pg.AdminShutdown, pg.CrashShutdown, pg.CannotConnectNow, pg.TooManyConnections, pg.ConnectionException)
_DENIED_LOGIN = (pg.InvalidPassword, pg.InvalidAuthorizationSpecification)
_LOGIN_DENIED = (
    "authentication failed",
    "pg_hba.conf",
    "no password supplied",
    "not permitted to log in",
    "no such user",
)
_TLS = ("does not support ssl", "certificate verify failed", "certificate file", "does not match host name")
_NOT_THERE = ("does not exist", "no such database", "definition of service")
_UNREADABLE = ("invalid integer value", "invalid port number", "could not match")
_FULL = ("too many clients", "too many connections", "remaining connection slots")


def where(dsn: str) -> str:
    """Host, port and database of a connection string; never its user's password."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        return "an unreadable dsn"
    return f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"


def unreachable(error: psycopg.Error, dsn: str) -> EvermarkError:
    """Why a connection could not be made."""
    text = _first_line(error)
    lower = text.lower()
    # libpq gives no SQLSTATE for what happens while connecting. What is not known here, and what a server says in
    # another language, counts as one that may come back: it is tried again, and shown.
    if isinstance(error, _DENIED_LOGIN) or any(words in lower for words in _LOGIN_DENIED):
        return DeniedError(f"Postgres at {where(dsn)} refused the login", hint="check user, password and pg_hba.conf")
    if "permission denied" in lower:
        return DeniedError(f"Postgres at {where(dsn)}: {text}", hint="grant the role of the dsn what it lacks")
    if any(words in lower for words in _TLS):
        return SetupError(f"Postgres at {where(dsn)}: {text}", hint="check sslmode and sslrootcert in the dsn")
    if any(words in lower for words in _NOT_THERE):
        return SetupError(f"Postgres at {where(dsn)}: {text}", hint="check the database and role named in the dsn")
    if any(words in lower for words in _UNREADABLE):
        return ConfigError(
            f"the dsn of {where(dsn)} is none: {text}", hint="write postgresql://user:password@host:5432/db"
        )
    if any(words in lower for words in _FULL):
        hint = "it is tried again; raise max_connections, or the limit of the role or database"
        return BusyError(f"Postgres at {where(dsn)}: {text}", hint=hint)
    return UnreachableError(f"Postgres at {where(dsn)} does not answer: {text}", hint="is it up, and reachable?")


def translate(error: psycopg.Error, dsn: str, doing: str) -> EvermarkError:
    """The error of a statement, in our words."""
    text = f"{doing} at {where(dsn)}: {_first_line(error)}"
    if isinstance(error, pg.InsufficientPrivilege):
        return DeniedError(text, hint=GRANT_HINT)
    if isinstance(error, (pg.ObjectInUse, pg.LockNotAvailable, pg.QueryCanceled, pg.DeadlockDetected)):
        return BusyError(text, hint="another session is using it just now; it is tried again")
    if isinstance(error, pg.ConfigurationLimitExceeded):
        # Another program's slot may go again, most often soon: a repair spends no try on that.
        hint = "it is tried again; drop a slot that nobody reads, or raise max_replication_slots and restart the server"
        return BusyError(text, hint=hint)
    if isinstance(error, pg.DiskFull):
        return DiskFullError(text, hint="the database server has no space left")
    if isinstance(error, (pg.UndefinedTable, pg.UndefinedObject, pg.UndefinedFunction, pg.InvalidSchemaName)):
        return SetupError(text, hint=INSTALL_HINT)
    if isinstance(error, pg.ObjectNotInPrerequisiteState):
        # The caller looks at the slot's own state first; after any other error of this class reading cannot go on.
        return GapError(text, hint=RECOVER_HINT)
    if isinstance(error, pg.UndefinedFile):
        return GapError(f"{text} (the WAL the slot needs is gone)", hint=RECOVER_HINT)
    if isinstance(error, _GONE) or (isinstance(error, psycopg.OperationalError) and error.sqlstate is None):
        return UnreachableError(text, hint="the connection broke; it is made again")
    return EvermarkError(f"{text} [{error.sqlstate or type(error).__name__}]")


@contextmanager
def translated(dsn: str, doing: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, dsn, doing) from error
    except UnicodeEncodeError as error:
        raise unwritable(error, dsn, doing) from error


def unwritable(error: UnicodeEncodeError, dsn: str, doing: str) -> SetupError:
    """What we send goes in the encoding of the database: what it has no characters for, it has nowhere."""
    odd = error.object[error.start : error.end][:20]
    said = f"{doing} at {where(dsn)}: a database in {error.encoding} has no {odd!r}"
    return SetupError(said, hint="correct the file")


def python_encoding(server_encoding: str) -> str:
    """Python's name of a server's encoding; logical decoding sends text in the server's own."""
    if server_encoding in {"UTF8", "SQL_ASCII"}:
        return "utf-8"
    name = server_encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
    try:
        return codecs.lookup(name).name
    except LookupError:
        raise SetupError(f"a database in {server_encoding} cannot be read", hint="use a UTF8 database") from None


def _first_line(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error)
    return text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
