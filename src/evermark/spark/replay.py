"""Replay as a Spark job: a slice of time found, put in order and posted by a task.

Where a predicate has to hold, Spark reads the few columns that decide which events come and when, and hands the task
their places: file and row number. Without one the task finds the places itself. Either way it reads the rows themselves
from the same files: rows through the JVM and into Arrow again would cost several times all the rest.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from evermark.ahead import ahead
from evermark.delivery.bots.forward import forwarded, waiting
from evermark.delivery.decide.key_parts import part_numbers, parts_max, share_of
from evermark.delivery.model import Fate, Outcome, ParkedEvent
from evermark.delivery.replay.plan import Replayed, ReplayWork, Round, folded, joined
from evermark.delivery.replay.timeslice import Mark, micros, moment_at
from evermark.delivery.run.post import held_lines, now_held
from evermark.delivery.sinks import Sinks
from evermark.delivery.webhook.base import Job, Prefix
from evermark.delivery.webhook.bundles import prepared
from evermark.delivery.work import KeyPart
from evermark.errors import EngineError
from evermark.log.frames import addressed_frame
from evermark.log.opened import require_readable
from evermark.log.row_reader import I64, ROW_ADDRESS, RowReader, require_codes
from evermark.log.window_search import Stretch, find, find_with_keys
from evermark.predicate import wanted_ops
from evermark.predicate.fragment import string_sql
from evermark.secrets import SecretBox
from evermark.spark.job import Report, engine_error, run_tasks
from evermark.spark.match import wanted_by
from evermark.spark.parts import Paces, PostApart, Slots, by_task
from evermark.spark.posting import outcome_fields, outcome_of
from evermark.spark.session import sql_session

_GRACE_S = 1.0
# Slices that are looked for at a time, beside the slices being posted; and how many of them are kept.
FINDERS = 2
_PREPARED_MAX = 4
# Rows of one round of posting: they are in memory, and each round waits for its last answer. The first round is small:
# no row is sent before the round is read and rendered.
ROUND_ROWS_FIRST = 10_000
ROUND_ROWS = 100_000
ROUND_BYTES = 64 * 1024 * 1024
_FILE, _ROW = ROW_ADDRESS


def places(spark: SparkSession, work: ReplayWork) -> DataFrame:
    """Where the events of a slice are that are wanted, by (event_time, event_id), in one partition.

    Few steps on purpose: each costs Spark an analysis, and a slice may be small.
    """
    piece, mark, heads = work.slice, work.slice.mark, work.heads
    require_codes(piece.paths)
    since, until = (f"timestamp_micros({micros(time)})" for time in (mark.time, piece.to))
    conditions = [f"event_time >= {since}", f"event_time <= {until}"]
    if mark.event_id is not None:
        conditions.append(f"(event_time > {since} or event_id > {string_sql(mark.event_id)})")
    if heads is not None:
        known = " or ".join(f"(partition = {p} and batch <= {batch})" for p, batch in sorted(heads.items()))
        conditions.append(f"({known or 'false'})")
    if work.streams:
        conditions.append(f"stream in ({', '.join(map(string_sql, work.streams))})")
    frame, wanted = wanted_by(addressed_frame(spark, piece.paths), work.spec, work.where)
    return (
        frame.where(" and ".join([*conditions, wanted]))
        .select("event_time", "event_id", *ROW_ADDRESS)
        .coalesce(1)
        .sortWithinPartitions("event_time", "event_id")
        .select(_FILE, _ROW)
    )


def places_here(work: ReplayWork) -> tuple[I64, I64]:
    """The same without Spark, where no predicate has to hold; `rows_max` of them at most."""
    require_codes(work.slice.paths)
    return find(work.slice.paths, _stretch(work), work.rows_max)


def _stretch(work: ReplayWork) -> Stretch:
    piece, spec = work.slice, work.spec
    within = [frozenset(names) for names in (work.streams, spec.streams) if names]
    within += [] if work.bot is None else [work.bot.streams]
    return Stretch(
        micros(piece.mark.time),
        piece.mark.event_id,
        micros(piece.to),
        frozenset(wanted_ops(spec.ops)),
        frozenset.intersection(*within) if within else None,
        work.heads,
    )


def rows_at(codes: I64, numbers: I64, paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows at these places, in their order, some ten thousand at a time: fewer if they are large."""
    picker = RowReader(paths)
    most = min(ROUND_ROWS, picker.rows_within(ROUND_BYTES))
    start, rows = 0, min(ROUND_ROWS_FIRST, most)
    while start < len(codes):
        yield picker.pick(codes[start : start + rows], numbers[start : start + rows])
        start, rows = start + rows, min(2 * rows, most)


