"""What Postgres says, in Evermark's own words. Only primary messages are quoted: details may hold row data."""

from __future__ import annotations

import psycopg
from psycopg import errors as pg

from evermark.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    DiskFullError,
    EvermarkError,
    SetupError,
    UnreachableError,
)

_BUSY = (
    pg.LockNotAvailable,
    pg.QueryCanceled,
    pg.DeadlockDetected,
    pg.SerializationFailure,
    pg.TooManyConnections,
    pg.ObjectInUse,
    pg.IdleInTransactionSessionTimeout,
)
_DENIED = (pg.InsufficientPrivilege, pg.InvalidPassword, pg.InvalidAuthorizationSpecification)
_NOT_SET_UP = (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedColumn, pg.InvalidCatalogName)
_UNWRITABLE = (pg.ReadOnlySqlTransaction,)
# What the server says to a statement, by the class of its error: what it is, in which words, and a hint.
_BY_CLASS: tuple[tuple[tuple[type[psycopg.Error], ...], type[EvermarkError], str, str], ...] = (
    ((pg.DiskFull,), DiskFullError, "", "free space on the disk of the state database"),
    (_DENIED, DeniedError, "", "grant the role of state.dsn what it lacks"),
    (_NOT_SET_UP, SetupError, "", "run `evermark migrate`"),
    (_UNWRITABLE, UnreachableError, " takes no writes", "it may be a standby; point state.dsn at the primary"),
    (_BUSY, BusyError, "", "a lock is held there, or it is overloaded; retried"),
)
_DENIED_WORDS = (
    "authentication failed",
    "pg_hba.conf",
    "no password supplied",
    "permission denied",
    "not permitted to log in",
)
_FULL_WORDS = ("too many clients", "too many connections", "remaining connection slots")
_UNREADABLE_WORDS = ("invalid integer value", "invalid port number", "could not match")
# What it says to a new connection has no class, only words.
_BY_WORDS: tuple[tuple[tuple[str, ...], type[EvermarkError], str], ...] = (
    (_DENIED_WORDS, DeniedError, "check the user and password in state.dsn"),
    (("does not exist",), SetupError, "create the database and the role that state.dsn names"),
    (_UNREADABLE_WORDS, ConfigError, "write state.dsn as postgresql://user:password@host:5432/database"),
    (_FULL_WORDS, BusyError, "raise max_connections of the state database"),
)


def from_driver(error: psycopg.Error, where: str) -> EvermarkError:
    """The Evermark error for what the driver raised; `where` names the store, never its address."""
    said = _said(error)
    for classes, kind, verb, hint in _BY_CLASS:
        if isinstance(error, classes):
            return kind(f"{where}{verb}: {said}", hint=hint)
    if not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return EvermarkError(f"{where}: {type(error).__name__}: {said}", hint="this is unexpected: please report it")
    for all_words, kind, hint in _BY_WORDS:
        if any(words in said.lower() for words in all_words):
            return kind(f"{where}: {said}", hint=hint)
    hint = "check that Postgres runs and that state.dsn is right"
    return UnreachableError(f"{where} does not answer: {said}", hint=hint)


def _said(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(text.split())[:500]
