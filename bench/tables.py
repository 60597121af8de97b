"""A backlog of committed row changes of three tables with twenty columns, without triggers, into the log, durable
(`bench.backlog`).

Four writers, each with rows of its own in every table, change a thousand rows in a transaction: 600 are updated, 300
inserted, 100 deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psycopg

from bench.backlog import Backlog, measured
from bench.debezium import Handled
from bench.report import Report
from evermark.secrets import Plain
from evermark.sources.base import Source
from evermark.sources.postgres.settings import PostgresSettings
from evermark.sources.postgres.tables.install import TablesInstallation
from evermark.sources.postgres.tables.source import PostgresTables, versions_in_state

_EVENTS = 1_000_000
_TABLES = ("public.orders", "public.items", "public.visits")
_WRITERS = 4
_STEP = 1_000 * len(_TABLES) * _WRITERS
_UPDATED, _INSERTED, _DELETED = 600, 300, 100
_OWN = 10**9  # each writer's rows are so far from the next writer's
_OLD_ROWS = 6_000  # of each writer and table, to be updated
_CREATE = """
create table {table} (
    id bigint primary key, number int, small smallint, total numeric(12, 2), customer text, note varchar(80),
    is_paid boolean, at timestamptz, local_time timestamp, day date, token uuid, about jsonb, ratio double precision,
    weight real, raw bytea, scores int[], tags text[], address inet, lasts interval, hour time
)
"""
_INSERT = """
insert into {table}
select n, (n %% 100000)::int, (n %% 1000)::smallint, n %% 99999 / 7.0, 'customer ' || n %% 1000, repeat('x', 40),
       n %% 2 = 0, timestamptz '2026-01-01' + n %% 1000000 * interval '1 second', timestamp '2026-01-01 12:00',
       date '2026-01-01', '6f1c0e0a-5b7e-4d2f-9a3b-1c2d3e4f5a6b', jsonb_build_object('n', n, 'kind', 'a'), n / 3.0,
       1.5, '\\x00ff10'::bytea, array[1, 2, 3], array['red', 'blue'], '10.0.0.1', interval '3 hours', time '08:30'
from generate_series(%s::bigint, %s::bigint) n
"""
_UPDATE = "update {table} set number = number + 1, note = 'seen', at = now() where id between %s and %s"
_DELETE = "delete from {table} where id between %s and %s"


class _Tables(Backlog):
    tables = ",".join(_TABLES)

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self._steps = 0
        with psycopg.connect(dsn, autocommit=True) as conn:
            for table in _TABLES:
                conn.execute(_CREATE.format(table=table).encode())
                for writer in range(_WRITERS):
                    first = writer * _OWN
                    conn.execute(_INSERT.format(table=table).encode(), (first, first + _OLD_ROWS - 1))
                    # Deleted by the writer's first transaction; later ones delete what the one before has inserted.
                    before = first + _OLD_ROWS
                    conn.execute(_INSERT.format(table=table).encode(), (before, before + _INSERTED - 1))

    def _settings(self, name: str) -> PostgresSettings:
        chosen = {"dsn": self.dsn, "mode": "tables", "tables": list(_TABLES), "slot": name, "publication": name}
        return PostgresSettings.model_validate(chosen)

    def subscribe(self, name: str) -> None:
        TablesInstallation(self._settings(name)).install([], wait_s=30.0, say=lambda _: None, goes_on=False)

    def source(self, name: str, state_dsn: str, schema: str) -> Source:
        return PostgresTables(self._settings(name).target(), partial(versions_in_state, Plain(state_dsn), schema, name))

    def write(self, events: int) -> None:
        begun, self._steps = self._steps, self._steps + events // _STEP
        steps = range(begun, self._steps)
        threads = [threading.Thread(target=self._write, args=(writer, steps)) for writer in range(_WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _write(self, writer: int, steps: range) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for step in steps:
                old = writer * _OWN + step * _UPDATED % _OLD_ROWS
                before = writer * _OWN + _OLD_ROWS + step * _INSERTED
                new = before + _INSERTED
                for table in _TABLES:
                    with conn.transaction():
                        for text, first, count in (
                            (_INSERT, new, _INSERTED),
                            (_UPDATE, old, _UPDATED),
                            (_DELETE, before, _DELETED),
                        ):
                            done = conn.execute(text.format(table=table).encode(), (first, first + count - 1))
                            assert done.rowcount == count

    def rows_of(self, events: int) -> int:
        return events + len(_TABLES)  # each is described once

    def lost(self, ids: Sequence[str], events: int) -> int:
        return abs(self.rows_of(events) - len(ids)) + (len(ids) - len(set(ids)))

    def lost_by(self, handled: Handled, events: int) -> int:
        return abs(events - handled.events)


def run(scale: float, folder: Path) -> Report:
    return measured(_Tables, max(_STEP, int(_EVENTS * scale) // _STEP * _STEP), folder)
