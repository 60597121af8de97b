"""The changes of a MongoDB deployment as a source: its documents share the partitions by a hash of their keys.

Where a checkpoint stands, the oplog must still reach: a server that says it does not is a gap. Nothing is installed at
the server, and nothing has to be confirmed there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa

from evermark.errors import EvermarkError, GapError, IdentityError, SetupError
from evermark.event import Seen
from evermark.sources.base import Condition, Feed, Limit, Repair, Slice, Source, Untaken, Warned
from evermark.sources.copies import Copying, CopyPlace
from evermark.sources.mongo.changes import AWAIT_MS, Change, Changes, require_sound
from evermark.sources.mongo.connect import RECOVER_HINT, Client, open_client, translated, where
from evermark.sources.mongo.copied import ReadHorizon, Standing, with_chunks
from evermark.sources.mongo.copying import DocumentsCopying
from evermark.sources.mongo.deployment import Deployment, look_at, oplog_span
from evermark.sources.mongo.events import Row, batched, event_id, partition_of, time_of_event
from evermark.sources.mongo.feed import SharedFeed
from evermark.sources.mongo.pace import Pace, cuts
from evermark.sources.mongo.positions import COPIED, Position, partitions_in
from evermark.sources.mongo.repair import DocumentsRepair
from evermark.sources.mongo.target import MongoTarget

# Rows that one batch may have when the source is asked: `latest` looks at each of them.
_ASKED_ROWS_MAX = 200_000
# Changes that `untaken` looks at: it is asked every few seconds.
_LOOKED_AT_MAX = 1000
_BRIEF_MS = 20
_BEHIND_SHARE = 0.5
_CHUNKS = "chunks"


class MongoChanges(Source):
    """Picklable: its target travels, connections do not. `copies`: where copies are kept; without it none are made."""

    def __init__(self, target: MongoTarget, copies: CopyPlace | None = None) -> None:
        self.target, self._copies = target, copies
        self._horizon = ReadHorizon(copies, self.partitions()) if copies is not None else None
        self._place = where(target.url.open())
        self._opening = threading.Lock()
        self._opened: Client | None = None
        self._shared: SharedFeed | None = None
        self._confirmed: dict[int, str] = {}
        self._began: dict[int, str] = {}
        self._pace = Pace()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.target, self._copies)

    @property
    def client(self) -> Client:
        with self._opening:  # reading and looking are two threads
            if self._opened is None:
                self._opened = open_client(self.target.url)
            return self._opened

    def partitions(self) -> Sequence[int]:
        return list(range(self.target.partitions))

    def earliest(self, partition: int) -> str:
        if self.target.oldest:
            with translated(self._place, "looking for the oldest change (reading local.oplog.rs)"):
                return self._text(Position(oplog_span(self.client)[0]))
        return self._text(Position(self._look().time, COPIED))

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        now = self._look()
        for partition, text in resume.items():
            self._require_same_partitions(text)
            if Position.parse(text).time > now.time + 1:
                raise _blamed(
                    partition,
                    IdentityError(
                        f"MongoDB at {self._place} is behind its checkpoint: it is not the deployment we left, or was"
                        " restored from a backup",
                        hint=RECOVER_HINT,
                    ),
                )
        # At a first start, too, it is found out whether changes may be read at all.
        self._require_history(resume or {0: self._text(Position(now.time + 1))})
        for partition, seen in (newest or {}).items():
            if partition in resume:
                self._require_event(partition, seen)

    def require_whole(self, partition: int, start: str, end: str, newest: Mapping[int, Seen]) -> None:
        """A stream that does not reach back fails when it is opened. What the oplog has forgotten since is no gap."""
        try:
            self.check({partition: end}, newest)
        except IdentityError:
            raise
        except GapError:
            pass  # of what comes next: reading says so

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        """Changes are looked at without their documents: how many there are, and where the last of them ends."""
        if not after:
            return {}
        deadline = time.monotonic() + limit.wait_s
        starts = _parsed(after)
        if (far := self._far_from(min(starts.values()))) is not None:
            cut, _ = self._cut(min(after.values()), self._text(far), far.time - 1)
            return {partition: max(each, cut) for partition, each in after.items()}
        first = end = None
        rows = size = 0
        with self._thin(after, min(AWAIT_MS, max(_BRIEF_MS, int(limit.wait_s * 1000)))) as changes:
            while True:
                change = changes.next()
                if change is not None:
                    mine = self._partitions_of(change, starts)
                    first = change.position if mine and first is None else first
                    end, rows, size = change.end, rows + len(mine), size + (change.event.get("size") or 0)
                is_whole = first is not None and changes.whole_to > first
                is_full = rows >= min(limit.rows_max, _ASKED_ROWS_MAX) or size >= limit.bytes_max
                if (is_whole and (is_full or change is None)) or (change is None and time.monotonic() >= deadline):
                    break
            whole_to = changes.whole_to
        start = upto = min(starts.values())
        closed = whole_to.closed  # where nothing changes, chunks of copies may stand
        if is_whole and end is not None:
            upto = min(end, whole_to)
            closed = upto.closed
        cut, _ = self._cut(self._text(start), self._text(upto), closed)
        # A partition without changes goes on with the others: else the next look would begin where this one began.
        return {partition: max(each, cut) for partition, each in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        if start >= end:
            return []
        chunks = self._horizon.standing(start, end) if self._horizon is not None else []
        edges = [start, *map(self._text, cuts(Position.parse(start), Position.parse(end))), end]
        found = []
        for first, last in pairwise(edges):
            mine = [chunk for chunk in chunks if first <= chunk.position < last]
            found.append(Slice(partition, first, last, {_CHUNKS: json.dumps(mine)} if mine else {}))
        return found

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        chunks = [Standing(*each) for each in json.loads(piece.detail.get(_CHUNKS, "[]"))]
        return self._merged(self._rows(piece), chunks, piece.partition)

    def begin(self, partition: int, position: str) -> None:
        self._began[partition] = position
        if self._horizon is not None:
            self._horizon.begin(partition, position)

    def may_repeat_from(self, partition: int, position: str) -> str:
        """Ordinals count the changes of chosen collections. Where reading began the choice may have been another one:
        changes of that cluster time that the log has may stand at later ordinals now; not if all of it was read."""
        began, at = self._began.get(partition), Position.parse(position)
        if began is None or Position.parse(began).time != at.time or at.closed == at.time:
            return position
        return self._text(Position(at.time))

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed:
        if self._shared is None or not self._shared.joinable:
            self._shared = SharedFeed(self.target, self._changes, self._cut, self._merged, self._has_much)
        return self._shared.join(partition, Position.parse(position), wake, lambda end: self.confirm(partition, end))

    def confirm(self, partition: int, end: str) -> None:
        """The oplog forgets by itself; how far we are is only remembered, to be compared with it."""
        self._confirmed[partition] = end

    def repair(self, partition: int) -> Repair:
        return DocumentsRepair(self.target, partition)

    def copying(self) -> Copying | None:
        if self._copies is None:
            return None
        if self._horizon is not None:
            self._horizon.close()
        self._horizon = ReadHorizon(self._copies, self.partitions())
        return DocumentsCopying(self.target, self._copies, self._horizon)

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        found: dict[int, Untaken] = {}
        # Changes of a partition that is far behind may be all that a look comes to: the next begins behind it.
        while rest := {partition: at for partition, at in after.items() if partition not in found}:
            some, has_seen_all = self._waiting(rest)
            found |= some
            if has_seen_all or not some:
                break
        return found

    def _waiting(self, after: Mapping[int, str]) -> tuple[dict[int, Untaken], bool]:
        """What waits among the next changes, and whether those were all there are."""
        found: dict[int, Untaken] = {}
        starts = _parsed(after)
        with self._thin(after, _BRIEF_MS) as changes:
            for _ in range(_LOOKED_AT_MAX):
                change = changes.next()
                if change is None:
                    return found, True
                waits_s = max(0.0, time.time() - change.position.seconds)
                for partition in self._partitions_of(change, starts):
                    found.setdefault(partition, Untaken(self._text(change.end), waits_s))
                if len(found) == len(starts):
                    break
        return found, False

    def condition(self) -> Condition:
        """How much of the oplog's span lies between us and its newest change."""
        try:
            with translated(self._place, "looking at the oplog"):
                first, last = (each >> 32 for each in oplog_span(self.client))
        except EvermarkError:
            return Condition()  # the user of the url may not read it; `doctor` says so
        gauges = {"oplog_span_s": float(last - first)}
        if self._confirmed:
            behind = max(0, last - min(Position.parse(end).seconds for end in self._confirmed.values()))
            gauges["oplog_behind_s"] = float(behind)
            if behind > 60 and behind > _BEHIND_SHARE * (last - first):
                said = f"reading is {behind} s behind, and the oplog reaches back only {last - first} s"
                return Condition(gauges, {"oplog_behind_s": Warned(said, "replSetResizeOplog makes the oplog larger")})
        return Condition(gauges)

    def close(self) -> None:
        with self._opening:
            client, self._opened = self._opened, None
        if client is not None:
            client.close()
        if self._horizon is not None:
            self._horizon.close()

    def _text(self, position: Position) -> str:
        return position.text(self.target.partitions)

    def _require_same_partitions(self, text: str) -> None:
        """Documents that move to a partition without a checkpoint would lose what it has not read."""
        was = partitions_in(text)
        if was != self.target.partitions:
            raise SetupError(
                f"`partitions` was {was} when this source was read last, and is {self.target.partitions} now",
                hint=f"say `partitions: {was}` again; for another number give the source another name: it begins anew",
            )

    def _look(self) -> Deployment:
        with translated(self._place, "asking who answers"):
            return look_at(self.client, self._place)

    def _cut(self, start: str, upto: str, closed: int) -> tuple[str, list[Standing]]:
        return self._horizon.cut(start, upto, closed) if self._horizon is not None else (max(start, upto), [])

    def _merged(self, rows: Iterator[Row], chunks: Sequence[Standing], partition: int) -> Iterator[pa.RecordBatch]:
        if self._copies is None or not chunks:
            return batched(rows)
        return with_chunks(rows, chunks, partition, self._copies.folder, self.target)

    def _changes(self, start: Position) -> Changes:
        return Changes(self.client, self._place, self.target, start)

    @contextmanager
    def _thin(self, after: Mapping[int, str], await_ms: int) -> Iterator[Changes]:
        """Changes without their documents, from the least of these positions on."""
        start = min(_parsed(after).values())
        try:
            with Changes(self.client, self._place, self.target, start, thin=True, await_ms=await_ms) as changes:
                yield changes
        except GapError:
            self._require_history(after)  # says of which partition it is
            raise

    def _require_history(self, after: Mapping[int, str]) -> None:
        for partition, start in sorted(_parsed(after).items(), key=lambda each: each[1]):
            # Where reading opens its stream: the first change there will do, and the server's first answer has it,
            # while those before the ordinal may be a million of a transaction.
            at = Position(start.opened_at)
            try:
                with Changes(self.client, self._place, self.target, at, thin=True, await_ms=_BRIEF_MS) as changes:
                    changes.next()
            except GapError as error:
                error.partition = partition
                raise

    def _require_event(self, partition: int, seen: Seen) -> None:
        """A deployment that was restored and has gone on differently lacks the last event that we took."""
        at = time_of_event(seen.event_id)
        if at is None:
            return
        # A major upgrade of the server may change the form of tokens, which the id was made of.
        if self._has_event(at, seen.event_id) or self._has_event_of_old(at, seen.event_id):
            return
        raise _blamed(
            partition,
            IdentityError(
                f"MongoDB at {self._place} does not have the last change that was taken: it is another deployment, or"
                " was restored and has gone on differently",
                hint=RECOVER_HINT,
            ),
        )

    def _has_event_of_old(self, at: int, id_: str) -> bool:
        try:
            return self._has_event(at, id_, old_tokens=True)
        except EvermarkError as error:
            if type(error) is EvermarkError:  # it does not know, or not allow, the question
                return False
            raise

    def _has_event(self, at: int, id_: str, *, old_tokens: bool = False) -> bool:
        # The event's collection may be one that is not chosen any more.
        everything, heard_at = replace(self.target, collections=()), time.monotonic()
        given: dict[str, Any] = {"thin": True, "await_ms": _BRIEF_MS, "old_tokens": old_tokens}
        try:
            with Changes(self.client, self._place, everything, Position(at), **given) as changes:
                while changes.whole_to.time <= at:
                    change = changes.next()
                    if change is None and changes.whole_to > Position(at):
                        break
                    require_sound(self._place, heard_at, change)
                    if change is None:
                        continue
                    heard_at = time.monotonic()
                    if change.position.time != at:
                        continue
                    if id_ in {event_id(at, change.token), event_id(at, f"{change.token} to")}:
                        return True
        except GapError:
            return True  # the oplog does not reach back so far: whether it reaches back to the checkpoint was looked at
        return False

    def _behind_s(self, at: Position) -> int:
        return (self._look().time >> 32) - at.seconds

    def _has_much(self, at: Position) -> bool:
        """A feed is full here: whether the rest is better read by tasks."""
        if self._behind_s(at) < self.target.far_s:
            return False
        self._pace.begin()
        return True

    def _far_from(self, start: Position) -> Position | None:
        """How far to read from a place that is far behind, by time alone: to look at all changes on the way, only to
        count them, would take as long as reading them does. None: it is not far."""
        span_s = self._pace.span_s(start.seconds, time.monotonic())
        behind_s = self._behind_s(start) if span_s is not None else 0
        if span_s is None or behind_s < self.target.far_s:
            return None
        return Position(start.seconds + min(span_s, behind_s) << 32)

    def _partitions_of(self, change: Change, starts: Mapping[int, Position]) -> set[int]:
        """The partitions that an event has rows in and that have not taken it."""
        rows = change.rows(self.target)
        found = {partition_of(row, self.target.partitions) for row in rows}
        return {partition for partition in found if partition in starts and change.position >= starts[partition]}

    def _rows(self, piece: Slice) -> Iterator[Row]:
        end, heard_at = Position.parse(piece.end), time.monotonic()
        with self._changes(Position.parse(piece.start)) as changes:
            while (seen_to := changes.whole_to) < end and seen_to.closed < end.time:
                change = changes.next()
                if change is None and changes.whole_to == seen_to:
                    require_sound(self._place, heard_at, None)
                    continue
                heard_at = time.monotonic()
                if change is None:
                    continue
                if change.position >= end:
                    return
                yield from (
                    row
                    for row in change.rows(self.target)
                    if partition_of(row, self.target.partitions) == piece.partition
                )
                if change.end >= end:
                    return


def _parsed(positions: Mapping[int, str]) -> dict[int, Position]:
    return {partition: Position.parse(text) for partition, text in positions.items()}


def _blamed(partition: int, error: EvermarkError) -> EvermarkError:
    error.partition = partition
    return error
