"""The Postgres at which a lost slot is repaired: what `steps.py` asks of it, as SQL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from evermark.errors import BusyError, SetupError
from evermark.sources.base import Gap
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translate, where
from evermark.sources.postgres.lsn import Incarnation, lsn_of
from evermark.sources.postgres.outbox import create_publication, filled
from evermark.sources.postgres.repair.gap import OutboxGap
from evermark.sources.postgres.repair.steps import NewSlot, OutboxRepair, RepairServer
from evermark.sources.postgres.slots import Slot, drop_slot, make_failover, slot_named, walsender
from evermark.sources.postgres.survey import Survey, look
from evermark.sources.postgres.target import PostgresTarget

FAILOVER_VERSION = 170000
_OPTIONS_VERSION = 150000
_STOP_POLL_S = 0.2
_FLOOR = """
select r.floor::text from @schema@.readers r, pg_control_system() s
where r.slot = @slot_literal@ and r.floor_system = s.system_identifier
"""


def repair_of(
    target: PostgresTarget, *, wait_s: float = 3600.0, on_finished: Callable[[], None] = lambda: None
) -> OutboxRepair:
    """`wait_s`: how long a new slot may wait for transactions that were open before it."""
    return OutboxRepair(target, PostgresRepairServer(target, wait_s), on_finished)


class PostgresRepairServer(RepairServer):
    """On one connection, opened when it is needed; and one that keeps the snapshot."""

    def __init__(self, target: PostgresTarget, wait_s: float) -> None:
        self._target = target
        self._wait_s = wait_s
        self._open: Link | None = None
        self._keeper: psycopg.Connection[Any] | None = None

    @property
    def _link(self) -> Link:
        if self._open is None:
            self._open = connect(self._target.dsn)
        return self._open

    def disconnect(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def look(self) -> Survey:
        return look(self._link, self._target)

    def slot(self, name: str) -> Slot | None:
        return slot_named(self._link, name)

    def repair_publication(self) -> None:
        with self._link.connection.transaction():
            create_publication(self._link, self._target, again=True)
            query = filled("select @schema@.note_mended(%s)", self._target)
            self._link.row(query, (self._target.slot,), doing="noting the publication")

    def make(self, name: str, version: int, stopped: Callable[[], bool]) -> NewSlot:
        """The snapshot lasts while `_keeper` is connected and idle."""
        options = "(SNAPSHOT 'export')" if version >= _OPTIONS_VERSION else "EXPORT_SNAPSHOT"
        command = f'CREATE_REPLICATION_SLOT "{name}" LOGICAL pgoutput {options}'
        self._keeper = walsender(self._target)
        dsn = self._target.dsn.open()
        try:
            with _ended_by(self._keeper, stopped, self._wait_s) as ended:
                found = self._keeper.execute(command.encode()).fetchone()
        except psycopg.errors.QueryCanceled as error:
            why = "was told to stop" if not ended.is_set() else f"took more than {self._wait_s:g} s"
            raise BusyError(
                f"making slot {name} {why}",
                hint="it waits for transactions that are open; `select pid, xact_start, query from pg_stat_activity"
                " order by xact_start` shows the oldest",
            ) from error
        except psycopg.Error as error:
            raise translate(error, dsn, f"making slot {name}") from error
        if found is None:
            raise SetupError(f"making slot {name} at {where(dsn)}: the server gave no snapshot")
        return NewSlot(lsn_of(str(found[1])), str(found[2]))

    def floor(self) -> str | None:
        found = self._link.row(filled(_FLOOR, self._target), doing="looking for the floor")
        return found[0] if found else None

    def gap(self, new: NewSlot, incarnation: Incarnation, floor: str | None) -> Gap:
        gap = OutboxGap(self._target, new.snapshot, incarnation, new.lsn, floor)
        gap.survey()
        return gap

    def copy(self, name: str, to: str) -> None:
        query = "select pg_copy_logical_replication_slot(%s, %s)"
        self._link.row(query, (name, to), doing=f"giving slot {to} its name back")

    def drop(self, name: str) -> None:
        drop_slot(self._link, name)

    def mark_failover(self) -> None:
        version = int(self._link.one("show server_version_num", doing="asking for the version")[0])
        if version >= FAILOVER_VERSION:
            make_failover(self._target)

    def let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


@contextmanager
def _ended_by(
    connection: psycopg.Connection[Any], stopped: Callable[[], bool], wait_s: float
) -> Iterator[threading.Event]:
    """Cancel what runs on the connection when told to stop, or after `wait_s`; the event tells which it was."""
    done, late = threading.Event(), threading.Event()

    def watch() -> None:
        left = wait_s
        while not done.wait(_STOP_POLL_S):
            left -= _STOP_POLL_S
            if left <= 0 or stopped():
                if left <= 0:
                    late.set()
                with suppress(psycopg.Error):
                    connection.cancel_safe(timeout=5.0)

    thread = threading.Thread(target=watch, name="slot watch", daemon=True)
    thread.start()
    try:
        yield late
    finally:
        done.set()
        thread.join()
