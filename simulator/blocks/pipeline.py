"""What ingest does with a block source, in small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from evermark.errors import EvermarkError
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.blocks.decide.ticks import Position
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import BlocksTarget, Pace
from simulator.blocks.node import ModelNode
from simulator.blocks.plans import MemoryPlans

PACE = Pace(patience_s=0.0, away_s=0.0, requests_per_s=1e9)
Cut = Literal["planned", "read", "logged", "confirmed", "unconfirmed"]


class Crash(Exception):
    """The process ended here."""


class Pipeline:
    """What ingest does with a source, in small. The log is what survives; `start` is what a new process does."""

    def __init__(self, make: Callable[[], BlockStreams]) -> None:
        self._make = make
        self.log: dict[int, list[dict[str, Any]]] = {}
        self.ends: dict[int, str] = {}
        self.dropped = 0
        self.source = make()

    def start(self) -> None:
        self.source = self._make()
        # A pipeline that is new on old plans goes on where they were confirmed, as if it had the log.
        confirmed = {p: str(Position(self.source.plans.state(p).confirmed)) for p in self.source.partitions()}
        starts = confirmed | self.ends
        self.source.check(starts)
        for partition, position in starts.items():
            self.source.begin(partition, position)
        self.ends = starts

    def step(self, limit: Limit, cut: Cut | None = None) -> bool:
        """One batch of each partition; whether there was any. Ends with `Crash` where `cut` says; `unconfirmed`
        goes on, as ingest does when a source is too busy to be told."""
        after = dict(self.ends)
        found = self.source.latest(after, limit)
        self._cut(cut, "planned")
        for partition, end in found.items():
            if end == after[partition]:
                continue
            rows = self._read(partition, after[partition], end)
            self._cut(cut, "read")
            self.log.setdefault(partition, []).extend(rows)
            self.ends[partition] = end
            self._cut(cut, "logged")
            if cut != "unconfirmed":
                self.source.confirm(partition, end)
            self._cut(cut, "confirmed")
        return found != after

    def _read(self, partition: int, start: str, end: str) -> list[dict[str, Any]]:
        rows = []
        for piece in self.source.slices(partition, start, end):
            rows += [row for batch in self.source.read(piece) for row in batch.to_pylist()]
        positions = [row["position"] for row in rows]
        assert positions == sorted(set(positions)), "positions within a batch increase"
        assert all(start <= position < end for position in positions)
        since = self.source.may_repeat_from(partition, start)
        had = {row["event_id"] for row in self.log.get(partition, ()) if row["position"] >= since}
        kept = [row for row in rows if since == start or row["event_id"] not in had]
        self.dropped += len(rows) - len(kept)
        return kept

    @staticmethod
    def _cut(wanted: Cut | None, here: Cut) -> None:
        if wanted == here:
            raise Crash(here)

    def drain(self, limit: Limit, tries: int = 200) -> None:
        """Until nothing is new. A batch that cannot be read is begun anew, as the runner does."""
        for _ in range(tries):
            try:
                if not self.step(limit):
                    return
            except EvermarkError:
                self.start()
        raise AssertionError("this does not come to an end")

    def rows(self, stream: str) -> list[dict[str, Any]]:
        return [row for rows in self.log.values() for row in rows if row["stream"] == stream]

    def ids(self, stream: str) -> list[str]:
        return [row["event_id"] for row in self.rows(stream) if row["op"] not in ("truncate", "schema")]

    def notes(self, stream: str) -> list[str]:
        return [row["payload"] for row in self.rows(stream) if row["op"] == "truncate"]


def place(*, nodes: int = 1, **more: Any) -> BlocksTarget:
    names = tuple(f"http://{n}" for n in range(nodes))
    return BlocksTarget("chat", names, Plain("none"), "none", **({"pace": PACE} | more))


def pipeline(nodes: Sequence[ModelNode], plans: MemoryPlans | None = None, **more: Any) -> Pipeline:
    kept = plans if plans is not None else MemoryPlans()
    here = place(nodes=len(nodes), **more)
    made = Pipeline(lambda: BlockStreams(here, lambda _: kept, lambda _: NodeClient(nodes, here.pace)))
    made.start()
    return made
