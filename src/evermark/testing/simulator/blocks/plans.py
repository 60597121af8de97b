"""`Plans` in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from evermark.errors import NotFoundError
from evermark.sources.blocks.plan import Item, Move, Tick, path
from evermark.sources.blocks.plans import Stale, Standing

_numbers = itertools.count(2**40)


class MemoryPlans:
    """`Plans`, kept by nobody. Stale streams are due whenever `patient` is not set."""

    def __init__(self) -> None:
        self.partitions: dict[int, Standing] = {}
        self.all_ticks: dict[int, dict[int, tuple[Tick, list[Item]]]] = {}
        self.streams: dict[str, tuple[int, Move]] = {}
        self.gaps: dict[str, tuple[int, int, str]] = {}
        self.nodes: set[str] = set()
        self.patient = False
        self.writes: list[tuple[str, int]] = []  # of sync state: stream, generation

    def close(self) -> None:
        pass

    def standing(self, partition: int) -> Standing:
        return self.partitions.get(partition, Standing())

    def begin(self, partition: int, cold_before: int) -> None:
        self.partitions.setdefault(partition, Standing(cold_before=cold_before))

    def ticks(self, partition: int) -> list[Tick]:
        return [tick for tick, _ in self.all_ticks.get(partition, {}).values()]

    def items(self, partition: int, ends: int) -> list[Item]:
        return list(self.all_ticks[partition][ends][1])

    def moves(self, partition: int, ends: Sequence[int]) -> dict[str, Move]:
        items = [item for end in sorted(ends) for item in self.all_ticks[partition][end][1]]
        return {item.stream: item.move for item in items if item.move is not None}

    def known(self, streams: Sequence[str]) -> dict[str, Move]:
        return {stream: self.streams[stream][1] for stream in streams if stream in self.streams}

    def unfinished(self, partition: int) -> list[str]:
        return [stream for stream, (at, move) in self.streams.items() if move.more and at == partition]

    def repeats(self, partition: int, starts: int) -> bool:
        found = [items for tick, items in self.all_ticks.get(partition, {}).values() if tick.starts == starts]
        return any(item.repeats for items in found for item in items)

    def add(self, partition: int, tick: Tick, items: Sequence[Item]) -> int:
        standing = self.partitions[partition]
        ends = max(standing.last_tick, tick.starts) + 1
        self.partitions[partition] = replace(standing, last_tick=ends)
        self.all_ticks.setdefault(partition, {})[ends] = (replace(tick, ends=ends), list(items))
        return ends

    def looked(self, partition: int, confirmed: int, touched: int, wanted: str) -> None:
        standing = self.partitions[partition]
        if standing.confirmed == confirmed:
            self.partitions[partition] = replace(standing, touched=touched, wanted=wanted)

    def void(self, partition: int, starts: int) -> None:
        for ends, (tick, items) in self.all_ticks.get(partition, {}).items():
            if tick.starts >= starts:
                self.all_ticks[partition][ends] = (replace(tick, void=True), items)

    def confirm(self, partition: int, to: int) -> None:
        standing = self.standing(partition)
        if to <= standing.confirmed:
            return
        way = path(self.ticks(partition), standing.confirmed, to)
        moves = self.moves(partition, [tick.ends for tick in way])
        for stream, move in moves.items():
            self.gaps.pop(stream, None)
            before = self.streams.pop(stream, None)
            if move.known is not None:
                self.streams[stream] = (partition, move)
                old = before[1].known.cookie if before and before[1].known else None
                if old != move.known.cookie:
                    self.writes.append((stream, move.known.cookie.minipool_gen))
        last = way[-1]
        forgot = any(move.forgotten for move in moves.values())
        self.partitions[partition] = replace(
            standing,
            confirmed=to,
            touched=last.touched,
            wanted=last.wanted,
            forgot_us=next(_numbers) if forgot else standing.forgot_us,
        )
        kept = self.all_ticks[partition].items()
        self.all_ticks[partition] = {ends: made for ends, made in kept if made[0].starts >= to}

    def adopt(self, partition: int, tick: int, now_us: int) -> None:
        self.streams = {stream: it for stream, it in self.streams.items() if it[0] != partition}
        self.all_ticks.pop(partition, None)
        self.partitions[partition] = Standing(confirmed=tick, last_tick=tick, forgot_us=now_us)

    def stale(self, partition: int) -> dict[str, Stale]:
        mine = [(stream, gap) for stream, gap in self.gaps.items() if gap[0] == partition]
        return {stream: Stale(block, reason, not self.patient) for stream, (_, block, reason) in mine}

    def mark_stale(self, partition: int, stream: str, block: int, reason: str) -> None:
        self.gaps[stream] = (partition, block, reason)

    def unmark_stale(self, stream: str) -> None:
        self.gaps.pop(stream, None)

    def accept_fork(self, partition: int, stream: str) -> None:
        if stream not in self.gaps:
            raise NotFoundError(f"stream {stream} is not stale")
        self.gaps[stream] = (partition, 0, self.gaps[stream][2])
        at, move = self.streams[stream]
        if move.known is not None:
            self.streams[stream] = (at, replace(move, known=replace(move.known, fork_accepted=True)))

    def family(self, partitions: int) -> frozenset[str]:
        return frozenset(self.nodes)

    def learn(self, partitions: int, nodes: Sequence[str]) -> None:
        self.nodes |= set(nodes)

    def forget(self, partition: int, older_s: float, wanted: Callable[[str, str], bool], now_us: int) -> int:
        gone = [s for s, (at, move) in self.streams.items() if at == partition and not wanted(s, move.kind)]
        for stream in gone:
            del self.streams[stream]
        if gone:
            self.partitions[partition] = replace(self.partitions[partition], forgot_us=now_us)
        return len(gone)
