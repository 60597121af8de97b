"""Connections to a source's Postgres: settings we rely on, and warnings that are errors."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import psycopg
from psycopg import errors as pg
from psycopg.types.json import set_json_loads

from evermark.errors import ConfigError, EvermarkError, GapError
from evermark.secrets import Hidden
from evermark.sources.postgres.failures import RECOVER_HINT, translated, unreachable, where

CONNECT_TIMEOUT_S = 10
WARNINGS_MAX = 20
TRANSACTION_TIMEOUT_VERSION = 170000

# Names without a schema are the server's own: anyone who may create in `public` could make a function that fits a call
# better than the server's does, and have our role run it. It also says how a `regclass` is written.
SEARCH_PATH = "pg_catalog, pg_temp"
# What a role or database may have set otherwise, and decoding depends on.
_SESSION = {
    "search_path": SEARCH_PATH,
    "quote_all_identifiers": "off",
    "timezone": "UTC",
    "datestyle": "ISO, MDY",
    "bytea_output": "hex",
    "intervalstyle": "iso_8601",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "client_min_messages": "warning",
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "5s",
    "synchronous_commit": "on",
    "default_transaction_read_only": "off",  # what is noted at the source is written there
    # Messages of a slot are packed in the order in which they come, which sorting by their buckets would not keep.
    "enable_hashagg": "on",
    # Our statements are small. A statement that the planner takes for expensive would be compiled for half a second.
    "jit": "off",
}


@dataclass
class Link:
    """One open connection in autocommit mode. Warnings of the server are collected, never lost."""

    dsn: str = field(repr=False)
    connection: psycopg.Connection[Any]
    warnings: list[str] = field(default_factory=list)
    _slots_allowed: bool | None = None

    def row(self, query: str, args: tuple[object, ...] = (), *, doing: str) -> tuple[Any, ...] | None:
        with translated(self.dsn, doing):
            found: tuple[Any, ...] | None = self.connection.execute(query, args).fetchone()
            return found

    def one(self, query: str, args: tuple[object, ...] = (), *, doing: str) -> tuple[Any, ...]:
        """The row of a query that always has one."""
        found = self.row(query, args, doing=doing)
        if found is None:
            raise EvermarkError(
                f"{doing} at {where(self.dsn)}: the server gave no row", hint="report this, with the log"
            )
        return found

    def rows(self, query: str, args: tuple[object, ...] = (), *, doing: str) -> list[tuple[Any, ...]]:
        with translated(self.dsn, doing):
            return self.connection.execute(query, args).fetchall()

    def refuse_warnings(self, doing: str) -> None:
        """A warning while decoding means rows were left out: Postgres goes on, we do not."""
        if self.warnings:
            said = "; ".join(self.warnings)
            self.warnings.clear()
            raise GapError(f"{doing} at {where(self.dsn)}: the server warned: {said}", hint=RECOVER_HINT)

    def may_use_slots(self) -> bool:
        """Tried on no slot, and once: some clouds give the right to roles without the attribute REPLICATION."""
        if self._slots_allowed is None:
            with translated(self.dsn, "asking what our role may do"):
                try:
                    self.connection.execute("select pg_logical_slot_peek_binary_changes(null, null, 1)")
                except psycopg.Error as error:
                    if error.sqlstate is None:  # the connection broke
                        raise
                    # The right is looked at first; any other complaint comes after it.
                    self._slots_allowed = not isinstance(error, pg.InsufficientPrivilege)
        return self._slots_allowed is not False

    def alive(self) -> bool:
        """Whether the server still answers on this connection."""
        try:
            self.connection.execute("select 1")
        except psycopg.Error:
            self.close()
            return False
        self.warnings.clear()
        return True

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(dsn: Hidden, timeout_s: int = CONNECT_TIMEOUT_S, /, **session: str) -> Link:
    """Open a connection; `session` adds settings for its whole life."""
    text = dsn.open()
    try:
        psycopg.conninfo.conninfo_to_dict(text)
    except psycopg.Error:
        # libpq repeats the string it could not read, password and all: its words are not passed on.
        hint = "write postgresql://user:password@host:5432/db"
        raise ConfigError("the dsn of the source cannot be read", hint=hint) from None
    connection = opened(text, connect_timeout=timeout_s)
    link = Link(text, connection)
    connection.add_notice_handler(lambda notice: _collect(link, notice))
    # Text comes, and goes, as the server has it, whatever the environment or the role says: that is what decoding takes
    # it for, and nothing is translated on its way that could not be.
    wanted = {"client_encoding": server_encoding(connection), **_SESSION, **session}
    if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
        wanted["transaction_timeout"] = "0"
    query = "select " + ", ".join(["pg_catalog.set_config(%s, %s, false)"] * len(wanted))
    link.row(query, tuple(part for pair in wanted.items() for part in pair), doing="preparing a connection")
    # Lets the server notice that a killed reader is gone, instead of decoding on with the slot held.
    with contextlib.suppress(pg.InvalidParameterValue):  # not every platform can
        link.connection.execute("set client_connection_check_interval = '1s'")
    encoding = connection.info.encoding
    if encoding not in ("utf-8", "ascii"):  # `json.loads` takes bytes for UTF-8
        set_json_loads(lambda text: json.loads(_decoded(text, encoding)), connection)
    link.warnings.clear()
    return link


def _decoded(text: str | bytes, encoding: str) -> str:
    return text.decode(encoding) if isinstance(text, bytes) else text


def server_encoding(connection: psycopg.Connection[Any]) -> str:
    return connection.info.parameter_status("server_encoding") or "UTF8"


def opened(dsn: str, **options: Any) -> psycopg.Connection[Any]:
    options |= {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    try:
        return psycopg.connect(
            dsn, autocommit=True, prepare_threshold=None, fallback_application_name="evermark", **options
        )
    except psycopg.Error as error:
        raise unreachable(error, dsn) from error


def _collect(link: Link, notice: psycopg.errors.Diagnostic) -> None:
    if notice.severity_nonlocalized == "WARNING" and len(link.warnings) < WARNINGS_MAX:
        link.warnings.append(f"{notice.message_primary or 'unknown'}"[:300])


# One idle connection per process and place: a Spark worker unpickles the source anew for every task.
_idle: dict[tuple[int, str], Link] = {}
_idle_lock = threading.Lock()


def borrow(dsn: Hidden, **session: str) -> Link:
    """A connection for one read: the one given back last, if it is still good, else a new one."""
    with _idle_lock:
        link = _idle.pop((os.getpid(), dsn.open()), None)
    if link is not None and link.alive():
        return link
    return connect(dsn, **session)


def give_back(link: Link) -> None:
    with _idle_lock:
        other = _idle.pop((os.getpid(), link.dsn), None)
        _idle[os.getpid(), link.dsn] = link
    if other is not None:
        other.close()


def close_idle() -> None:
    with _idle_lock:
        links = [_idle.pop(key) for key in list(_idle) if key[0] == os.getpid()]
    for link in links:
        link.close()