@dataclass(frozen=True)
class _Send:
    """The task that posts a slice; pickled into the job, secrets sealed."""

    work: ReplayWork
    found: tuple[I64, I64] | None  # None: the task looks for itself
    box: SecretBox
    share_rates: Callable[[], AbstractContextManager[None]] = nullcontext
    part: KeyPart | None = None  # only the events of this part; None: all

    def __call__(self, _number: int) -> Iterator[Report]:
        with self.share_rates():
            yield from self._reports()

    def _reports(self) -> Iterator[Report]:
        room, held = self.work.parked_room, Counter(self.work.held)
        # From here on, and not since the job was planned: a task may wait for its slot.
        deadline = time.monotonic() + self.work.budget_s
        others: list[Report] = []
        for job, looked_at in ahead(self._jobs(others), depth=1, low_priority=True):
            going = replace(job, held=held_lines(job.events, held), parked_room=room)
            row, parked = self._send(going, looked_at, deadline)
            room -= len(parked)
            held += now_held(self.work.spec, parked)
            yield row
            if row["fate"] != Fate.DONE:
                return
        yield from others

    def _jobs(self, others: list[Report]) -> Iterator[tuple[Job, pa.RecordBatch]]:
        """Rendered while the round before is sent; with all rows that were looked at, of which a bot is sent fewer.

        `others` gets the events that are for other parts: they are passed here when this part's own events are.
        """
        work = self.work
        found = self.found or (places_here(work) if self.part is None else self._mine(self.part, others))
        for rows in ahead(rows_at(*found, work.slice.paths), depth=1, low_priority=True):
            mine = rows if work.bot is None else forwarded(rows, work.bot)
            waits = {} if work.bot is None else waiting(mine, work.bot)
            job = Job(
                work.spec, mine, self.box.open, historical=True, replay_id=work.replay, probe=work.probe, waits=waits
            )
            yield prepared([job])[0], rows

    def _mine(self, part: KeyPart, others: list[Report]) -> tuple[I64, I64]:
        require_codes(self.work.slice.paths)
        found = find_with_keys(self.work.slice.paths, _stretch(self.work), self.work.rows_max)
        mine = part_numbers(found, part.of) == part.number
        if rows := found.num_rows - int(mine.sum()):
            last = {"time": found["event_time"][-1].as_py(), "id": found["event_id"][-1].as_py()}
            nothing = outcome_fields(Outcome(self.work.spec.name, Fate.DONE))
            others.append({**nothing, "rows": rows, "parked_at": [], **last})
        codes, numbers = (found[name].to_numpy()[mine] for name in ("code", "number"))
        return codes, numbers

    def _send(
        self, job: Job, looked_at: pa.RecordBatch, deadline: float
    ) -> tuple[dict[str, Any], Sequence[ParkedEvent]]:
        left = max(0.0, deadline - time.monotonic())
        done = Prefix(0, Outcome(job.spec.name, Fate.DONE))
        if job.events.num_rows:
            done = Sinks(low_priority=True).deliver_prefix(job, left, _GRACE_S)
        # When the last row to be sent is done, all rows that were looked at are.
        whole = done.outcome.fate is Fate.DONE
        passed, rows = (looked_at, looked_at.num_rows) if whole else (job.events, done.rows)
        parked_at = [] if self.part is None else _times(job.events, done.outcome.parked)
        row = {**outcome_fields(done.outcome), "rows": rows, "time": None, "id": None, "parked_at": parked_at}
        if rows:
            row["time"] = passed.column("event_time")[rows - 1].cast(pa.int64()).as_py()
            row["id"] = passed.column("event_id")[rows - 1].as_py()
        return row, done.outcome.parked


