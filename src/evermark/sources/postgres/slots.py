"""Replication slots by name: looked at, dropped, marked; and the connections that speak the replication protocol."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from evermark.errors import EvermarkError
from evermark.sources.postgres.connect import (
    CONNECT_TIMEOUT_S,
    SEARCH_PATH,
    TRANSACTION_TIMEOUT_VERSION,
    Link,
    opened,
    server_encoding,
)
from evermark.sources.postgres.failures import translated, unreachable
from evermark.sources.postgres.target import PostgresTarget, suffixed

# A connection that only holds a snapshot does nothing for as long as others read.
_PATIENT = "-c idle_in_transaction_session_timeout=0 -c idle_session_timeout=0"
# Values that are sent as text are written as they are where the slot is peeked (connect.py).
_AS_PEEKED = (
    "-c timezone=UTC -c datestyle=ISO -c bytea_output=hex -c intervalstyle=iso_8601 -c extra_float_digits=1"
    f" -c lc_monetary=C -c search_path={SEARCH_PATH.replace(' ', '')} -c quote_all_identifiers=off"
)


@dataclass(frozen=True)
class Slot:
    plugin: str
    database: str
    active: bool
    restart_lsn: int | None
    confirmed_lsn: int | None
    wal_status: str | None
    invalidation_reason: str | None
    safe_wal_bytes: int | None


# Of `pg_replication_slots s`, in the order of the fields of `Slot`.
SLOT_COLUMNS = """
s.plugin::text, s.database::text, s.active, (s.restart_lsn - '0/0'::pg_lsn)::bigint,
(s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint, s.wal_status, to_jsonb(s) ->> 'invalidation_reason', s.safe_wal_size
"""


def spare_name(slot: str) -> str:
    return suffixed(slot, "_mend")


def slot_named(link: Link, name: str) -> Slot | None:
    query = f"select {SLOT_COLUMNS} from pg_replication_slots s where slot_name = %s"
    found = link.row(query, (name,), doing=f"looking at slot {name}")
    return Slot(*found) if found is not None else None


def drop_slot(link: Link, name: str) -> None:
    """Nothing happens when there is none. A reader of ours that still holds it is ended: its work is void."""
    found = link.row("select active_pid from pg_replication_slots where slot_name = %s", (name,), doing="looking")
    if found is None:
        return
    if found[0] is not None:
        with suppress(EvermarkError):
            link.row("select pg_terminate_backend(%s, 5000)", (found[0],), doing=f"ending the reader of slot {name}")
    # A slot that was still being made is gone with the session that made it.
    query = "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s"
    link.row(query, (name,), doing=f"dropping slot {name}")


def walsender(target: PostgresTarget) -> psycopg.Connection[Any]:
    """A connection that speaks the replication protocol: only there are snapshots exported and slots altered."""
    text = target.dsn.open()
    try:
        options = psycopg.conninfo.conninfo_to_dict(text).get("options") or ""
    except psycopg.Error as error:
        raise unreachable(error, text) from error
    options = f"{options} {_PATIENT} {_AS_PEEKED}"
    connection = opened(text, connect_timeout=CONNECT_TIMEOUT_S, replication="database", options=options)
    try:
        with translated(text, "preparing a connection"):
            # After the options: what the environment or the dsn says of it comes in front of them.
            encoding = sql.Literal(server_encoding(connection))
            connection.execute(sql.SQL("set client_encoding = {}").format(encoding))
            if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
                connection.execute("set transaction_timeout = 0")
    except BaseException:
        connection.close()
        raise
    return connection


def make_failover(target: PostgresTarget) -> None:
    """A standby that synchronises slots keeps this slot, too. A copy of a marked slot is not marked."""
    with (
        closing(walsender(target)) as connection,
        translated(target.dsn.open(), f"marking slot {target.slot} for failover"),
    ):
        connection.execute(f'ALTER_REPLICATION_SLOT "{target.slot}" (FAILOVER true)'.encode())
