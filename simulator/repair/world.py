"""Everything outside the owners: a server whose slots are lost, people, and what must hold after every effect."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

from evermark.cluster.fence import source_lease
from evermark.delivery.model import SourcePartition
from evermark.ingest.repair.base import TRIES_MAX, TRIES_WITHIN, Choice, Recovery, Step
from evermark.secrets import Plain
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.slots import spare_name
from evermark.sources.postgres.target import PostgresTarget
from simulator.broken import require
from simulator.repair.server import ModelServer, OutboxRow
from simulator.scenario import Scenario
from simulator.truth import Truth, require_epoch
from simulator.world import World

NAME = "shop"
_EPOCH_AT = {"open": 4, "move": 2, "taking": 3, "close_gap": 2}


class MendWorld(World):
    """A world without subscriptions, and with a Postgres."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        place = PostgresTarget(Plain("host=model"), "em", "em", slots=len(scenario.places))
        self.server = ModelServer(self.rng, place)
        self.skipped: set[str] = set()
        self.reading: dict[str, set[int]] = {}  # by instance: the partitions that are read just now
        self.met: Counter[str] = Counter()
        self.repaired: set[str] = set()  # files that repairs wrote
        self.truth = MendTruth(self)
        self.partitions = range(len(scenario.places))
        self._finished: set[int] = set()
        self._struck = dict.fromkeys(self.partitions, 0)  # the step at which something was done to a slot, and
        self._made = dict.fromkeys(self.partitions, 0)  # that at which a new one was begun

    def part(self, partition: int) -> PostgresTarget:
        return self.server.place.parts()[partition]

    # what others do

    def trouble(self) -> None:
        """One of the things that make a gap, at any of the slots there are."""
        partition = self.rng.choice(self.partitions)
        part, drawn = self.part(partition), self.rng.random()
        name = spare_name(part.slot) if self.rng.random() < 0.5 else part.slot
        begun = partition in self.checkpoints.list(NAME)
        self._struck[partition] = self.baton.steps + 1
        if drawn < 0.5:
            self.met["lost"] += name in self.server.slots
            self.server.lose(name)
        elif drawn < 0.7 and begun:
            self.met["dropped"] += name in self.server.slots
            self.server.drop(name)
        elif drawn < 0.85 and begun:
            self.server.move(part.slot)
            self.met["moved"] += 1
        elif begun:
            self.server.change_publication(part)
            self.met["publication"] += 1

    def people(self) -> None:
        """Whoever sees that a gap was given up says what is to be done; now and then somebody does so unasked."""
        epoch = self.owner_epoch(source_lease(NAME))
        for partition in self.partitions if epoch is not None else ():
            past = [r for r in self.recoveries.past(NAME) if r.partition == partition]
            given_up = self.may_give_up(partition) or (past and past[0].step is Step.FAILED)
            under_way = self.recoveries.current(NAME, partition) is not None
            if self.rng.random() < (0.3 if given_up and not under_way else 0.005 if not self.calm else 0):
                skip = not self.calm and self.rng.random() < 0.2
                choice = Choice.SKIP if skip else Choice.REPAIR
                saved = self.checkpoints.list(NAME).get(partition)
                left_at = saved.position if saved is not None else ""
                self.recoveries.open(NAME, partition, "asked", left_at, epoch or 0, choice)
                self.met[f"person {choice}"] += 1

    # what must hold

    def landed_at_recoveries(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method in _EPOCH_AT:
            epoch = args[_EPOCH_AT[method]]
            require_epoch(self.leases, source_lease(NAME), epoch, f"recoveries.{method}")
        for recovery in self.recoveries.past(NAME):
            require(recovery.tries <= TRIES_MAX, f"recovery {recovery.id} was tried {recovery.tries} times")
        if method == "open":
            spent = self._spent(args[1], without_newest=True)
            require(spent < TRIES_MAX, f"another recovery was opened after {spent} tries within the hour")
        if method == "move" and args[1] in (Step.DONE, Step.FAILED) and args[0].id not in self._finished:
            self._finished.add(args[0].id)
            self.met["repaired" if args[1] is Step.DONE else "given up"] += 1
            if args[1] is Step.DONE:
                self._look_at_slot(args[0].partition, args[0].position)

    def _look_at_slot(self, partition: int, position: str) -> None:
        """A slot that nobody touched since it was made gives all from there on. A late owner may touch it, too."""
        if self.scenario.instances > 1 or self._struck[partition] >= self._made[partition]:
            return
        slot, at = self.server.slots.get(self.part(partition).slot), Position.parse(position)
        fine = slot is not None and slot.wal_status == "reserved" and (slot.confirmed_lsn or at.lsn) <= at.lsn
        require(fine, f"partition {partition} was repaired, and reading cannot go on {position}: {slot}")

    def may_give_up(self, partition: int) -> bool:
        return self._spent(partition) >= TRIES_MAX

    def _spent(self, partition: int, *, without_newest: bool = False) -> int:
        """Tries of the last hour, since the last word of a person."""
        mine: list[Recovery] = [r for r in self.recoveries.past(NAME) if r.partition == partition]
        spent = 0
        if without_newest and mine and mine[0].by_person:
            return 0  # somebody had spoken just before, and that stands
        for recovery in mine[1:] if without_newest else mine:
            if recovery.by_person:
                break
            if self.clock() - recovery.changed_at <= TRIES_WITHIN + timedelta(seconds=1):
                spent += max(1, recovery.tries)
        failed = [r for r in mine[:1] if r.by_person and r.step is Step.FAILED]
        return max(spent, TRIES_MAX) if failed and not without_newest else spent

    def landed_at_server(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "begin_slot":
            slots = [spare_name(self.part(partition).slot) for partition in self.partitions]
            partition = slots.index(args[0])
            self._made[partition] = self.baton.steps
            read = self.reading.get(args[1].name, ())
            require(partition not in read, f"{args[1].name} repairs partition {partition}, and reads it meanwhile")
        part = next((p for p in self.server.place.parts() if p.slot == args[0]), None) if args else None
        if method == "advance" and part is not None:
            self._require_taken(part, self.server.before(part, args[1]), f"slot {part.slot} was moved to {args[1]}")
        elif method == "note_floor" and part is not None:
            self._require_taken(part, self.server.older(part, args[1]), f"floor {args[1]} was noted")

    def reading_begins(self, partition: int, position: str) -> None:
        part = self.part(partition)
        self._require_taken(part, self.server.before(part, Position.parse(position).lsn), f"reading goes on {position}")

    def _require_taken(self, part: PostgresTarget, rows: list[OutboxRow], said: str) -> None:
        log = self.logs[NAME]
        durable = {row.event_id for append in log.commits[: log.durable_commits()] for row in log.rows_of(append)}
        missing = [row.event_id for row in rows if row.event_id not in durable | self.skipped]
        require(not missing, f"{said}, and {missing[:3]} of {part.slot} are not in the log")

    def skip(self, partition: int, position: str) -> None:
        """What a person gave up."""
        part = self.part(partition)
        self.skipped |= {row.event_id for row in self.server.before(part, Position.parse(position).lsn)}

    def unrest(self) -> str:
        taken = {row.event_id for append in self.logs[NAME].commits for row in self.logs[NAME].rows_of(append)}
        missing = [row.event_id for row in self.server.rows if row.event_id not in taken | self.skipped]
        log = self.logs[NAME]
        if log.durable_commits() < len(log.commits):
            return "commits are not durable"
        if missing or self.server.open:
            return f"{len(missing)} events are not taken, {missing[:3]} first"
        under_way = [r.id for r in self.recoveries.past(NAME) if r.step in (Step.OPENED, Step.CLOSED)]
        spares = [name for name in self.server.slots if name.endswith("_mend")]
        return f"recoveries {under_way} are under way, and {spares} there" if under_way or spares else ""


class MendTruth(Truth):
    """What is read follows the source's order; what was found later stands where it was found, and nothing twice."""

    def __init__(self, world: MendWorld) -> None:
        super().__init__(world.logs, world.leases, world.checkpoints)
        self._world = world

    def after_commit(self, source: str, batch: int, partition: int, epoch: int) -> None:
        log, place = self._logs[source], SourcePartition(source, partition)
        require(epoch >= self.begun.get(place, 0), f"epoch {epoch} committed to {place} after a later owner began")
        mine = [a for a in log.commits if a.partition == partition]
        require([a.batch for a in mine] == list(range(1, len(mine) + 1)), f"{place}: batches are not dense")
        rows = [row for append in mine for row in log.rows_of(append)]
        twice = [i for i, n in Counter(row.event_id for row in rows).items() if n > 1]
        require(not twice, f"{place}: in the log more than once: {twice[:3]}")
        positions = [row.position for row in rows]
        require(positions == sorted(set(positions)), f"{place}: positions do not ascend in batch {batch}")
        there = {row.event_id for row in self._world.server.rows if row.share == partition}
        strange = [row.event_id for row in rows if row.event_id not in there]
        require(not strange, f"{place}: {strange[:3]} were never committed there")

    def after_checkpoint(self, source: str, partition: int, checkpoint: Any) -> None:
        require_epoch(self._leases, source_lease(source), checkpoint.epoch, "a checkpoint")


def scenario_of(base: Scenario) -> Scenario:
    """The same faults, without subscriptions, at one source of one or two slots."""
    slots = 1 + base.seed % 2
    return replace(
        base,
        places=tuple(SourcePartition(NAME, partition) for partition in range(slots)),
        specs=(),
        late_spec=None,
        wish_chance={},
        repeat_chance=0,
        steps=min(base.steps, 900),
    )
