"""A lost slot, mended: a new slot first, so that nothing more is lost; then what the log lacks is found in `events`
under the very moment the new slot begins; then the new slot takes the old one's name.

Two names are enough to find the way on after a crash: the reader's own slot, and `<slot>_mend`, which exists only while
a hole is open. While it does, the own slot is not read, whatever it looks like.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from evermark import failpoint
from evermark.errors import BusyError, GapError, SetupError
from evermark.sources.base import Hole, Mend
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import RECOVER_HINT, translate, where
from evermark.sources.postgres.hole import OutboxHole
from evermark.sources.postgres.install import create_publication
from evermark.sources.postgres.lsn import Position, lsn_of
from evermark.sources.postgres.place import PostgresPlace
from evermark.sources.postgres.slots import Slot, drop_slot, make_failover, slot_named, spare_name, walsender
from evermark.sources.postgres.survey import look, stranger, unfit, unregistered

FAILOVER_VERSION = 170000
_OPTIONS_VERSION = 150000
_STOP_POLL_S = 0.2


@dataclass(frozen=True)
class _New:
    lsn: int
    snapshot: str


class OutboxMend(Mend):
    """`wait_s`: how long a new slot may wait for transactions that were open before it."""

    def __init__(
        self, place: PostgresPlace, *, wait_s: float = 3600.0, on_finished: Callable[[], None] = lambda: None
    ) -> None:
        self._place = place
        self._wait_s = wait_s
        self._on_finished = on_finished
        self._keeper: psycopg.Connection[Any] | None = None

    @property
    def spare(self) -> str:
        return spare_name(self._place.slot)

    def begin(self, stopped: Callable[[], bool], left_at: str | None = None) -> Hole:
        self.close()
        with _connected(self._place) as link:
            survey = look(link, self._place)
            problem = unfit(survey) or unregistered(survey, self._place)
            if problem is None and left_at is not None:
                problem = stranger(survey, Position.parse(left_at))
            if problem is not None:
                raise problem
            if survey.fingerprint_now is None or survey.fingerprint_now != survey.fingerprint_installed:
                self._mend_publication(link)
            drop_slot(link, self.spare)
            failpoint.hit("mend.cleared")
            new = self._make(survey.version, stopped)
            failpoint.hit("mend.slot_made")
            floor = link.row(_floor_query(self._place), (self._place.slot,), doing="looking for the floor")
            hole = OutboxHole(self._place, new.snapshot, survey.incarnation, new.lsn, floor[0] if floor else None)
        hole.survey()
        return hole

    def _mend_publication(self, link: Link) -> None:
        """In one transaction with its new fingerprint: whatever is done to it after this is another hole."""
        with link.connection.transaction():
            create_publication(link, self._place, again=True)
            query = sql.SQL("select {}.note_mended(%s)").format(sql.Identifier(self._place.schema))
            link.row(query.as_string(), (self._place.slot,), doing="noting the publication")

    def _make(self, version: int, stopped: Callable[[], bool]) -> _New:
        """The new slot, and its moment as a snapshot: it lasts while `_keeper` is connected and idle."""
        options = "(SNAPSHOT 'export')" if version >= _OPTIONS_VERSION else "EXPORT_SNAPSHOT"
        command = f'CREATE_REPLICATION_SLOT "{self.spare}" LOGICAL pgoutput {options}'
        self._keeper = walsender(self._place)
        dsn = self._place.dsn.open()
        try:
            with _ended_by(self._keeper, stopped, self._wait_s) as ended:
                found = self._keeper.execute(command.encode()).fetchone()
        except psycopg.errors.QueryCanceled as error:
            why = "was told to stop" if not ended.is_set() else f"took more than {self._wait_s:g} s"
            raise BusyError(
                f"making slot {self.spare} {why}",
                hint="it waits for transactions that are open; `select pid, xact_start, query from pg_stat_activity"
                " order by xact_start` shows the oldest",
            ) from error
        except psycopg.Error as error:
            raise translate(error, dsn, f"making slot {self.spare}") from error
        if found is None:
            raise SetupError(f"making slot {self.spare} at {where(dsn)}: the server gave no snapshot")
        return _New(lsn_of(str(found[1])), str(found[2]))

    def finish(self, position: str) -> None:
        self.close()
        at = Position.parse(position)
        with _connected(self._place) as link:
            own, spare = slot_named(link, self._place.slot), slot_named(link, self.spare)
            if spare is not None:
                if own is None or not _gives(own, at) or own.confirmed_lsn != at.lsn:
                    if not _gives(spare, at):
                        raise GapError(f"slot {self.spare} at {where(link.dsn)} was lost too", hint=RECOVER_HINT)
                    drop_slot(link, self._place.slot)
                    failpoint.hit("mend.old_dropped")
                    link.row(
                        "select pg_copy_logical_replication_slot(%s, %s)",
                        (self.spare, self._place.slot),
                        doing=f"giving slot {self._place.slot} its name back",
                    )
                    failpoint.hit("mend.renamed")
                drop_slot(link, self.spare)
            elif own is None or not _gives(own, at):
                raise GapError(f"slot {self._place.slot} at {where(link.dsn)} was lost again", hint=RECOVER_HINT)
            version = int(link.one("show server_version_num", doing="asking for the version")[0])
        if version >= FAILOVER_VERSION:
            make_failover(self._place)
        self._on_finished()

    def abandon(self) -> None:
        self.close()
        with _connected(self._place) as link:
            drop_slot(link, self.spare)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


def _gives(slot: Slot, at: Position) -> bool:
    """Whether everything from `at` on can be read from the slot."""
    if slot.wal_status == "lost" or slot.invalidation_reason or slot.confirmed_lsn is None:
        return False
    return slot.confirmed_lsn <= at.lsn


def _floor_query(place: PostgresPlace) -> str:
    query = sql.SQL(
        "select r.floor::text from {}.readers r, pg_control_system() s"
        " where r.slot = %s and r.floor_system = s.system_identifier"
    )
    return query.format(sql.Identifier(place.schema)).as_string()


@contextmanager
def _connected(place: PostgresPlace) -> Iterator[Link]:
    link = connect(place.dsn)
    try:
        yield link
    finally:
        link.close()


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
