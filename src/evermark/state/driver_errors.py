"""What Postgres says, in Evermark's own words. Only primary messages are quoted: details may hold row data."""

from __future__ import annotations

import psycopg
from psycopg import errors as pg

from evermark.errors import (
    BusyError,
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
)
_DENIED = (pg.InsufficientPrivilege, pg.InvalidPassword, pg.InvalidAuthorizationSpecification)
_NOT_SET_UP = (pg.UndefinedTable, pg.InvalidSchemaName, pg.UndefinedColumn, pg.InvalidCatalogName)
_DENIED_AT_CONNECT = (
    "authentication failed",
    "pg_hba.conf",
    "no password supplied",
    "permission denied",
    "not permitted to log in",
)


def from_driver(error: psycopg.Error, where: str) -> EvermarkError:
    """The Evermark error for what the driver raised; `where` names the store, never its address."""
    said = _said(error)
    if isinstance(error, pg.DiskFull):
        return DiskFullError(f"{where}: {said}", hint="free space on the disk of the state database")
    if isinstance(error, _DENIED):
        return DeniedError(f"{where}: {said}", hint="grant the role of state.dsn what it lacks")
    if isinstance(error, _NOT_SET_UP):
        return SetupError(f"{where}: {said}", hint="run `evermark migrate`")
    if isinstance(error, pg.ReadOnlySqlTransaction):
        return UnreachableError(
            f"{where} takes no writes: {said}", hint="it may be a standby; point state.dsn at the primary"
        )
    if isinstance(error, _BUSY):
        return BusyError(f"{where}: {said}", hint="a lock is held there, or it is overloaded; retried")
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return _from_connection(said, where)
    return EvermarkError(f"{where}: {type(error).__name__}: {said}", hint="this is unexpected: please report it")


def _from_connection(said: str, where: str) -> EvermarkError:
    lower = said.lower()
    if any(words in lower for words in _DENIED_AT_CONNECT):
        return DeniedError(f"{where}: {said}", hint="check the user and password in state.dsn")
    if "does not exist" in lower:
        return SetupError(f"{where}: {said}", hint="create the database and the role that state.dsn names")
    if any(words in lower for words in ("too many clients", "too many connections", "remaining connection slots")):
        return BusyError(f"{where}: {said}", hint="raise max_connections of the state database")
    return UnreachableError(
        f"{where} does not answer: {said}", hint="check that Postgres runs and that state.dsn is right"
    )


def _said(error: psycopg.Error) -> str:
    text = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(text.split())[:500]
