"""`Plans` in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from evermark.errors import NotFoundError
from evermark.sources.blocks.decide.resume import StreamState
from evermark.sources.blocks.decide.ticks import Item, Move, Tick, way_to
from evermark.sources.blocks.store.base import PlanState, Stale

_numbers = itertools.count(2**40)


class MemoryPlans:
    """`Plans`, kept by nobody. Stale streams are due whenever `patient` is not set."""

    def __init__(self) -> None:
        self.partitions: dict[int, PlanState] = {}
        self.all_ticks: dict[int, dict[int, tuple[Tick, list[Item]]]] = {}
        self.streams: dict[str, tuple[int, Move]] = {}
        self.anew: set[str] = set()  # of `streams`: only to compare with
        self.gaps: dict[str, tuple[int, Stale]] = {}  # by stream: its partition, and the mark
        self.since: dict[str, float] = {}  # by stream: when what is in `gaps` began
        self.nodes: set[str] = set()
        self.patient = False
        self.clock = time.monotonic
        self.writes: list[tuple[str, int]] = []  # of sync state: stream, generation

    def close(self) -> None:
        pass

    def state(self, partition: int) -> PlanState:
        return self.partitions.get(partition, PlanState())

    def begin(self, partition: int, cold_before: int) -> None:
        self.partitions.setdefault(partition, PlanState(cold_before=cold_before))

    def ticks(self, partition: int) -> list[Tick]:
        return [tick for tick, _ in self.all_ticks.get(partition, {}).values()]

    def items(self, partition: int, ends: int) -> list[Item]:
        made = self.all_ticks.get(partition, {}).get(ends)
        return list(made[1]) if made is not None else []  # confirmed by another owner, and gone

    def moves(self, partition: int, ends: Sequence[int]) -> dict[str, Move]:
        items = [item for end in sorted(ends) for item in self.all_ticks[partition][end][1]]
        return {item.stream: item.move for item in items if item.move is not None}

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        found = {stream: self.streams[stream][1] for stream in streams if stream in self.streams}
        return {
            stream: move
            for stream, move in found.items()
            if stream not in self.anew or (move.known is not None and move.known.fork_accepted)
        }

    def witness(self, stream: str) -> StreamState | None:
        return self.streams[stream][1].known if stream in self.streams else None

    def unfinished(self, partition: int) -> list[str]:
        return [stream for stream, (at, move) in self.streams.items() if move.more and at == partition]

    def repeats(self, partition: int, starts: int) -> bool:
        found = [items for tick, items in self.all_ticks.get(partition, {}).values() if tick.starts == starts]
        return any(item.repeats for items in found for item in items)

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        state = self.partitions[partition]
        ends = max(state.last_tick, tick.starts) + 1
        self.partitions[partition] = replace(state, last_tick=ends)
        self.all_ticks.setdefault(partition, {})[ends] = (replace(tick, ends=ends), list(items))
        return ends

    def note_listed(self, partition: int, confirmed: int, touched: int, choice: str) -> None:
        state = self.partitions[partition]
        if state.confirmed == confirmed and (state.touched < touched or state.choice != choice):
            self.partitions[partition] = replace(state, touched=touched, choice=choice)

    def void(self, partition: int, starts: int) -> None:
        for ends, (tick, items) in self.all_ticks.get(partition, {}).items():
            if tick.starts >= starts:
                self.all_ticks[partition][ends] = (replace(tick, void=True), items)

    def confirm(self, partition: int, to: int) -> None:
        state = self.state(partition)
        if to <= state.confirmed:
            return
        way = way_to(self.ticks(partition), state.confirmed, to)
        moves = self.moves(partition, [tick.ends for tick in way])
        if way[0].root:
            self._keep_as_witnesses(partition)
        for stream, move in moves.items():
            ends = max(tick.ends for tick in way if stream in self.moves(partition, [tick.ends]))
            if stream in self.gaps and self.gaps[stream][1].tick < ends:
                del self.gaps[stream]
            before = self.streams.pop(stream, None)
            self.anew.discard(stream)
            if move.known is not None:
                accepted = stream in self.gaps and before and before[1].known and before[1].known.fork_accepted
                kept = replace(move, known=replace(move.known, fork_accepted=True)) if accepted else move
                self.streams[stream] = (partition, kept)
                old = before[1].known.cookie if before and before[1].known else None
                if old != move.known.cookie:
                    self.writes.append((stream, move.known.cookie.minipool_gen))
        last = way[-1]
        forgot = way[0].root or any(move.forgotten for move in moves.values())
        self.partitions[partition] = replace(
            state,
            confirmed=to,
            touched=last.touched,
            choice=last.choice,
            forgot_us=next(_numbers) if forgot else state.forgot_us,
        )
        ticks = self.all_ticks[partition].items()
        self.all_ticks[partition] = {ends: made for ends, made in ticks if made[0].starts >= to}

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        state = self.state(partition)
        if state.confirmed > tick:
            self.all_ticks.setdefault(partition, {}).setdefault(tick, (Tick(tick, tick, 0), []))
            return
        self._keep_as_witnesses(partition)
        self.all_ticks.pop(partition, None)
        last = max(state.last_tick, tick)  # a number is given out once
        self.partitions[partition] = replace(state, confirmed=tick, last_tick=last, touched=0, forgot_us=now_us)

    def _keep_as_witnesses(self, partition: int) -> None:
        for stream, (at, move) in self.streams.items():
            if at == partition:
                self.anew.add(stream)
                self.streams[stream] = (at, replace(move, more=False))

    def stale(self, partition: int) -> dict[str, Stale]:
        mine = [(stream, gap) for stream, (at, gap) in self.gaps.items() if at == partition]
        now = self.clock()
        return {s: replace(gap, due=not self.patient, lasted_s=now - self.since[s]) for s, gap in mine}

    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        tick = self.state(partition).last_tick
        gap = Stale(block, reason, due=True, tick=tick, mark=next(_numbers))
        if stream not in self.gaps or self.gaps[stream][1].unreadable != gap.unreadable:
            self.since[stream] = self.clock()
        self.gaps[stream] = (partition, gap)

    def unmark_stale(self, stream: str, seen: Stale) -> None:
        if stream in self.gaps and self.gaps[stream][1].mark == seen.mark:
            del self.gaps[stream]

    def accept_fork(self, partition: int, stream: str) -> None:
        if stream not in self.gaps:
            raise NotFoundError(f"stream {stream} is not stale")
        self.mark_stale(partition, stream, 0, self.gaps[stream][1].reason)
        at, move = self.streams.get(stream, (partition, Move("", None)))
        if move.known is not None:
            self.streams[stream] = (at, replace(move, known=replace(move.known, fork_accepted=True)))

    def known_nodes(self, partitions: int) -> frozenset[str]:
        return frozenset(self.nodes)

    def remember_nodes(self, partitions: int, nodes: Sequence[str]) -> None:
        self.nodes |= set(nodes)

    def forget(self, partition: int, older_s: float, chosen: Callable[[str, str], bool], now_us: int) -> int:
        gone = [s for s, (at, move) in self.streams.items() if at == partition and not chosen(s, move.kind)]
        for stream in gone:
            del self.streams[stream]
        if gone:
            self.partitions[partition] = replace(self.partitions[partition], forgot_us=now_us)
        return len(gone)
