"""Posting the rows of assignments: found in files of the log, read, rendered, signed and sent, and the result of each
subscription and batch. The work of a Spark task, or of the lane itself.

Rows are matched here. Where Spark has to match a predicate, the addresses (file, row number) of the matched rows are
given instead; of few rows, the rows themselves (`matched_here.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.ahead import ahead
from evermark.delivery.bots.forward import forwarded, waiting
from evermark.delivery.decide.expiry import with_expired, without_expired
from evermark.delivery.decide.key_parts import part_numbers
from evermark.delivery.decide.matching import expanded, wanted_by
from evermark.delivery.model import Fate, HeldKey, Outcome, ParkedEvent, SourcePartition, SubscriptionSpec
from evermark.delivery.sinks import Sinks
from evermark.delivery.webhook.base import Job, Line
from evermark.delivery.webhook.bundles import prepared
from evermark.delivery.webhook.parked_json import texts_of
from evermark.delivery.webhook.rendered_once import SharedBodies
from evermark.delivery.work import Assignment, DeliveryOptions, KeyPart, Result, Span
from evermark.log.row_reader import COLUMNS, I64, ROWS, RowReader, require_codes
from evermark.log.span import RowAddresses, row_addresses
from evermark.predicate.matcher import PAYLOAD_BYTES_MAX
from evermark.predicate.vectors import WORK_MAX
from evermark.secrets import SecretBox

# A span without a budget still ends: events not sent by then are left for the next round.
_NO_BUDGET_S = 3600.0
# Of a budget of a reader that is behind, so much is left for sending, however long finding its rows took.
SENDING_S_MIN = 2.0
_FEW, _OWN_S_PER_JOB = 32, 0.003
# How much is sent at a time.
_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 64 * 1024 * 1024
_CHUNK_MATCHES = 1_000_000
# How many rows are tested at a time: more are quicker, but all of them may be wanted by everybody.
_TESTED_ROWS_MIN, _TESTED_ROWS_MAX, _TESTED_MATCHES = 500, 10_000, 3_000_000
_TESTED_BYTES = PAYLOAD_BYTES_MAX // 2
# A task may take longer for them than a lane.
_TESTED_WORK_MAX = 4 * WORK_MAX
# So many pairs of a row and a subscription are known before the first is sent.
_KNOWN_MATCHES_MAX = 20_000_000
_KEPT_BYTES_MAX = 64 * 1024 * 1024
_NO_PAIRS = np.empty(0, np.int64), np.empty(0, np.int64)
# Rows that several subscriptions want are rendered once, all together, unless they are larger than this.
_SHARED_BYTES_MAX = 16 * 1024 * 1024

# File code, row number and number of the assignment, for each row that an assignment wants.
Addresses = tuple[I64, I64, I64]
# A piece of work of a task: rows of the log, and per (row, subscription that wants it) the row's index and the
# subscription's number, by row.
MatchedRows = tuple[pa.RecordBatch, I64, I64]
# Per subscription and batch: positions of rows that are too old to be sent.
Late = dict[str, dict[int, pa.Array]]


@dataclass
class _SoFar:
    """The state of a task's subscriptions after the pieces it has sent."""

    held: dict[str, Counter[HeldKey]]
    room: dict[str, int]  # how many more may be parked, where that is known
    stopped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Posting:
    """Picklable, secrets sealed."""

    assignments: tuple[Assignment, ...]
    box: SecretBox
    options: DeliveryOptions
    # Entered while it sends, in a process that may not know of the rates.
    share_rates: Callable[[], AbstractContextManager[None]] = nullcontext

    def results(
        self,
        addresses: Iterable[Addresses] | None = None,
        *,
        found: Iterable[MatchedRows] | None = None,
        in_doubt: set[str] | None = None,
    ) -> Iterator[list[Result]]:
        """Results, piece by piece. `addresses`: of the rows that are wanted; `found`: the rows themselves; None: found
        here. The budget begins with the first step: waiting for addresses counts, but not all of it (`SENDING_S_MIN`).

        `in_doubt` gets the names of subscriptions that were sent nothing, because Spark has to match their first rows.
        """
        with self.share_rates():
            yield from self._results(addresses, found, set() if in_doubt is None else in_doubt)

    def _results(
        self, addresses: Iterable[Addresses] | None, found: Iterable[MatchedRows] | None, in_doubt: set[str]
    ) -> Iterator[list[Result]]:
        budget_s = _NO_BUDGET_S if self.options.budget_s is None else self.options.budget_s
        deadline = time.monotonic() + budget_s
        held = {name: Counter(keys) for name, keys in self.options.held.items()}
        room = {one.spec.name: one.parked_room for one in self.assignments if one.parked_room is not None}
        so_far = _SoFar(held, room)
        own_s = 0.0
        cuts: list[Result] = []
        pieces: Iterator[tuple[list[Job], Late]]
        if found is not None:
            pieces = map(self._jobs, found)
        elif addresses is None and all(_is_named_at_hand(one) for one in self.assignments):
            pieces = map(self._jobs, self._at_hand())
        else:
            read_ahead = map(self._jobs, self.wanted(cuts, in_doubt, addresses))
            pieces = ahead(read_ahead, depth=1, low_priority=self.options.historical)
        for number, (jobs, late) in enumerate(pieces):
            if not number and self.options.historical:
                # Else a reader whose rows are hard to find would never get any.
                deadline = max(deadline, time.monotonic() + min(budget_s, SENDING_S_MIN))
            # Of thousands each waits for its turn in this process: no fault of its receiver.
            own_s = max(own_s, _OWN_S_PER_JOB * (len(jobs) - _FEW))
            rows = list(self._send(jobs, late, so_far, max(0.0, deadline + own_s - time.monotonic())))
            if rows:
                yield rows
            if len(so_far.stopped) == len(self.assignments):
                return
        if cuts:
            yield cuts

    def wanted(
        self, cuts: list[Result], in_doubt: set[str], addresses: Iterable[Addresses] | None = None
    ) -> Iterator[MatchedRows]:
        """The rows that are wanted. `cuts` gets how far those go that have to end before the span does."""
        places = self._found_here(cuts, in_doubt) if addresses is None else addresses
        return read(paths_of(self.assignments), gathered(places))

    def _found_here(self, cuts: list[Result], in_doubt: set[str]) -> Iterator[Addresses]:
        require_codes(paths_of(self.assignments))
        for span, numbers in by_span(self.assignments):
            where = (span.paths, span.place.partition, span.after, span.to)
            parts = [n for n in numbers if self.assignments[n].part is not None]
            specs = {n: self.assignments[n].spec for n in numbers}
            named = [n for n in numbers if not specs[n].where]
            tested = {n: spec for n, spec in specs.items() if spec.where}
            found = row_addresses(*where, exact=span.exact, through=span.begun.through, keys=bool(parts))
            of_part = {n: self._of_part(n, found, cuts) for n in parts}
            # Piece by piece: a batch may have millions of rows, and thousands of subscriptions may want each row.
            size = max(1, min(_CHUNK_ROWS, _CHUNK_MATCHES // max(1, len(named))))
            tests = None
            pieces = [(start, start + size) for start in range(0, len(found.codes), size)]
            if tested:
                tests = _Tests(span, found, tested, cuts, in_doubt)
                pieces = tests.pieces(size)
                if not self.options.historical:
                    tests.know(pieces)
            for start, stop in pieces:
                streams, ops = found.streams.slice(start, stop - start), found.ops.slice(start, stop - start)
                rows, of = self._matched(streams, ops, named)
                for number, mine in of_part.items():
                    kept = (of != number) | mine[start + rows]
                    rows, of = rows[kept], of[kept]
                if tests is not None:
                    rows, of = _by_row((rows, of), tests.wanted(start, stop))
                for at in range(0, len(of), _CHUNK_MATCHES):
                    wanted = start + rows[at : at + _CHUNK_MATCHES]
                    yield found.codes[wanted], found.numbers[wanted], of[at : at + _CHUNK_MATCHES]

    def _of_part(self, number: int, found: RowAddresses, cuts: list[Result]) -> npt.NDArray[np.bool_]:
        """Which of these rows are in the part of an assignment."""
        assignment, part = self.assignments[number], cast("KeyPart", self.assignments[number].part)
        mine: npt.NDArray[np.bool_] = part_numbers(found.keys, part.of) == part.number
        rows, _ = self._matched(found.streams, found.ops, [number])
        if part.rows_max is not None and len(rows) > part.rows_max:
            last = int(rows[part.rows_max - 1])
            mine[last + 1 :] = False
            batch, position = found.batches[last].as_py(), found.positions[last].as_py()
            rest = Outcome(assignment.spec.name, Fate.UNFINISHED, reason="the rest is for the next turn")
            cuts.append(Result(assignment.span.place, batch, rest, position))
        return mine

    def _at_hand(self) -> Iterator[MatchedRows]:
        """The same where the rows were just taken: nothing is read."""
        for span, numbers in by_span(self.assignments):
            fresh = pa.table(span.fresh)
            rows, of = self._matched(fresh["stream"], fresh["op"], numbers)
            yield rows_at_hand(span), rows, of

    def _matched(self, streams: pa.ChunkedArray, ops: pa.ChunkedArray, numbers: Sequence[int]) -> tuple[I64, I64]:
        return matched_by_name(streams, ops, self.assignments, numbers) if numbers else _NO_PAIRS

    def _jobs(self, wanted: MatchedRows) -> tuple[list[Job], Late]:
        """The jobs of one piece, rendered while the piece before is sent; and rows that are too old to be sent."""
        jobs: list[Job] = []
        expired: Late = {}
        historical = self.options.historical
        all_rows, _, of = wanted
        several = len(of) > all_rows.num_rows and all_rows.nbytes <= _SHARED_BYTES_MAX
        shared = SharedBodies(all_rows, historical) if several else None
        oldest = pc.min(all_rows.column("ingested_at")).as_py()
        for index, numbers, rows in by_subscription(*wanted):
            assignment = self.assignments[index]
            wanted_rows = rows if assignment.bot is None else forwarded(rows, assignment.bot)
            before = assignment.expires_before
            mine, late = (wanted_rows, None) if before is None else without_expired(wanted_rows, before, oldest)
            if late:
                expired[assignment.spec.name] = late
            if mine.num_rows:
                spec = assignment.spec
                bodies = shared.of(spec, numbers) if shared is not None and mine.num_rows == len(numbers) else None
                jobs.append(
                    Job(
                        spec,
                        mine,
                        self.box.open,
                        historical=historical,
                        probe=assignment.probe,
                        waits={} if assignment.bot is None else waiting(mine, assignment.bot),
                        stopped=frozenset() if assignment.bot is None else assignment.bot.stopped,
                        bodies=bodies,
                    )
                )
        return prepared(jobs), expired

    def _send(self, jobs: Sequence[Job], late: Late, so_far: _SoFar, left_s: float) -> Iterator[Result]:
        """Rows arrive in log order; each chunk is finished before the next, so a subscription's order holds."""
        going = [_going_on(job, so_far) for job in jobs if job.spec.name not in so_far.stopped]
        places = {assignment.spec.name: assignment.span.place for assignment in self.assignments}
        if not self.options.sends:
            yield from _unsent(going, places, late, so_far.stopped)
            going = []
        specs = {job.spec.name: job.spec for job in going}
        for name in late.keys() - specs.keys() - so_far.stopped:
            yield from with_expired(name, places[name], [], late[name])
        began = time.monotonic()
        for results in Sinks().deliver_each(going, left_s, self.options.grace_s, self.options.slack_s):
            took_s = time.monotonic() - began
            name = results[0].subscription
            for result in with_expired(name, places[name], results, late.get(name, {})):
                if result.outcome.fate is not Fate.DONE:
                    so_far.stopped.add(name)
                if result.outcome.parked:
                    so_far.held.setdefault(name, Counter()).update(now_held(specs[name], result.outcome.parked))
                    if name in so_far.room and specs[name].bot is None:
                        so_far.room[name] -= sum(not event.session for event in result.outcome.parked)
                yield Result(result.place, result.batch, result.outcome.after(took_s), result.through)
                took_s = 0.0  # told once: the times of several results are added up


class _Tests:
    """The rows of a span that predicates want. A subscription that a row leaves in doubt is cut off before the piece
    that the row is in; `in_doubt` gets its name if that is the first."""

    def __init__(
        self,
        span: Span,
        found: RowAddresses,
        specs: Mapping[int, SubscriptionSpec],
        cuts: list[Result],
        in_doubt: set[str],
    ) -> None:
        self._place, self._found, self._specs = span.place, found, dict(specs)
        self._cuts, self._in_doubt = cuts, in_doubt
        self._reader = RowReader(span.paths, _KEPT_BYTES_MAX)
        self._known: dict[int, tuple[I64, I64]] = {}  # by where a piece begins

    def pieces(self, rows_max: int) -> list[tuple[int, int]]:
        """Where pieces begin and end: of so many rows at most, and fewer where they are large."""
        most = min(rows_max, _TESTED_ROWS_MAX, max(_TESTED_ROWS_MIN, _TESTED_MATCHES // len(self._specs)))
        sizes = np.cumsum(self._reader.weights(self._found.codes, self._found.numbers))
        found, start, count = [], 0, len(sizes)
        while start < count:
            full = np.searchsorted(sizes, (sizes[start - 1] if start else 0.0) + _TESTED_BYTES, side="right")
            stop = min(count, start + most, max(start + 1, int(full)))
            found.append((start, stop))
            start = stop
        return found

    def know(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Test before sending, so that no member is cut off in the middle: it leaves the live group instead."""
        known = 0
        doubted: set[int] = set()
        for start, stop in pieces:
            if known > _KNOWN_MATCHES_MAX or not self._specs:
                break
            rows, of, unsure = self._tested(start, stop)
            self._known[start] = rows, of
            known += len(of)
            for number in unsure:
                self._cut_off(number, 0)
            doubted |= unsure
        if doubted:
            for start, (rows, of) in self._known.items():
                kept = ~np.isin(of, list(doubted))
                self._known[start] = rows[kept], of[kept]

    def wanted(self, start: int, stop: int) -> tuple[I64, I64]:
        """Pairs of a row, counted from `start`, and the number of an assignment that wants it."""
        if start in self._known:
            return self._known.pop(start)
        rows, of, unsure = self._tested(start, stop)
        for number in unsure:
            self._cut_off(number, start)
        return rows, of

    def _tested(self, start: int, stop: int) -> tuple[I64, I64, set[int]]:
        """Also the numbers of the predicates that are in doubt, which are not among the pairs."""
        numbers = list(self._specs)
        if not numbers:
            return *_NO_PAIRS, set()
        rows = self._rows(start, stop)
        if rows.column("payload").nbytes > PAYLOAD_BYTES_MAX and stop - start > 1:
            half = (start + stop) // 2
            one, other = self._tested(start, half), self._tested(half, stop)
            unsure = one[2] | other[2]
            both = np.concatenate([one[0], half - start + other[0]]), np.concatenate([one[1], other[1]])
            kept = ~np.isin(both[1], list(unsure))
            return both[0][kept], both[1][kept], unsure
        wanted = wanted_by(rows, [self._specs[n] for n in numbers], _TESTED_WORK_MAX)
        return wanted.rows, np.asarray(numbers, np.int64)[wanted.of], {numbers[n] for n in wanted.unsure}

    def _cut_off(self, number: int, start: int) -> None:
        name = self._specs.pop(number).name
        if not start:
            self._in_doubt.add(name)
        last = self._rows(max(0, start - 1), max(1, start)).select(["batch", "position"]).to_pylist()[0]
        rest = Outcome(name, Fate.UNFINISHED, reason="Spark has to match the rest")
        self._cuts.append(Result(self._place, last["batch"], rest, last["position"] if start else None))

    def _rows(self, start: int, stop: int) -> pa.RecordBatch:
        return self._reader.pick(self._found.codes[start:stop], self._found.numbers[start:stop])


def _by_row(one: tuple[I64, I64], other: tuple[I64, I64]) -> tuple[I64, I64]:
    """Both pairs of rows and numbers, in the order of the rows."""
    if not len(one[0]) or not len(other[0]):
        return one if len(one[0]) else other
    rows, of = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
    order = np.argsort(rows, kind="stable")
    return rows[order], of[order]


def _going_on(job: Job, so_far: _SoFar) -> Job:
    """The job, behind what the pieces before it have parked."""
    held, room = so_far.held.get(job.spec.name), so_far.room.get(job.spec.name)
    if not held and room is None:
        return job
    return replace(job, held=held_lines(job.events, held or {}), parked_room=room)


def is_at_hand(span: Span) -> bool:
    return span.fresh is not None and span.fresh.num_rows > 0 and not span.begun.through


def _is_named_at_hand(one: Assignment) -> bool:
    return is_at_hand(one.span) and one.part is None and not one.spec.where


def rows_at_hand(span: Span) -> pa.RecordBatch:
    return pa.table(span.fresh).select(COLUMNS).cast(ROWS).combine_chunks().to_batches()[0]


def matched_by_name(
    streams: pa.ChunkedArray, ops: pa.ChunkedArray, assignments: Sequence[Assignment], numbers: Sequence[int]
) -> tuple[I64, I64]:
    """Pairs of a row and the number of an assignment that wants it, by stream and operation alone."""
    mine = [assignments[number] for number in numbers]
    among = {n: assignment.bot.streams for n, assignment in enumerate(mine) if assignment.bot is not None}
    rows, of = expanded(streams, ops, [assignment.spec for assignment in mine], among)
    return rows, np.asarray(numbers, np.int64)[of]


def _unsent(
    jobs: Sequence[Job], places: Mapping[str, SourcePartition], late: Late, stopped: set[str]
) -> Iterator[Result]:
    """Nothing is sent: each of these subscriptions gets as far as its first batch with something to send."""
    for job in jobs:
        name, batch = job.spec.name, pc.min(job.events.column("batch")).as_py()
        before = {number: rows for number, rows in late.get(name, {}).items() if number < batch}
        yield from with_expired(name, places[name], [], before)
        yield Result(places[name], batch, Outcome(name, Fate.UNFINISHED, reason="nothing is sent to it now"))
        stopped.add(name)


def timed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """A subscription without a result wanted nothing, and took no time."""
    return [one if one.took_s is not None else replace(one, took_s=0.0) for one in outcomes]


def paths_of(assignments: Sequence[Assignment]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for assignment in assignments for path in assignment.span.paths))


def by_span(assignments: Sequence[Assignment]) -> list[tuple[Span, list[int]]]:
    """Each span once, with the numbers of the assignments that have it."""
    numbers: dict[Span, list[int]] = {}
    last: Span | None = None
    mine: list[int] = []
    for number, assignment in enumerate(assignments):
        if assignment.span is not last:  # thousands may have the same one, and a span takes long to hash
            last = assignment.span
            mine = numbers.setdefault(last, [])
        mine.append(number)
    return list(numbers.items())


def gathered(pieces: Iterable[Addresses]) -> Iterator[Addresses]:
    """The same addresses, more of them at a time: rows that are sent together are served side by side."""
    waiting: list[Addresses] = []
    rows = 0
    for piece in pieces:
        waiting.append(piece)
        rows += len(piece[0])
        if rows >= _CHUNK_ROWS:
            yield _together(waiting)
            waiting, rows = [], 0
    if rows:
        yield _together(waiting)


def _together(pieces: Sequence[Addresses]) -> Addresses:
    codes, numbers, of = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return codes, numbers, of


def addresses_of(batch: pa.RecordBatch) -> Addresses:
    codes, numbers, of = (column.to_numpy() for column in batch.columns)
    return codes, numbers, of


def read(paths: Sequence[str], places: Iterable[Addresses]) -> Iterator[MatchedRows]:
    """The rows at some addresses, each read once however many want it; fewer at a time if they are large."""
    picker = RowReader(paths)
    size = min(_CHUNK_ROWS, picker.rows_within(_CHUNK_BYTES))
    for codes, numbers, of in places:
        new = np.ones(len(of), np.bool_)
        new[1:] = (codes[1:] != codes[:-1]) | (numbers[1:] != numbers[:-1])
        firsts = np.flatnonzero(new)
        for start in range(0, len(firsts), size):
            mine = firsts[start : start + size]
            stop = firsts[start + size] if start + size < len(firsts) else len(of)
            rows = picker.pick(codes[mine], numbers[mine])
            yield rows, np.cumsum(new[mine[0] : stop]) - 1, of[mine[0] : stop]


def by_subscription(rows: pa.RecordBatch, of_row: I64, of: I64) -> Iterator[tuple[int, I64, pa.RecordBatch]]:
    """The rows of each subscription, with their numbers, in their order; one pass for all of them."""
    if not len(of):
        return
    order = np.argsort(of, kind="stable")
    of, of_row = of[order], of_row[order]
    starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(of)], strict=True):
        mine = of_row[start:stop]
        yield int(of[start]), mine, _some(rows, mine)


def _some(rows: pa.RecordBatch, mine: I64) -> pa.RecordBatch:
    """Rows of these numbers, which ascend. A row by itself, as thousands may want, is not copied column by column."""
    first, count = int(mine[0]), len(mine)
    if count == rows.num_rows:
        return rows
    return rows.slice(first, count) if mine[-1] - first == count - 1 else rows.take(pa.array(mine))


def now_held(spec: SubscriptionSpec, parked: Iterable[ParkedEvent]) -> Counter[HeldKey]:
    """Keys whose next events must wait: events parked in one chunk of a job hold back the chunks after it."""
    keyed = parked if spec.ordered else ()
    return Counter(key for event in keyed for key in event.held_keys)


def held_lines(rows: pa.RecordBatch, waiting: Mapping[HeldKey, int]) -> dict[Line, int]:
    """The lines among these rows whose key has parked events, and how many."""
    held: dict[Line, int] = {}
    if waiting:
        places = list(map(SourcePartition, rows.column("source").to_pylist(), rows.column("partition").to_pylist()))
        streams = texts_of(rows.column("stream"))
        found = {
            line
            for name in ("key", "previous_key")
            if name in rows.schema.names and rows.column(name).null_count < rows.num_rows
            for line in zip(places, streams, texts_of(rows.column(name)), strict=True)
        }
        for place, stream, key in waiting.keys() & found:
            held[place.source, stream, key] = held.get((place.source, stream, key), 0) + waiting[place, stream, key]
    return held
