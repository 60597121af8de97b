"""The repair of a lost slot: a new slot first, so that nothing more is lost; then the events that the log lacks
are found in `events` as of the very moment the new slot begins; then the new slot takes the old one's name.

Two names are enough to find the way on after a crash: the reader's own slot, and `<slot>_mend`, which exists only while
a gap is open. While it does, the own slot is not read, whatever it looks like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from evermark import failpoint
from evermark.errors import GapError
from evermark.sources.base import Gap, Repair, Whereabouts
from evermark.sources.postgres.failures import RECOVER_HINT, where
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.slots import Slot, spare_name
from evermark.sources.postgres.survey import Survey, dropped, stranger, unfit, unregistered
from evermark.sources.postgres.target import PostgresTarget


@dataclass(frozen=True)
class NewSlot:
    """Where a new slot begins, and its moment as a snapshot, which lasts until it is let go of."""

    lsn: int
    snapshot: str


class RepairServer(Protocol):
    """What a repair asks of the server. Nothing of it is undone by a crash but the snapshot."""

    def look(self) -> Survey: ...
    def slot(self, name: str) -> Slot | None: ...
    def repair_publication(self) -> None:
        """In one transaction with its new fingerprint: a change of it after this is another gap."""

    def make(self, name: str, version: int, stopped: Callable[[], bool]) -> NewSlot:
        """Waits for the transactions that are open; raises `BusyError` when that takes too long, or when `stopped`."""

    def floor(self) -> str | None:
        """No event of an earlier transaction was missing from the log when this was noted; none: not known."""

    def gap(self, new: NewSlot, incarnation: Incarnation, floor: str | None) -> Gap:
        """What the snapshot shows of events from the floor on; none: of all events."""

    def copy(self, name: str, to: str) -> None:
        """Another slot, at the same place."""

    def drop(self, name: str) -> None:
        """Nothing happens when there is none."""

    def mark_failover(self) -> None:
        """Standbys keep the slot, too, where the server can do that."""

    def let_go(self) -> None:
        """Of the snapshot."""

    def disconnect(self) -> None:
        """Of everything but the snapshot, until the next call."""


class Ending(Enum):
    """What is left to do when a gap is closed."""

    RENAME = "rename"  # the spare slot takes the name of the one that was lost
    DROP_SPARE = "drop spare"  # it has done so already
    NOTHING = "nothing"


def ending(own: Slot | None, spare: Slot | None, at: Position, target: PostgresTarget) -> Ending:
    """How the slots come to be what reading at `at` needs. Raises `GapError` when neither gives all from there on."""
    if spare is None:
        if own is None or not gives(own, at):
            raise GapError(f"slot {target.slot} at {where(target.dsn.open())} was lost again", hint=RECOVER_HINT)
        return Ending.NOTHING
    if own is not None and gives(own, at) and own.confirmed_lsn == at.lsn:
        return Ending.DROP_SPARE
    if not gives(spare, at):
        raise GapError(f"slot {spare_name(target.slot)} at {where(target.dsn.open())} was lost too", hint=RECOVER_HINT)
    return Ending.RENAME


def gives(slot: Slot, at: Position) -> bool:
    """Whether everything from `at` on can be read from the slot."""
    if slot.wal_status == "lost" or slot.invalidation_reason or slot.confirmed_lsn is None:
        return False
    return slot.confirmed_lsn <= at.lsn


def has_what_was_confirmed(own: Slot | None, left_at: str | None) -> bool:
    """Whether a log that ends at `left_at` has what our slot was told is taken, and so all below the floor. A log from
    a backup ends before that; where a person has it compared (None), nobody knows what it lost."""
    if left_at is None:
        return False
    return own is None or own.confirmed_lsn is None or own.confirmed_lsn <= Position.parse(left_at).lsn


class OutboxRepair(Repair):
    """The order of its steps is what makes each of them repeatable after a crash."""

    def __init__(
        self, target: PostgresTarget, server: RepairServer, on_finished: Callable[[], None] = lambda: None
    ) -> None:
        self._target = target
        self._server = server
        self._on_finished = on_finished

    @property
    def spare(self) -> str:
        return spare_name(self._target.slot)

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        self.close()
        server = self._server
        try:
            survey = server.look()
            problem = unfit(survey) or unregistered(survey, self._target) or dropped(survey)
            if problem is None and left_at is not None:
                problem = stranger(survey, Position.parse(left_at))
            if problem is not None:
                raise problem
            if survey.fingerprint_now is None or survey.fingerprint_now != survey.fingerprint_installed:
                server.repair_publication()
            believed = has_what_was_confirmed(server.slot(self._target.slot), left_at)
            server.drop(self.spare)
            failpoint.hit("repair.cleared")
            new = server.make(self.spare, survey.version, stopped)
            failpoint.hit("repair.slot_made")
            return server.gap(new, survey.incarnation, server.floor() if believed else None)
        finally:
            server.disconnect()

    def finish(self, position: str) -> None:
        self.close()
        server, own, at = self._server, self._target.slot, Position.parse(position)
        try:
            left = ending(server.slot(own), server.slot(self.spare), at, self._target)
            if left is Ending.RENAME:
                server.drop(own)
                failpoint.hit("repair.old_dropped")
                server.copy(self.spare, own)
                failpoint.hit("repair.renamed")
            if left is not Ending.NOTHING:
                server.drop(self.spare)
            server.mark_failover()
        finally:
            server.disconnect()
        self._on_finished()

    def abandon(self) -> None:
        self.close()
        try:
            self._server.drop(self.spare)
        finally:
            self._server.disconnect()

    def close(self) -> None:
        self._server.let_go()
