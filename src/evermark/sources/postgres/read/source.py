"""The outbox of a Postgres database: one partition for each replication slot it is read from (see slot.py).

Several slots share the events by key: each has a publication with a row filter of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from evermark.errors import EvermarkError
from evermark.event import Seen
from evermark.sources.base import Condition, Feed, Limit, Repair, Slice, Source, Untaken, Warned
from evermark.sources.postgres.connect import close_idle, connect
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.outbox import SCHEMA_VERSION, filled, maintain, unwatched_mend, unwatched_said
from evermark.sources.postgres.read.chunks import BIG_BYTES
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.read.untaken import OutboxLook
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.survey import outdated, wal_warnings
from evermark.sources.postgres.target import PostgresTarget

# A newer request, or the same window with another end, stays: it has a control event of its own.
_CLEAR = """
update @schema@.streams set replay_from_ts = null, replay_to_ts = null
where name = %s and replay_from_ts = %s::timestamptz and replay_to_ts is not distinct from %s::timestamptz
returning true
"""


class PostgresOutbox(Source):
    """Picklable: its target travels, connections do not."""

    def __init__(self, target: PostgresTarget, *, big_bytes: int = BIG_BYTES) -> None:
        self._target, self._big_bytes = target, big_bytes
        self._unwatched: frozenset[str] = frozenset()  # partitions that the last upkeep could not see to
        self._slots = [SlotReader(part, big_bytes) for part in target.parts()]
        self._looks = [OutboxLook(part) for part in target.parts()]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self._target, big_bytes=self._big_bytes), ()

    def partitions(self) -> Sequence[int]:
        return list(range(len(self._slots)))

    def earliest(self, partition: int) -> str:
        with _blamed_on(partition):
            return self._slots[partition].earliest()

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for partition, slot in enumerate(self._slots):
            if not resume or partition in resume:
                with _blamed_on(partition):
                    slot.check(resume.get(partition), (newest or {}).get(partition))

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        """Blocks while no partition has anything new; one that is not asked for is not looked at."""
        deadline = time.monotonic() + limit.wait_s
        starts = {partition: Position.parse(text) for partition, text in after.items()}
        for partition, start in starts.items():
            with _blamed_on(partition):
                self._slots[partition].require_unchanged(start)
        while True:
            ends = dict(after)
            for partition, start in starts.items():
                with _blamed_on(partition):
                    ends[partition] = self._slots[partition].offer(start, limit) or after[partition]
            remaining = deadline - time.monotonic()
            if ends != after or remaining <= 0:
                return ends
            time.sleep(min([remaining, *(self._slots[partition].pause_s() for partition in starts)]))

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)] if start < end else []

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return self._slots[piece.partition].read(piece)

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed:
        with _blamed_on(partition):
            return self._slots[partition].follow(position, wake)

    def confirm(self, partition: int, end: str) -> None:
        self._slots[partition].confirm(end)

    def upkeep(self) -> None:
        maintain(self._target)
        self._unwatched = self._slots[0].unwatched_partitions()

    def condition(self) -> Condition:
        surveys = [slot.look() for slot in self._slots]
        found = [(survey.flush_lsn, survey.slot) for survey in surveys if survey.slot is not None]
        safe = [slot.safe_wal_bytes for _, slot in found if slot.safe_wal_bytes is not None]
        gauges = {
            "wal_retained_bytes": max((flush - (slot.restart_lsn or flush) for flush, slot in found), default=0),
            "unconfirmed_bytes": max((flush - (slot.confirmed_lsn or flush) for flush, slot in found), default=0),
            "wal_retained_limit_bytes": self._target.wal_retained_warn_bytes,
            **({"wal_safe_bytes": min(safe)} if safe else {}),
        }
        version = surveys[0].schema_version or SCHEMA_VERSION
        unwatched = self._slots[0].unwatched_partitions() if version >= SCHEMA_VERSION else frozenset()
        warnings = wal_warnings(gauges) | outdated(version)
        if lasting := unwatched & self._unwatched:
            warnings["unwatched_partitions"] = Warned(unwatched_said(lasting), unwatched_mend(self._target))
        return Condition(gauges, warnings, upkeep_due=bool(unwatched))

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        found: dict[int, Untaken] = {}
        for partition, text in after.items():
            with _blamed_on(partition):
                waiting = self._looks[partition].untaken(text)
            if waiting is not None:
                found[partition] = waiting
        return found

    def replayed(self, stream: str, since: str, until: str | None) -> None:
        with connect(self._target.dsn) as link:
            link.row(filled(_CLEAR, self._target), (stream, since, until), doing="clearing a replay request")

    def repair(self, partition: int) -> Repair:
        return repair_of(self._target.parts()[partition], on_finished=lambda: self._renew(partition))

    def _renew(self, partition: int) -> None:
        """What was known of the old slot's WAL says nothing of the new one's."""
        old = self._slots[partition]
        self._slots[partition] = SlotReader(self._target.parts()[partition], self._big_bytes)
        old.forget()

    def close(self) -> None:
        """Confirm what was held back, and let go of all connections."""
        for slot in self._slots:
            try:
                slot.close()
            except EvermarkError as error:
                # The next start reads a little again, and drops what the log holds.
                import structlog  # here: four processes that only plan load this module at every start

                structlog.get_logger(__name__).warning("postgres_last_confirm_failed", error=str(error))
        for look in self._looks:
            look.close()
        close_idle()


@contextmanager
def _blamed_on(partition: int) -> Iterator[None]:
    """One slot's trouble is not the others'."""
    try:
        yield
    except EvermarkError as error:
        error.partition = partition
        raise
