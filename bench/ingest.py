"""A backlog of committed outbox events into the log, durable (`bench.backlog`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.backlog import Backlog, measured
from bench.debezium import Handled
from bench.report import Report
from bench.shop import event_ids, place, prepare, write
from evermark.sources.base import Source
from evermark.sources.postgres.read.source import PostgresOutbox

_EVENTS = 1_000_000


class _Outbox(Backlog):
    tables = "pgstream.events"

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._before: set[str] = set()
        self._written: set[str] = set()

    def subscribe(self, name: str) -> None:
        prepare(self.dsn, name)

    def source(self, name: str, state_dsn: str, schema: str) -> Source:
        return PostgresOutbox(place(self.dsn, name))

    def write(self, events: int) -> None:
        write(self.dsn, events)
        self._before |= self._written
        self._written = event_ids(self.dsn) - self._before

    def rows_of(self, events: int) -> int:
        return events

    def lost(self, ids: Sequence[str], events: int) -> int:
        return len(self._written - set(ids)) + (len(ids) - len(set(ids)))

    def lost_by(self, handled: Handled, events: int) -> int:
        return len(self._written - handled.at.keys()) + (handled.events - len(handled.at))


def run(scale: float, folder: Path) -> Report:
    return measured(_Outbox, max(4_000, int(_EVENTS * scale) // 4_000 * 4_000), folder)
