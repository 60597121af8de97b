"""A Postgres with an outbox, as far as a slot's loss is concerned: WAL, transactions, slots, snapshots, publications.

What follows from what it shows is decided by the product: see `outbox.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from evermark.errors import BusyError, EvermarkError, GapError
from evermark.secrets import Plain
from evermark.sources.postgres.lsn import Incarnation
from evermark.sources.postgres.outbox import SCHEMA_VERSION
from evermark.sources.postgres.slots import Slot, spare_name
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.target import PostgresTarget
from simulator.baton import Process
from simulator.broken import require

_RECORD = 8  # WAL records begin at multiples of it
_INCARNATION = Incarnation(77, 1)


@dataclass(frozen=True)
class OutboxRow:
    """A committed row of `events`."""

    event_id: str
    share: int
    xid: int
    inserted_at: int
    committed_at: int
    ordinal: int
    created_us: int
    published: bool  # whether the publication had it when it was committed


@dataclass
class _Making:
    """A slot that waits for transactions that were open before it; its connection is `keeper`'s."""

    waits_for: set[int]
    keeper: Process
    outlives: bool  # whether it is made although nobody is there any more


@dataclass
class ModelServer:
    """Each method is one effect; what is done to it by others than us is below."""

    rng: random.Random
    place: PostgresTarget = field(default_factory=lambda: PostgresTarget(Plain("host=model"), "em", "em"))
    lsn: int = 4096
    xid: int = 700
    open: dict[int, list[OutboxRow]] = field(default_factory=dict)
    rows: list[OutboxRow] = field(default_factory=list)
    slots: dict[str, Slot] = field(default_factory=dict)
    _making: dict[str, _Making] = field(default_factory=dict)
    _snapshots: dict[str, tuple[int, Process]] = field(default_factory=dict)
    _published: dict[str, int] = field(default_factory=dict)  # each change makes it another
    _fingerprints: dict[str, int] = field(default_factory=dict)
    _whole: dict[str, bool] = field(default_factory=dict)
    _floors: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        for part in self.place.parts():
            self.slots[part.slot] = self._slot(self.lsn)
            self._published[part.publication] = self._fingerprints[part.slot] = 1
            self._whole[part.publication] = True

    @staticmethod
    def _slot(lsn: int | None) -> Slot:
        return Slot("pgoutput", "db", False, lsn, lsn, "reserved", None, None)

    # what we ask

    def look(self, part: PostgresTarget) -> Survey:
        return Survey(
            180000, "logical", False, self.lsn, "db", str(self._fingerprints[part.slot]),
            str(self._published[part.publication]), SCHEMA_VERSION, "evermark", where="model",
            slot=self.slots.get(part.slot), incarnation=_INCARNATION,
        )  # fmt: skip

    def read(self, part: PostgresTarget, start: int, end: int) -> list[OutboxRow]:
        """What a peek gives: nothing of before the slot, and nothing the publication lacked."""
        slot = self._usable(part.slot)
        first = max(start, slot.confirmed_lsn or 0)
        return [r for r in self._mine(part) if first <= r.committed_at < end and r.published]

    def advance(self, name: str, lsn: int) -> None:
        if name not in self.slots:
            return
        slot = self._usable(name)
        if slot.confirmed_lsn is not None and slot.confirmed_lsn < lsn:
            self.slots[name] = replace(slot, confirmed_lsn=lsn, restart_lsn=lsn)

    def sample(self) -> tuple[int, int]:
        return min(self.open, default=self.xid), self.lsn

    def note_floor(self, name: str, floor: int) -> None:
        self._floors[name] = max(floor, self._floors.get(name, 0))

    def floor(self, name: str) -> str | None:
        return str(self._floors[name]) if name in self._floors else None

    def slot(self, name: str) -> Slot | None:
        return self.slots.get(name)

    def drop(self, name: str) -> None:
        self._making.pop(name, None)
        self.slots.pop(name, None)

    def copy(self, name: str, to: str) -> None:
        if to in self.slots:
            raise BusyError(f"slot {to} is there already")
        self.slots[to] = self._usable(name)

    def repair_publication(self, part: PostgresTarget) -> None:
        self._whole[part.publication] = True
        self._published[part.publication] += 1
        self._fingerprints[part.slot] = self._published[part.publication]

    def begin_slot(self, name: str, keeper: Process) -> None:
        if name in self.slots:
            raise BusyError(f"slot {name} is there already")
        self.slots[name] = self._slot(None)
        self._making[name] = _Making(set(self.open), keeper, self.rng.random() < 0.5)

    def made_slot(self, name: str, keeper: Process) -> tuple[int, str] | None:
        """Where it begins and its snapshot; none while it waits."""
        making = self._making.get(name)
        if making is None or making.keeper is not keeper:
            raise EvermarkError(f"slot {name} was dropped while it was made")
        if making.waits_for & self.open.keys():
            return None
        self._persist(name)
        self.number += 1
        snapshot = f"snapshot-{self.number}"
        self._snapshots[snapshot] = (len(self.rows), keeper)
        lsn = self.slots[name].confirmed_lsn
        require(lsn is not None, "a slot that was made has no place")
        return lsn or 0, snapshot

    def cancel_slot(self, name: str, keeper: Process) -> None:
        making = self._making.get(name)
        if making is not None and making.keeper is keeper:
            self.drop(name)

    def candidates(self, part: PostgresTarget, snapshot: str, floor: str | None) -> list[OutboxRow]:
        count, keeper = self._snapshots.get(snapshot, (0, None))
        if keeper is None or keeper.dead:
            raise EvermarkError(f"there is no snapshot {snapshot}")
        return [r for r in self._mine(part, count) if floor is None or r.xid >= int(floor)]

    def forget(self, keeper: Process, part: PostgresTarget) -> None:
        """A connection ends, and with it what it kept."""
        self._snapshots = {name: kept for name, kept in self._snapshots.items() if kept[1] is not keeper}
        self.cancel_slot(spare_name(part.slot), keeper)

    # what others do

    def begin(self) -> int:
        self.xid += 1
        self.open[self.xid] = []
        return self.xid

    def insert(self, xid: int, now: float) -> None:
        self.number += 1
        self.lsn += _RECORD * self.rng.randint(1, 3)
        share = self.rng.randrange(self.place.slots)
        row = OutboxRow(f"e{self.number}", share, xid, self.lsn, 0, len(self.open[xid]), int(now * 1e6), True)
        self.open[xid].append(row)

    def commit(self, xid: int) -> None:
        self.lsn += _RECORD * self.rng.randint(1, 3)
        whole = {part.share or 0: self._whole[part.publication] for part in self.place.parts()}
        rows = self.open.pop(xid)
        self.rows += [replace(r, committed_at=self.lsn, published=whole[r.share]) for r in rows]
        self.lsn += _RECORD

    def abort(self, xid: int) -> None:
        del self.open[xid]

    def lose(self, name: str) -> None:
        if name in self.slots and name not in self._making:
            self.slots[name] = replace(self.slots[name], wal_status="lost", invalidation_reason="wal_removed")

    def move(self, name: str) -> None:
        """Somebody else advances it."""
        if name in self.slots and self.slots[name].wal_status == "reserved" and name not in self._making:
            self.slots[name] = replace(self.slots[name], confirmed_lsn=self.lsn, restart_lsn=self.lsn)

    def change_publication(self, part: PostgresTarget) -> None:
        """Rows that are committed from here on are not given by any slot."""
        self._whole[part.publication] = False
        self._published[part.publication] += 1

    def tick(self) -> None:
        """Slots whose makers died are made all the same, or vanish."""
        for name, making in list(self._making.items()):
            if making.keeper.dead and not making.outlives:
                self.drop(name)
            elif making.keeper.dead and not making.waits_for & self.open.keys():
                self._persist(name)

    def before(self, part: PostgresTarget, lsn: int) -> list[OutboxRow]:
        return [row for row in self._mine(part) if row.committed_at < lsn]

    def older(self, part: PostgresTarget, floor: int) -> list[OutboxRow]:
        return [row for row in self._mine(part) if row.xid < floor]

    def _persist(self, name: str) -> None:
        del self._making[name]
        self.lsn += _RECORD  # what is running is noted in the WAL
        self.slots[name] = self._slot(self.lsn)

    def _usable(self, name: str) -> Slot:
        slot = self.slots.get(name)
        if slot is None or slot.wal_status == "lost" or slot.confirmed_lsn is None:
            raise GapError(f"slot {name} cannot be read")
        return slot

    def _mine(self, part: PostgresTarget, count: int | None = None) -> list[OutboxRow]:
        return [row for row in self.rows[:count] if part.share in (None, row.share)]