def _times(events: pa.RecordBatch, parked: Sequence[ParkedEvent]) -> list[int]:
    ids = pa.array([one.event_id for one in parked], pa.string())
    rows = pc.index_in(ids, value_set=events.column("event_id"))
    times: list[int] = events.column("event_time").cast(pa.int64()).take(rows).to_pylist()
    return times


class SparkReplays:
    """`ReplayDeliverer` on Spark: one task that posts the events of a slice; on a cluster several, each some keys.

    Where a predicate has to hold, a job before it finds their addresses; it does so for the next slice while this
    slice is posted: finding computes, posting mostly waits.
    """

    def __init__(
        self,
        context: SparkContext,
        box: SecretBox,
        share_rates: Callable[[], AbstractContextManager[None]] = nullcontext,
        lanes: int = 0,
    ) -> None:
        self._share_rates = share_rates
        self._slots, self._paces = Slots(context, lanes), Paces()
        self._context = context
        self._box = box
        self._finders = ThreadPoolExecutor(FINDERS, thread_name_prefix="replay-find")
        self._found: OrderedDict[tuple[str, str], tuple[ReplayWork, Future[pa.Table]]] = OrderedDict()

    def replay(self, work: ReplayWork, ahead: ReplayWork | None = None) -> Replayed:
        try:
            return self._replayed(work, ahead)
        except (EngineError, FileNotFoundError):
            require_readable(work.slice.paths)  # Spark's words name no remedy
            raise

    def _replayed(self, work: ReplayWork, ahead: ReplayWork | None) -> Replayed:
        places, limit = None, work.rows_max
        if work.where is not None or work.spec.where is not None:
            found, limit = self._prepared(work)
            if ahead is not None:
                self._prepare(ahead)
            if not found.num_rows:
                return folded(work, [], limit)
            codes, numbers = (column.to_numpy() for column in found.columns)
            places = codes, numbers
        send = _Send(work, places, self._box, self._share_rates)
        with self._slots.tasks() as most:
            may = parts_max(work.spec, min(work.slice.rows, work.rows_max), probe=work.probe)
            count = min(most, may) if places is None else 1
            if count == 1:
                rows = run_tasks(self._context, 1, send, _failed(work))
                return folded(work, [_round(row) for row in rows], limit)
            parts = [KeyPart(number, count) for number in range(count)]
            sends = [replace(send, work=replace(work, spec=share_of(work.spec, one)), part=one) for one in parts]
            rows = run_tasks(self._context, count, PostApart(tuple(sends)), _failed(work))
        return joined(work, [[_round(row) for row in mine] for mine in by_task(rows, count)], limit)

    def _prepare(self, work: ReplayWork) -> None:
        self._found[work.replay, work.spec.name] = (work, self._finders.submit(self._find, work))
        while len(self._found) > _PREPARED_MAX:  # of replays that were cancelled
            self._found.popitem(last=False)

    def _prepared(self, work: ReplayWork) -> tuple[pa.Table, int]:
        """The places of a slice, found before its time or now, and how many were looked for at most."""
        before = self._found.pop((work.replay, work.spec.name), None)
        if before is not None and _wish(before[0]) == _wish(work):
            limit = min(before[0].rows_max, work.rows_max)
            return before[1].result().slice(0, limit), limit
        return self._find(work), work.rows_max

    def _find(self, work: ReplayWork) -> pa.Table:
        try:
            return places(sql_session(), work).limit(work.rows_max).toArrow()
        except Exception as error:
            raise engine_error(_failed(work), error) from error


def _wish(work: ReplayWork) -> tuple[Any, ...]:
    """Which events a step looks for; the subscription may change between two steps."""
    spec = work.spec
    return work.slice, work.heads, work.streams, work.where, spec.streams, spec.ops, spec.where


def _failed(work: ReplayWork) -> str:
    return f"replay {work.replay} for {work.spec.name} failed"


def _round(row: Report) -> Round:
    outcome, at = outcome_of(row), Mark(moment_at(row["time"]), row["id"]) if row["rows"] else None
    parked = outcome.parked if row["parked_at"] else ()
    marks = (Mark(moment_at(us), one.event_id) for us, one in zip(row["parked_at"], parked, strict=True))
    return Round(outcome, row["rows"], at, tuple(marks))
