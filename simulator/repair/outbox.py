"""The outbox of a model server: what `sources/postgres` does with SQL, by its own decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from evermark.errors import BusyError, EvermarkError
from evermark.event import Seen, taken_batch
from evermark.sources.base import Gap, Limit, Repair, Slice, Source
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.read.xmin_floor import Sample, XminFloor
from evermark.sources.postgres.repair.gap import OutboxGap
from evermark.sources.postgres.repair.steps import NewSlot, OutboxRepair, RepairServer
from evermark.sources.postgres.slots import Slot
from evermark.sources.postgres.survey import Survey, trouble
from evermark.sources.postgres.target import PostgresTarget
from simulator.baton import Process
from simulator.repair.server import ModelServer, OutboxRow

_BYTES_OF_ROW = 24
_POLL_S = 0.5
_WAIT_S = 40.0
_NOTE_EVERY_S = 3.0


@dataclass
class ModelOutbox(Source):
    """Of one owner, in one process: `server` is a port, so that each call is an effect."""

    place: PostgresTarget
    server: Any
    model: ModelServer
    keeper: Process
    sleep: Callable[[float], None]
    now: Callable[[], float]
    _floors: dict[int, XminFloor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = self.place.parts()

    def partitions(self) -> Sequence[int]:
        return range(len(self._parts))

    def earliest(self, partition: int) -> str:
        survey: Survey = self.server.look(self._parts[partition])
        found = trouble(survey, self._parts[partition], None)
        if found is not None or survey.slot is None or survey.slot.confirmed_lsn is None:
            raise _blamed(found or EvermarkError("the slot has no position"), partition)
        return survey.incarnation.at(survey.slot.confirmed_lsn)

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for partition, position in resume.items():
            self._require(partition, Position.parse(position))

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        ends: dict[int, str] = {}
        for partition, text in after.items():
            start = Position.parse(text)
            flush = self._require(partition, start).flush_lsn
            ends[partition] = start.incarnation.at(min(flush, start.lsn + limit.rows_max * _BYTES_OF_ROW))
            ends[partition] = max(ends[partition], text)
        return ends

    def _require(self, partition: int, start: Position) -> Survey:
        survey: Survey = self.server.look(self._parts[partition])
        found = trouble(survey, self._parts[partition], start)
        if found is not None:
            raise _blamed(found, partition)
        return survey

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)] if start < end else []

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        start, end = Position.parse(piece.start), Position.parse(piece.end)
        upto = end.lsn + (1 if end.ordinal else 0)
        read = self.server.read(self._parts[piece.partition], start.lsn, upto)
        # Judged last, as `SlotReader` does: what was lost or changed meanwhile is missing from what was read.
        self._require(piece.partition, start)
        placed = [(start.incarnation.at(row.committed_at, row.ordinal), row) for row in read]
        mine = [(at, row) for at, row in placed if piece.start <= at < piece.end]  # a range may begin in a transaction
        yield as_batch([row for _, row in mine], [at for at, _ in mine])

    def confirm(self, partition: int, end: str) -> None:
        part, at = self._parts[partition], Position.parse(end)
        self.server.advance(part.slot, at.lsn)
        floor = self._floors.setdefault(partition, XminFloor())
        proven = floor.proven(at.lsn)
        if proven is not None:
            self.server.note_floor(part.slot, proven)
            floor.done(proven, self.now())
        elif floor.wants_sample(self.now(), _NOTE_EVERY_S):
            floor.sample = Sample(*self.server.sample())

    def _renew(self, partition: int) -> None:
        """What was sampled at the old slot says nothing of the new one."""
        self._floors.pop(partition, None)

    def repair(self, partition: int) -> Repair:
        part = self._parts[partition]
        server = ModelMendServer(self.server, self.model, part, self.keeper, self.sleep, self.now)
        return OutboxRepair(part, server, on_finished=lambda: self._renew(partition))


def _blamed(error: EvermarkError, partition: int) -> EvermarkError:
    error.partition = partition
    return error


@dataclass
class ModelMendServer(RepairServer):
    """`RepairServer` over the port."""

    server: Any
    model: ModelServer
    part: PostgresTarget
    keeper: Process
    sleep: Callable[[float], None]
    now: Callable[[], float]

    def look(self) -> Survey:
        found: Survey = self.server.look(self.part)
        return found

    def slot(self, name: str) -> Slot | None:
        found: Slot | None = self.server.slot(name)
        return found

    def repair_publication(self) -> None:
        self.server.repair_publication(self.part)

    def make(self, name: str, version: int, stopped: Callable[[], bool]) -> NewSlot:
        give_up_at = self.now() + _WAIT_S
        self.server.begin_slot(name, self.keeper)
        while True:
            made = self.server.made_slot(name, self.keeper)
            if made is not None:
                return NewSlot(*made)
            if stopped() or self.now() > give_up_at:
                self.server.cancel_slot(name, self.keeper)
                raise BusyError(f"making slot {name} took too long")
            self.sleep(_POLL_S)

    def floor(self) -> str | None:
        found: str | None = self.server.floor(self.part.slot)
        return found

    def gap(self, new: NewSlot, incarnation: Incarnation, floor: str | None) -> Gap:
        gap = ModelGap(self.part, new.snapshot, incarnation, new.lsn, floor, server=self.server)
        gap.survey()
        return gap

    def copy(self, name: str, to: str) -> None:
        self.server.copy(name, to)

    def drop(self, name: str) -> None:
        self.server.drop(name)

    def mark_failover(self) -> None: ...

    def let_go(self) -> None:
        """A connection that closes needs no answer."""
        self.model.forget(self.keeper, self.part)

    def disconnect(self) -> None: ...


@dataclass
class ModelGap(OutboxGap):
    """`OutboxGap`, with its places in the log, over the port."""

    server: Any = None

    def survey(self) -> None:
        rows = self._rows()
        self.pieces = (Slice(0, "", self.position),) if rows else ()
        self.since = min((moment(row) for row in rows), default=None)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        rows = self._rows()
        yield as_batch(rows, [f"{row.inserted_at:016x}" for row in rows])

    def _rows(self) -> list[OutboxRow]:
        rows: list[OutboxRow] = self.server.candidates(self.target, self.snapshot, self.floor)
        return rows


def moment(row: OutboxRow) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row.created_us)


def as_batch(rows: Sequence[OutboxRow], positions: Sequence[str]) -> pa.RecordBatch:
    columns: dict[str, object] = {
        "event_id": [row.event_id for row in rows],
        "position": list(positions),
        "stream": ["orders"] * len(rows),
        "key": ["k"] * len(rows),
        "op": ["insert"] * len(rows),
        "event_time": pa.array([row.created_us for row in rows], pa.int64()),
        "payload": ["{}"] * len(rows),
    }
    return taken_batch(columns, len(rows))
