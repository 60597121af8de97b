"""The outbox of a Postgres database as a source.

Several slots share the events by key: each has a publication with a row filter of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from evermark.sources.base import Condition, Repair, Untaken, Warned
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.outbox import SCHEMA_VERSION, filled, maintain, unwatched_mend, unwatched_said
from evermark.sources.postgres.read.chunks import BIG_BYTES
from evermark.sources.postgres.read.outbox_capture import OutboxCapture, unwatched_partitions
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.read.slot_source import SlotSource, blamed_on, wal_gauges
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


class PostgresOutbox(SlotSource):
    """Picklable: its target travels, connections do not."""

    def __init__(self, target: PostgresTarget, *, big_bytes: int = BIG_BYTES) -> None:
        super().__init__([SlotReader(OutboxCapture(part), big_bytes) for part in target.parts()])
        self._target, self._big_bytes = target, big_bytes
        self._unwatched: frozenset[str] = frozenset()  # partitions that the last upkeep could not see to
        self._looks = [OutboxLook(part) for part in target.parts()]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self._target, big_bytes=self._big_bytes), ()

    def upkeep(self) -> None:
        maintain(self._target)
        self._unwatched = unwatched_partitions(self._slots[0].run_query, self._target)

    def condition(self) -> Condition:
        surveys = [slot.look() for slot in self._slots]
        gauges = wal_gauges(surveys, self._target.wal_retained_warn_bytes)
        version = surveys[0].schema_version or SCHEMA_VERSION
        unwatched: frozenset[str] = frozenset()
        if version >= SCHEMA_VERSION:
            unwatched = unwatched_partitions(self._slots[0].run_query, self._target)
        warnings = wal_warnings(gauges) | outdated(version)
        if lasting := unwatched & self._unwatched:
            warnings["unwatched_partitions"] = Warned(unwatched_said(lasting), unwatched_mend(self._target))
        return Condition(gauges, warnings, upkeep_due=bool(unwatched))

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        found: dict[int, Untaken] = {}
        for partition, text in after.items():
            with blamed_on(partition):
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
        self._slots[partition] = SlotReader(OutboxCapture(self._target.parts()[partition]), self._big_bytes)
        old.forget()

    def close(self) -> None:
        for look in self._looks:
            look.close()
        super().close()
