"""A source of made-up transactions that keeps the contract of `evermark.sources.base`, and the log's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import pyarrow as pa

from evermark.delivery.model import HeldKey, SourcePartition
from evermark.delivery.replay.timeslice import moment_at
from evermark.errors import GapError
from evermark.event import TIMESTAMP, Op, taken_batch
from evermark.log.base import Append, LogFile
from evermark.log.memory import MemoryLog
from evermark.log.read import FileRange
from evermark.sources.base import Limit, Slice, Source


@dataclass(frozen=True)
class About:
    """What an event has to do with a bot."""

    kind: str = "message"  # or join, leave: of the bot's user
    session: str = ""  # whose key it needs
    member: bool = False  # whether the bot is to get it: made while its user was a member, or about that
    asks: str = ""  # of a control event: its payload


@dataclass(frozen=True)
class Made:
    """One event at the source. `again`: its id stood at an earlier position already."""

    event_id: str
    position: str
    stream: str
    key: str
    op: str
    made_at: float
    again: bool = False
    about: About = About()
    previous_key: str | None = None


@dataclass(frozen=True)
class Row:
    """One event in the log."""

    event_id: str
    place: SourcePartition
    batch: int
    position: str
    stream: str
    key: str
    op: str
    made_at: float
    about: About = About()
    previous_key: str | None = None

    @property
    def keys(self) -> tuple[HeldKey, ...]:
        """An event that changed its record's key is one of both."""
        both = (self.key, self.previous_key)
        return tuple((self.place, self.stream, key) for key in both if key is not None)

    @property
    def made_us(self) -> int:
        return round(self.made_at * 1e6)


def position(number: int) -> str:
    return f"{number:08d}"


