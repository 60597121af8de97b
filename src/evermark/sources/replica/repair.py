"""A gap, closed with the rows as they are: a snapshot of each table, in which every change that has no event is.

The peer makes the snapshot, with digests, of one moment; reading goes on with the events after it. The peer is told of
the snapshot first, so that it collects none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import GapError
from evermark.event import taken_batch
from evermark.replicas.client import HttpPeer
from evermark.replicas.exchange import Manifest, Standing
from evermark.replicas.ranges import union
from evermark.replicas.snapshots import decoded, verified
from evermark.replicas.values import Table
from evermark.sources.base import Gap, Repair, Slice, Whereabouts
from evermark.sources.replica.copying import held_by_both
from evermark.sources.replica.plan import JUMP, Plan, all_copied, confirmed, number_of, position
from evermark.sources.replica.rows import record_columns
from evermark.sources.replica.state import Plans
from evermark.sources.replica.target import ReplicaTarget

_BATCH_ROWS = 5000

Dial = Callable[[], HttpPeer]


class SnapshotGap(Gap):
    """All rows of the tables. A piece is a chunk of a snapshot."""

    is_state = True

    def __init__(self, dial: Dial, tables: Mapping[str, Table], manifests: Mapping[str, Manifest], end: int) -> None:
        self._dial, self._tables, self._manifests, self._end = dial, tables, manifests, end
        self.pieces = tuple(
            Slice(0, "", self.position, {"stream": table, "chunk": str(number)})
            for table, manifest in sorted(manifests.items())
            for number in range(len(manifest.chunks))
        )

    @property
    def position(self) -> str:
        return position(self._end + JUMP)

    def covers(self, stream: str) -> bool:
        return stream in self._manifests

    def positions(self, first: int, count: int) -> pa.Array:
        return pa.array([position(self._end + first + number) for number in range(count)])

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        table, number = self._tables[piece.detail["stream"]], int(piece.detail["chunk"])
        manifest = self._manifests[table.name]
        with closing(self._dial()) as peer:
            rows = decoded(table, manifest, number, peer.chunk(manifest.id, number))
        live = rows.filter(pc.invert(rows["is_deleted"]))
        for at in range(0, live.num_rows, _BATCH_ROWS):
            some = live.slice(at, _BATCH_ROWS)
            nowhere = {"event_id": [""] * some.num_rows, "position": [""] * some.num_rows}
            yield taken_batch({**record_columns(table, some), **nowhere}, some.num_rows)


class SnapshotRepair(Repair):
    """What follows the gap is kept in State from the beginning on: the next owner of the source finishes the repair."""

    def __init__(
        self,
        target: ReplicaTarget,
        plans: Plans,
        dial: Dial,
        fresh_origin: Callable[[], str],
        tell: Callable[[Plan, Standing], None],
        epoch: int,
    ) -> None:
        self._target, self._plans, self._dial = target, plans, dial
        self._fresh_origin, self._tell, self._epoch = fresh_origin, tell, epoch

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        plan = self._plans.load() or Plan("")
        logged = plan if left_at is None else confirmed(plan, number_of(left_at))
        with closing(self._dial()) as peer:
            standing = peer.standing()
            tables = {name: standing.hello.tables[name] for name in self._target.tables}
            manifests: dict[str, Manifest] = {}
            for name, table in tables.items():
                covering = held_by_both(logged.done.get(name, {}), standing.hello.said.held.get(name, {}))
                manifests[name] = verified(peer.snapshot(name, covering=covering), table)
        # An earlier try may have logged rows before the place where it meant to go on.
        tried = plan.end if plan.pending is None else plan.pending.start
        end = max(plan.end, tried, number_of(left_at) if left_at is not None else 0)
        done = {name: union(logged.done.get(name, {}), manifest.held) for name, manifest in manifests.items()}
        # The log has all rows then: what was left to copy is among them.
        copies = all_copied({*self._target.copied, *plan.copies})
        following = Plan(self._fresh_origin(), end + JUMP, done, copies=copies)

        def with_pending(plan: Plan | None) -> Plan:
            return replace(plan or Plan(self._fresh_origin()), pending=following)

        self._plans.change(self._epoch, with_pending)
        self._tell(following, standing)
        return SnapshotGap(self._dial, tables, manifests, end)

    def finish(self, position: str) -> None:
        start = number_of(position)

        def followed(plan: Plan | None) -> Plan:
            if plan is not None and plan.pending is None and plan.start == start:
                return plan  # an earlier try came as far
            if plan is None or plan.pending is None or plan.pending.start != start:
                raise GapError("nobody knows what follows the snapshot: State was lost", hint="it is repaired anew")
            return plan.pending

        self._plans.change(self._epoch, followed)

    def abandon(self) -> None: ...

    def close(self) -> None: ...
