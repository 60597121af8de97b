"""The tables of a replica as a source: all origins in one partition, in the order that the plan gives them (plan.py).

`latest` plans, `read` carries out, `confirm` tells the peer how far the log is. The peer knows us as a member of its
cluster that reads and never writes: it collects nothing that we have not confirmed.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import structlog

from evermark import failpoint
from evermark.errors import BusyError, ConflictError, DeniedError, SetupError
from evermark.event import Seen
from evermark.replicas.auth import Party
from evermark.replicas.client import TIMEOUT_S, HttpPeer
from evermark.replicas.event import new_origin
from evermark.replicas.exchange import PAGE_EVENTS, PROTOCOL, Hello, Standing
from evermark.replicas.members import Said
from evermark.replicas.ranges import Held, Ranges, union
from evermark.replicas.values import Table
from evermark.secrets import Hidden, Secret
from evermark.sources.base import Condition, Limit, Repair, Slice, Source, Untaken
from evermark.sources.replica import plan as planning
from evermark.sources.replica.copying import lost_snapshots, rows_of, snapshot_for
from evermark.sources.replica.plan import Part, Plan, number_of, position
from evermark.sources.replica.repair import SnapshotRepair
from evermark.sources.replica.rows import batch_of
from evermark.sources.replica.state import Plans, StatePlans
from evermark.sources.replica.target import ReplicaTarget
from evermark.state.process_states import SHARED

log = structlog.get_logger(__name__)
_PARTITION = 0
_LOOK_S = 0.5
_GLANCE_S = 3.0  # who only looks waits no longer for the peer
_TELL_S = 5.0  # the peer is told how far the log is no oftener than that
_BATCH_EVENTS = 100_000
_SLICE_EVENTS = 20_000
_COPY_AGAIN_S = 5.0


def open_plans(dsn: Hidden, schema: str, source: str) -> Plans:
    state, let_go = SHARED.of(dsn, schema)
    return StatePlans(state, source, let_go)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class ReplicaTables(Source):
    """Picklable: the target travels, connections do not."""

    def __init__(self, target: ReplicaTarget, plans: Callable[[], Plans], epoch: int = 0) -> None:
        self.target, self._open_plans, self._epoch = target, plans, epoch
        self._plans: Plans | None = None
        self._opening = threading.Lock()
        self._told_at = self._copied_from = 0.0
        self._waiting: dict[str, tuple[int, str]] = {}  # tables whose copy could not begin: how often, and why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.target, self._open_plans, self._epoch)

    @property
    def plans(self) -> Plans:
        with self._opening:  # the owner's reading and its upkeep are two threads
            if self._plans is None:
                self._plans = self._open_plans()
            return self._plans

    def close(self) -> None:
        with self._opening:
            plans, self._plans = self._plans, None
        if plans is not None:
            plans.close()

    def peer(self, tables: Mapping[str, Table] | None = None, timeout_s: float = TIMEOUT_S) -> HttpPeer:
        target = self.target
        party = Party(target.cluster, target.node, target.peer, Secret(target.key.open()))
        return HttpPeer(target.url, party, lambda: tables or {}, now_ms, timeout_s)

    def standing(self, timeout_s: float = TIMEOUT_S) -> Standing:
        """What the peer has; `SetupError` unless it has our tables."""
        with closing(self.peer(timeout_s=timeout_s)) as peer:
            found = peer.standing()
        if found.hello.node != self.target.peer:
            raise DeniedError(f"{found.hello.node[:60]!r} answers for {self.target.peer}", hint="correct url or peer")
        for table in self.target.tables:
            if table not in found.hello.tables:
                hint = f"run there: evermark replica init --table {table}"
                raise SetupError(f"{self.target.peer} does not replicate {table}", hint=hint)
        return found

    def partitions(self) -> Sequence[int]:
        return [_PARTITION]

    def earliest(self, partition: int) -> str:
        return position(0)

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for text in resume.values():
            number_of(text)
        standing, plan = self.standing(), self.plans.load() if resume else None
        if plan is not None:
            self._check_floors(planning.with_tables(plan, self._uncopied, standing.floors), standing)

    def owned(self, epoch: int) -> None:
        self._epoch = epoch

    def begin(self, partition: int, position: str) -> None:
        """Take the plan up where the log ends. If it does not lead there, State was lost or the checkpoint set back:
        all that the peer has is planned anew, and compared with the log."""
        start, standing = number_of(position), self.standing()
        tables, held, lost = self._uncopied, standing.hello.said.held, self._lost_from(start, standing)

        def taken_up(plan: Plan | None) -> Plan:
            if plan is None and start == 0:
                return planning.begun(self._fresh_origin(), tables, standing.floors)
            if plan is None or not plan.start <= start <= plan.end:
                return planning.anew(self._fresh_origin(), start, self.target.tables, self.target.copied)
            plan = planning.with_tables(planning.without_vanished(plan, start, held, lost), tables, standing.floors)
            if plan.origin in standing.hello.said.evicted:  # it was silent for too long
                plan = replace(plan, origin=self._fresh_origin())
            return plan

        plan = self.plans.change(self._epoch, taken_up)
        if plan.repeats_to == planning.EVERYTHING:
            log.warning("replica_planned_anew", peer=self.target.peer, position=position)
        self._check_floors(plan, standing)
        self._tell(plan, standing)

    @property
    def _uncopied(self) -> tuple[str, ...]:
        """The tables that are read from their oldest events on; others from a snapshot on, once there is one."""
        return () if self.target.copies else self.target.tables

    def _begun(self, plan: Plan) -> list[str]:
        return [table for table in self.target.tables if table in plan.done]

    def _lost_from(self, start: int, standing: Standing) -> set[str]:
        """Snapshots that cannot be read on there. All chunks of the next batch are looked at: one of them may be there
        while the next is gone, and the batch would fail for ever."""
        plan = self.plans.load()
        if plan is None or not plan.start <= start <= plan.end:
            return set()
        parts = plan.between(start, min(plan.end, start + _BATCH_EVENTS))
        if all(part.chunk is None for part in parts):
            return set()
        with closing(self.peer()) as peer:
            return lost_snapshots(peer, standing.hello.tables, parts)

    def _fresh_origin(self) -> str:
        return new_origin(self.target.node, now_ms(), secrets.token_hex(4))

    def _check_floors(self, plan: Plan, standing: Standing) -> None:
        held = standing.hello.said.held
        planning.check_floors(self.target.peer, plan, self._begun(plan), held, standing.floors)

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        if not after:
            return {}
        start, deadline = number_of(after[_PARTITION]), time.monotonic() + limit.wait_s
        plan = self._with_copies(self.plans.load(), start)
        while True:
            if plan is not None and self._led(plan, start).end > start:
                return {_PARTITION: position(plan.batch_end(start, min(limit.rows_max, _BATCH_EVENTS)))}
            plan = self._led(self._grown(self.standing(), start), start)
            if plan.end <= start:
                left = deadline - time.monotonic()
                if left <= 0:
                    return dict(after)
                time.sleep(min(_LOOK_S, left))

    def _with_copies(self, plan: Plan | None, start: int) -> Plan | None:
        """With the rows of the next table that is to be copied and was not planned yet: the peer need not keep all
        snapshots until the last is read. If it cannot make one now it is asked again after a while, and others go on.
        """
        wanted = planning.uncopied(plan, self.target.copied)
        if (plan is None and start) or not wanted or time.monotonic() < self._copied_from:
            return plan
        if plan is not None:
            self._led(plan, start)
        for table in wanted:
            if plan is not None and plan.rows_left(start):
                break
            try:
                plan = self._with_copy(table, plan)
                self._waiting.pop(table, None)
            except BusyError as error:
                self._copied_from = time.monotonic() + _COPY_AGAIN_S
                self._waiting[table] = (1 + self._waiting.get(table, (0, ""))[0], str(error))
                log.warning("replica_copy_waits", peer=self.target.peer, table=table, error=error)
        return plan

    def _with_copy(self, table: str, plan: Plan | None) -> Plan:
        standing = self.standing()
        with closing(self.peer()) as peer:
            held = standing.hello.said.held.get(table, {})
            manifest = snapshot_for(peer, standing.hello.tables[table], plan, held)

        def copied(now: Plan | None) -> Plan:
            if now is None and plan is not None:
                raise ConflictError("the plan is gone from State", hint="it is planned anew at the next start")
            now = now or planning.begun(self._fresh_origin(), self._uncopied, standing.floors)
            self._check_floors(now, standing)
            return planning.with_copy(now, manifest, secrets.token_hex(8))

        found = self.plans.change(self._epoch, copied)
        failpoint.hit("copy.planned")
        rows = sum(chunk.rows for chunk in manifest.chunks)
        log.info("replica_copy_planned", peer=self.target.peer, table=table, snapshot=manifest.id, rows=rows)
        return found

    def _led(self, plan: Plan, start: int) -> Plan:
        """The plan, if it is ours and leads on from there."""
        planning.check_owner(plan, self._epoch)
        plan.between(start, start)
        return plan

    def _grown(self, standing: Standing, start: int) -> Plan:
        held = standing.hello.said.held

        def grown(plan: Plan | None) -> Plan:
            if plan is None and start:
                raise ConflictError(
                    f"the plan that led to {start} is gone from State",
                    hint="what is there is planned anew at the next start",
                )
            plan = plan or planning.begun(self._fresh_origin(), self._uncopied, standing.floors)
            self._check_floors(plan, standing)
            return planning.grown(plan, self._begun(plan), held)

        return self.plans.change(self._epoch, grown)

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        plan, first, last = self._plan(), number_of(start), number_of(end)
        planning.check_owner(plan, self._epoch)
        found = []
        for at, upto in pairwise(plan.cuts(first, last, _SLICE_EVENTS)):
            parts = [[part.at, part.as_json()] for part in plan.between(at, upto)]
            detail = {"origin": plan.origin, "parts": json.dumps(parts)}
            found.append(Slice(partition, position(at), position(upto), detail))
        return found

    def _plan(self) -> Plan:
        found = self.plans.load()
        if found is None:
            raise BusyError(f"nothing of {self.target.peer} is planned yet", hint="ask what there is to take first")
        return found

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        tables = self.standing().hello.tables
        with closing(self.peer(tables)) as peer:
            for at, values in json.loads(piece.detail["parts"]):
                part = Part.from_json(at, values)
                if part.chunk is not None:
                    yield from rows_of(peer, tables[part.table], part, part.chunk)
                else:
                    yield from self._read_part(peer, tables[part.table], piece.detail["origin"], part)

    def _read_part(self, peer: HttpPeer, table: Table, origin: str, part: Part) -> Iterator[pa.RecordBatch]:
        wanted = {part.origin: Ranges(((part.first, part.last),))}
        held: Held = {}
        following = part.first
        while following <= part.last:
            page = peer.pull(part.table, origin, held, PAGE_EVENTS, wanted)
            numbers = [event.version.seq for event in page.events]
            is_next = numbers == list(range(following, following + len(numbers)))
            if not numbers or not is_next or any(event.version.origin != part.origin for event in page.events):
                raise BusyError(
                    f"{self.target.peer} lacks event {following} of {part.origin}, which it had: it was restored",
                    hint="it gets it back from other nodes; what it has then is planned anew at the next start",
                )
            yield batch_of(table, page.events, part.at + following - part.first)
            held = union(held, page.coverage.covered)
            following += len(numbers)

    def may_repeat_from(self, partition: int, position: str) -> str:
        plan = self.plans.load()
        repeats = plan is not None and number_of(position) < plan.repeats_to
        return self.earliest(partition) if repeats else position

    def confirm(self, partition: int, end: str) -> None:
        upto = number_of(end)
        plan = self.plans.change(self._epoch, lambda plan: planning.confirmed(plan or self._plan(), upto))
        if time.monotonic() - self._told_at >= _TELL_S:
            self._tell(plan, self.standing())

    def upkeep(self) -> None:
        """What was confirmed last may not have been told; and a node silent for weeks is given up by its peers."""
        if (plan := self.plans.load()) is not None:
            self._tell(plan, self.standing())

    def _tell(self, plan: Plan, standing: Standing) -> None:
        """Tell the peer what the log has. Of tables that are not read, and of its clocks, we have what it has: we make
        no events that anybody would have to wait for."""
        theirs = standing.hello
        held = {**theirs.said.held, **{table: plan.done.get(table, {}) for table in self.target.tables}}
        said = Said(plan.origin, now_ms(), held, theirs.said.clocks, theirs.said.evicted)
        with closing(self.peer()) as peer:
            peer.hello(Hello(self.target.node, PROTOCOL, now_ms(), theirs.tables, said, {}))
        self._told_at = time.monotonic()

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        if not after:
            return {}
        start, plan = number_of(after[_PARTITION]), self.plans.load()
        if plan is not None and plan.end > start:
            return {_PARTITION: Untaken(position(plan.end))}
        standing = self.standing(_GLANCE_S)
        plan = plan or planning.begun("", self._uncopied, standing.floors)
        found = planning.unplanned(plan, self.target.tables, standing.hello.said.held)
        count = sum(ranges.count for held in found.values() for ranges in held.values())
        count += len(planning.uncopied(plan, self.target.copied))  # nobody knows how many rows
        return {_PARTITION: Untaken(position(start + count))} if count else {}

    def condition(self) -> Condition:
        """How many rows are still to be copied; before their snapshot is made, nobody knows."""
        plan = self.plans.load() if self.target.copies else None
        rows_left = {} if plan is None else {"copy_rows_left": float(plan.rows_left())}
        return Condition(rows_left, failing_copies=dict(self._waiting))

    def repair(self, partition: int) -> Repair:
        return SnapshotRepair(self.target, self.plans, self.peer, self._fresh_origin, self._tell, self._epoch)