@dataclass
class SimSource(Source):
    """Transactions appear over time and are read whole. What was confirmed is forgotten. `others`: up to where each
    partition is known to have nothing more of ours, because others have written since.
    """

    name: str
    made: dict[int, list[list[Made]]]
    repeat_reach: int
    sends: Limit | None = None  # how much at a time it sends by itself; None: it is asked
    confirmed: dict[int, str] = field(default_factory=dict)
    asked: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # per stream, the replay its row shows
    from_now: bool = False  # whether it begins with what is new, and not with the oldest that it has
    others: dict[int, str] = field(default_factory=dict)

    def partitions(self) -> Sequence[int]:
        return sorted(self.made)

    def earliest(self, partition: int) -> str:
        if self.from_now:
            return self._latest(partition, position(0), Limit())
        return self.confirmed.get(partition, position(0))

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        return {partition: self._latest(partition, start, limit) for partition, start in after.items()}

    def _latest(self, partition: int, start: str, limit: Limit) -> str:
        end, rows = start, 0
        for transaction in self.made[partition]:
            if transaction[0].position < start:
                continue
            if rows and rows + len(transaction) > limit.rows_max:
                return end
            rows += len(transaction)
            end = position(int(transaction[-1].position) + 1)
        return max(end, self.others.get(partition, end))

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        cut = [t[0].position for t in self.made[partition] if start < t[0].position < end]
        if self.repeat_reach or not cut:
            return [Slice(partition, start, end)]
        middle = cut[len(cut) // 2]
        return [Slice(partition, start, middle), Slice(partition, middle, end)]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        if piece.start < self.confirmed.get(piece.partition, ""):
            raise GapError(f"{self.name}/{piece.partition} has forgotten what stood at {piece.start}")
        rows: dict[str, Made] = {}
        for transaction in self.made[piece.partition]:
            if piece.start <= transaction[0].position < piece.end:
                for made in transaction:
                    rows.setdefault(made.event_id, made)  # not twice within one reading
        columns: dict[str, object] = {
            "event_id": [m.event_id for m in rows.values()],
            "position": [m.position for m in rows.values()],
            "stream": [m.stream for m in rows.values()],
            "key": [m.key for m in rows.values()],
            "op": [m.op for m in rows.values()],
            "event_time": [int(m.made_at * 1e6) for m in rows.values()],
            "payload": [json.dumps(asdict(m.about)) for m in rows.values()],
            "previous_key": [m.previous_key for m in rows.values()],
        }
        yield taken_batch(columns, len(rows))

    def may_repeat_from(self, partition: int, at: str) -> str:
        return position(max(0, int(at) - self.repeat_reach)) if self.repeat_reach else at

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> SimFeed | None:
        return SimFeed(self, partition, position) if self.sends is not None else None

    def confirm(self, partition: int, end: str) -> None:
        self.confirmed[partition] = max(end, self.confirmed.get(partition, end))

    def replayed(self, stream: str, since: str, until: str | None) -> None:
        if self.asked.get(stream) == (since, until):
            del self.asked[stream]


@dataclass(frozen=True)
class SimFed:
    rows: Sequence[pa.RecordBatch]
    to: str

    def batches(self) -> Iterator[pa.RecordBatch]:
        return iter(self.rows)

    def end(self) -> str:
        return self.to


@dataclass
class SimFeed:
    """Transactions of a partition, as they appear. What was sent once is not sent again, also if nobody heard it."""

    source: SimSource
    partition: int
    at: str

    def next(self) -> SimFed | None:
        assert self.source.sends is not None
        start, end = self.at, self.source.latest({self.partition: self.at}, self.source.sends)[self.partition]
        if end == start:
            return None
        self.at = end
        return SimFed(list(self.source.read(Slice(self.partition, start, end))), end)

    def confirm(self, end: str) -> None:
        self.source.confirm(self.partition, end)

    def close(self) -> None: ...


class SimLog(MemoryLog):
    """`MemoryLog` with the contents of its files, and compaction, so that readers meet what they meet in production."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.contents: dict[str, list[Row]] = {}
        self._compacted: list[tuple[int, FileRange]] = []  # (how many commits it stands for, the file)

    def write(self, partition: int, batch: int, rows: list[Row]) -> LogFile | None:
        if not rows:
            return None
        path = f"{self.source}-p{partition}-b{batch}-{len(self.contents)}"
        self.contents[path] = rows
        return LogFile(path, len(rows), 1)

    def rows_of(self, append: Append) -> list[Row]:
        return [row for file in append.files for row in self.contents[file.path]]

    def durable_commits(self) -> int:
        return self._durable[0]

    def durable_batch(self, partition: int) -> int:
        tail = self._durable[1].get(partition)
        return tail.batch if tail else 0

    def ids_from(self, partition: int, at: str) -> set[str]:
        return {
            row.event_id
            for append in self.commits
            if append.partition == partition
            for row in self.rows_of(append)
            if row.position >= at
        }

    def position_max(self, partition: int) -> str | None:
        return max(
            (r.position for a in self.commits if a.partition == partition for r in self.rows_of(a)), default=None
        )

    def controls(self, partition: int, after_batch: int, to_batch: int) -> pa.Table:
        mine = [a for a in self.commits if a.partition == partition and after_batch < a.batch <= to_batch]
        found = [row for append in mine for row in self.rows_of(append) if row.op == Op.CONTROL]
        return pa.table(
            {
                "event_id": [row.event_id for row in found],
                "partition": [row.place.partition for row in found],
                "batch": [row.batch for row in found],
                "position": [row.position for row in found],
                "stream": [row.stream for row in found],
                "event_time": pa.array([row.made_us for row in found], TIMESTAMP),
                "payload": [row.about.asks for row in found],
            }
        )

    def files(self) -> list[FileRange]:
        done = sum(count for count, _ in self._compacted)
        fresh = [
            self._range(f.path, (a.partition, a.partition), (a.batch, a.batch))
            for a in self.commits[done:]
            for f in a.files
        ]
        return [file for _, file in self._compacted] + fresh

    def compact(self, commits_max: int) -> None:
        """The oldest durable commits not yet compacted become one file; the old ones stay readable."""
        done = sum(count for count, _ in self._compacted)
        old = self.commits[done : min(done + commits_max, self.durable_commits())]
        if len(old) < 2:
            return
        path = f"{self.source}-compacted-{len(self.contents)}"
        self.contents[path] = [row for append in old for row in self.rows_of(append)]
        partitions, batches = [a.partition for a in old], [a.batch for a in old]
        whole = self._range(path, (min(partitions), max(partitions)), (min(batches), max(batches)))
        self._compacted.append((len(old), whole))

    def _range(self, path: str, partitions: tuple[int, int], batches: tuple[int, int]) -> FileRange:
        rows = self.contents[path]
        times = [moment_at(row.made_us) for row in rows]
        oldest, newest = min(times, default=None), max(times, default=None)
        return FileRange(path, *partitions, *batches, len(rows), 1, newest, event_time_min=oldest, timeless=0)
