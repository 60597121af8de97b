"""Bugs of repairing a lost slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from evermark.errors import EvermarkError
from evermark.ingest.owner import SourceOwner
from evermark.ingest.repair import steps as repairer
from evermark.ingest.repair.base import Recovery
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.ingest.repair.steps import Repairer
from evermark.sources.base import Gap, Whereabouts
from evermark.sources.postgres import survey
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read.xmin_floor import XminFloor
from evermark.sources.postgres.repair import steps
from evermark.sources.postgres.repair.steps import Ending, NewSlot, OutboxRepair
from evermark.sources.postgres.slots import Slot
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.target import PostgresTarget
from simulator.mutants.mutant import Mutant
from simulator.repair.server import ModelServer, OutboxRow

_close_gap = Repairer._close_gap
_taking = MemoryRecoveries.taking
_candidates = ModelServer.candidates
_slot_trouble = survey._slot_trouble


def _looks_before_the_slot(
    self: OutboxRepair,
    stopped: Callable[[], bool],
    left_at: str | None = None,
    whereabouts: Callable[[], Whereabouts] | None = None,
) -> Gap:
    self.close()
    server, found = self._server, self._server.look()
    server.repair_publication()
    server.drop(self.spare)
    seen = server.make(self.spare, found.version, stopped)
    server.drop(self.spare)
    new = server.make(self.spare, found.version, stopped)
    return server.gap(NewSlot(new.lsn, seen.snapshot), found.incarnation, server.floor())


def _counts_what_was_noted_last(self: MemoryRecoveries, recovery: Recovery, logged: int, rows: int, epoch: int) -> None:
    if rows == 0:
        self._taking.pop(recovery.id, None)  # a try begins
    _taking(self, recovery, logged, rows, epoch)


def _closes_first(self: Repairer, recovery: Recovery, gap: Gap) -> None:
    self.tools.recoveries.close_gap(recovery, gap.position, self.epoch)
    _close_gap(self, recovery, gap)


def _any_own_slot(own: Slot | None, spare: Slot | None, at: Position, place: PostgresTarget) -> Ending:
    if own is not None:
        return Ending.NOTHING if spare is None else Ending.DROP_SPARE
    return Ending.RENAME if spare is not None else Ending.NOTHING


def _proven_at_once(self: XminFloor, confirmed: int) -> int | None:
    if self.sample is None:
        return None
    floor, self.sample = self.sample.xmin, None
    return floor


def _proven_by_the_newest(self: XminFloor, confirmed: int) -> int | None:
    """As if whatever began before a sample had ended by then."""
    if self.sample is None or confirmed < self.sample.lsn:
        return None
    floor, self.sample = self.sample.xmin + 3, None
    return floor if floor > self.noted else None


def _by_insert_place(self: ModelServer, part: PostgresTarget, snapshot: str, floor: str | None) -> list[OutboxRow]:
    slot = self.slots.get(part.slot)
    rows = _candidates(self, part, snapshot, floor)
    return [row for row in rows if slot is None or row.inserted_at >= (slot.confirmed_lsn or 0)]


def _moved_unseen(found: Survey, place: PostgresTarget, resume: Position | None) -> EvermarkError | None:
    moved = found.slot is not None and found.slot.confirmed_lsn is not None and found.slot.wal_status == "reserved"
    return None if moved else _slot_trouble(found, place, resume)


def _never(past: Sequence[Recovery], now: datetime) -> bool:
    return False


def _nobody_is_told(self: Repairer, number: int) -> None:
    return None


def _leaves_it(self: Repairer, partition: int) -> None:
    return None


def _nothing_is_open(self: Repairer) -> set[int]:
    return set()


def _holds_none(*_: Any) -> bool:
    return False


def _lets_go_of_nothing(self: SourceOwner, partition: int) -> None:
    return None


def _reads_no_more(self: SourceOwner, partition: int, error: EvermarkError | None) -> None:
    if error is not None:
        self._note_failure({partition: error})


_OWNER = "simulator.repair.owner"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "looked-before-the-slot",
        "what the log lacks is looked for as of a moment before the new slot",
        ((OutboxRepair, "begin", _looks_before_the_slot),),
    ),
    Mutant(
        "closed-before-taken",
        "a gap is recorded as closed before what was missing is in the log",
        ((Repairer, "_close_gap", _closes_first),),
    ),
    Mutant(
        "counted-by-the-last-try",
        "what a try took that ended before it could say so is not counted",
        ((MemoryRecoveries, "taking", _counts_what_was_noted_last),),
    ),
    Mutant(
        "any-own-slot",
        "a slot that bears the name is taken for the new one",
        ((steps, "ending", _any_own_slot),),
    ),
    Mutant(
        "moved-unseen",
        "a slot that somebody moved past us is read on from",
        ((survey, "_slot_trouble", _moved_unseen),),
    ),
    Mutant(
        "floor-at-once", "a floor is noted before all below it was taken", ((XminFloor, "proven", _proven_at_once),)
    ),
    Mutant(
        "floor-above-the-open",
        "a floor is noted above transactions that are open",
        ((XminFloor, "proven", _proven_by_the_newest),),
    ),
    Mutant(
        "found-by-insert-place",
        "what is missing is looked for by where it was inserted, not by its transaction",
        ((ModelServer, "candidates", _by_insert_place),),
    ),
    Mutant("log-not-compared", "files that may hold what was found are left out", ((_OWNER, "within", _holds_none),)),
    Mutant("never-given-up", "tries are without end", ((repairer, "exhausted", _never),)),
    Mutant(
        "end-not-told",
        "whoever missed the answer to the last step waits for ever",
        ((Repairer, "_tell_end", _nobody_is_told),),
    ),
    Mutant(
        "left-over-kept",
        "a slot that a late owner made is left to keep WAL",
        ((Repairer, "_tidy", _leaves_it),),
    ),
    Mutant(
        "read-while-repaired",
        "a partition is read while its gap is open",
        ((Repairer, "partitions", _nothing_is_open),),
    ),
    Mutant(
        "repaired-while-read",
        "a gap is closed while its partition is still read",
        ((SourceOwner, "_let_go", _lets_go_of_nothing),),
    ),
    Mutant(
        "repaired-unread",
        "a partition whose gap is closed is not read again while others are read",
        ((SourceOwner, "_on_repaired", _reads_no_more),),
    ),
)
