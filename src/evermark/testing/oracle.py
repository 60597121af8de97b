"""An oracle for sources of mode tables: Postgres' own logical replication, fed by the same random workload.

At rest three things must be equal, value by value: the tables of the source, those of a native subscriber, and those
that Evermark's log implies. Where all three differ from what was meant, the workload is wrong; where only one differs,
that one is. `make chaos ARGS="--oracle SEED"` and tests/faults/test_oracle.py run it.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
from psycopg import pq as libpq

from evermark.embedded.binaries import Binaries
from evermark.embedded.datafolder import password_in
from evermark.log.log import Log
from evermark.log.read import LogReader
from evermark.testing.oracle_tables import (
    INT,
    PUBLISHES_GENERATED,
    RESTS,
    TABLES,
    TEXT,
    TYPES,
    Kind,
    OracleTable,
    Row,
    add_columns,
    column_names,
    key_of,
    more_columns,
    read_json,
    rows_of,
)
from evermark.testing.pipeline import PATIENCE_S, Stage
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Connection = psycopg.Connection[Any]
SERVER = {"max_prepared_transactions": "10"}
_NATIVE = "oracle"
_KEYS = 24
_FIRST_FILLED = 1000
_WRITERS = 3
_SHOWN = 5
_BIGINT = Kind("bigint", (), int)
_MADE = Kind("integer", (), int, made_of="n % 7")
_LSN = "select lpad(to_hex((pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint), 16, '0')"


@dataclass
class Shape:
    """The columns of the tables as they are now. Of those that were added: what a row has in it that was told before
    that, and where in the WAL it was, as positions of events have it. Of those that were renamed: the name before."""

    columns: dict[str, dict[str, Kind]]
    added: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    renamed: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def first(cls, more: Mapping[str, Mapping[str, Kind]]) -> Shape:
        return cls(
            {table.name: {**table.key, **table.columns, **more.get(table.name, {})} for table in (*TABLES, RESTS)}
        )

    def row(self, table: str, told: Row, at: str) -> Row:
        """What an event tells of a row's columns, under the names that they have now."""
        found: Row = {}
        for name in self.columns[table]:
            known = name
            while known not in told and at < self.renamed.get((table, known), ("", ""))[1]:
                known = self.renamed[table, known][0]
            if known in told:
                found[name] = told[known]
            elif at < self.added.get((table, name), ("", ""))[1]:
                found[name] = self.added[table, name][0]
        return found


class Workload:
    """Transactions that overlap, at random from a seed; two that want the same row give way to each other."""

    def __init__(
        self, dsn: str, subscriber: str, rng: random.Random, more: Mapping[str, Mapping[str, Kind]] | None = None
    ) -> None:
        self._rng = rng
        self.shape = Shape.first(more or {})
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._subscriber = psycopg.connect(subscriber, autocommit=True)
        self._writers = [psycopg.connect(dsn) for _ in range(_WRITERS)]
        for conn in self._writers:
            conn.execute("set lock_timeout = '50ms'")
            conn.commit()
        # So long after a table was altered or emptied none is: a repair that was reading it has begun again.
        self.rest_s = 0.0
        self._disturbed_at = 0.0
        self._prepared: list[str] = []
        self._rests = self._filled = self._named = 0
        self.steps = 0

    def close(self) -> None:
        self.settle()
        for conn in (*self._writers, self._admin, self._subscriber):
            conn.close()

    def fill(self, rows: int) -> None:
        """Rows beside those that change all the time; not while somebody else takes steps."""
        self.settle()
        self._filled = rows
        for table in TABLES:
            for number in range(rows):
                self._insert(self._admin, table, _FIRST_FILLED + number)

    def step(self) -> None:
        self.steps += 1
        conn, choice = self._rng.choice(self._writers), self._rng.random()
        try:
            if choice < 0.55:
                self._change(conn)
            elif choice < 0.63:
                conn.execute("savepoint here")
                self._change(conn)
                conn.execute("rollback to savepoint here" if self._rng.random() < 0.6 else "release savepoint here")
            elif choice < 0.67:
                self._prepare(conn)
            elif choice < 0.69:
                self._end_prepared()
            elif choice < 0.7:
                if self._may_disturb():
                    self._define()
            else:
                (conn.commit if choice < 0.97 else conn.rollback)()
        except psycopg.Error:
            conn.rollback()

    def settle(self) -> None:
        """No transaction is open then."""
        for conn in self._writers:
            with suppress(psycopg.Error):
                conn.commit()
            conn.rollback()
        while self._prepared:
            self._end_prepared()

    def rest(self) -> int:
        """A row behind everything: who has it has all."""
        self.settle()
        self._rests += 1
        self._admin.execute("insert into rests values (%s)", (self._rests,))
        return self._rests

    # two phases

    def _prepare(self, conn: Connection) -> None:
        if conn.info.transaction_status != libpq.TransactionStatus.INTRANS:
            return
        name = f"oracle-{self.steps}"
        conn.execute(f"prepare transaction '{name}'".encode())
        self._prepared.append(name)

    def _end_prepared(self) -> None:
        if self._prepared:
            name = self._prepared.pop(self._rng.randrange(len(self._prepared)))
            end = "rollback" if self._rng.random() < 0.25 else "commit"
            self._admin.execute(f"{end} prepared '{name}'".encode())

    # changes of rows

    def _change(self, conn: Connection) -> None:
        rng, table = self._rng, self._rng.choice(TABLES)
        key, kind = self._key(), rng.random()
        one, several = self._where(table, key), f"{next(iter(table.key))} between {key} and {key + 4}"
        if kind < 0.35:
            self._insert(conn, table, key)
        elif kind < 0.55:
            conn.execute(f"update {table.name} set n = n + 1 where {several}".encode())
        elif kind < 0.7:
            columns = self._written(table)
            column = rng.choice([name for name in columns if name not in table.key])
            value = self._value(columns[column])
            conn.execute(f"update {table.name} set {column} = {value} where {one}".encode())
        elif kind < 0.83:
            self._move(conn, table, key)
        elif kind < 0.997 or not self._may_disturb():
            conn.execute(f"delete from {table.name} where {one}".encode())
        else:
            names = [each.name for each in rng.sample(TABLES, rng.choice([1, 1, 2]))]
            conn.execute(f"truncate {', '.join(names)}".encode())

    def _move(self, conn: Connection, table: OracleTable, key: int) -> None:
        """To a free key; sometimes on to a third, in the same transaction."""
        for _ in range(self._rng.choice([1, 1, 2])):
            other = self._rng.randint(1, 2 * _KEYS)
            first = next(iter(table.key))
            free = f"not exists (select from {table.name} where {first} = {other})"
            wanted = f"{self._where(table, key)} and {free}"
            more = ", n = n + 1" if self._rng.random() < 0.3 else ""
            conn.execute(f"update {table.name} set {first} = {other}{more} where {wanted}".encode())
            key = other

    def _insert(self, conn: Connection, table: OracleTable, key: int) -> None:
        columns = self._written(table)
        rest = [name for name in columns if name not in table.key]
        values = [str(key), *("'b'" if kind.type == "text" else "1" for kind in list(table.key.values())[1:])]
        values += ["1" if name == "n" else self._value(columns[name]) for name in rest]
        names = ", ".join([*table.key, *rest])
        then = self._rng.choice(["nothing", f"nothing; update {table.name} set n = 0 where {self._where(table, key)}"])
        conn.execute(f"insert into {table.name} ({names}) values ({', '.join(values)}) on conflict do {then}".encode())

    def _written(self, table: OracleTable) -> dict[str, Kind]:
        """Its columns, but for those that the server makes."""
        return {name: kind for name, kind in self.shape.columns[table.name].items() if not kind.made_of}

    def _may_disturb(self) -> bool:
        now = time.monotonic()
        if now - self._disturbed_at < self.rest_s:
            return False
        self._disturbed_at = now
        return True

    def _key(self) -> int:
        if self._filled and self._rng.random() < 0.3:
            return _FIRST_FILLED + self._rng.randrange(self._filled)
        return self._rng.randint(1, _KEYS)

    def _where(self, table: OracleTable, key: int) -> str:
        return f"{next(iter(table.key))} = {key}"

    def _value(self, kind: Kind) -> str:
        """As SQL. Half of the rows have nothing in most columns, or statements would be long."""
        if not kind.values or self._rng.random() < 0.4:
            return "null" if kind.values else str(self._rng.randint(1, 99))
        return f"({self._rng.choice(kind.values)})::{kind.type}"

    # other columns

    def _define(self) -> None:
        """A column comes, goes, gets another name or another type. Native replication carries none of it: where a
        column comes or changes, the subscriber is altered first, and where it or its name goes, when it has all."""
        self.settle()
        table = self._rng.choice(TABLES)
        columns = self.shape.columns[table.name]
        mine = [name for name in columns if name.startswith("c")]
        choice = self._rng.random()
        if choice < 0.4 or not mine:
            self._add(table, columns)
        elif choice < 0.6:
            name = self._rng.choice(mine)
            self._admin.execute(f"alter table {table.name} drop column {name}".encode())
            self.wait_for_subscriber()
            self._subscriber.execute(f"alter table {table.name} drop column {name}".encode())
            del columns[name]
        elif choice < 0.8:
            self._rename(table, columns, self._rng.choice(mine))
        else:
            self._retype(table, columns, self._rng.choice(mine))

    def _new_name(self) -> str:
        self._named += 1
        return f"c{self._named}"

    def _add(self, table: OracleTable, columns: dict[str, Kind]) -> None:
        """What the server makes of other columns is told again with the rows: no event tells that it was made. Where
        the whole row is the identity the native publication would have to publish it."""
        kinds = [INT, TEXT, *([_MADE] if self._makes_columns and table.name != "whole" else [])]
        name, kind = self._new_name(), self._rng.choice(kinds)
        default, told = self._rng.choice([("", None), ("default 7", "7" if kind is TEXT else 7)])
        alter = f"alter table {table.name} add column {name} {kind.sql} {'' if kind.made_of else default}".encode()
        self._subscriber.execute(alter)
        with self._admin.transaction():
            self._admin.execute(alter)
            # Behind it, not in front: `alter table` waits for copies that read the table, and these mark their rows.
            at = self._at()
            if kind.made_of:
                self._admin.execute(f"update {table.name} set n = n".encode())
        columns[name] = kind
        self.shape.added[table.name, name] = (told, at)

    def _rename(self, table: OracleTable, columns: dict[str, Kind], name: str) -> None:
        """Rows are not told again: what the log has of them is under the name before."""
        new = self._new_name()
        alter = f"alter table {table.name} rename column {name} to {new}".encode()
        self.wait_for_subscriber()
        with self._admin.transaction():
            self._admin.execute(alter)
            at = self._at()
        self._subscriber.execute(alter)
        columns[new] = columns.pop(name)
        self.shape.renamed[table.name, new] = (name, at)
        if (table.name, name) in self.shape.added:
            self.shape.added[table.name, new] = self.shape.added.pop((table.name, name))

    def _at(self) -> str:
        return str((self._admin.execute(_LSN).fetchone() or ("",))[0])

    @property
    def _makes_columns(self) -> bool:
        return self._admin.info.server_version >= PUBLISHES_GENERATED

    def _retype(self, table: OracleTable, columns: dict[str, Kind], name: str) -> None:
        """Rows are told again where their JSON is another: no event tells that a table was rewritten."""
        kind = {"integer": _BIGINT, "bigint": TEXT}.get(columns[name].type)
        if kind is None or columns[name].made_of:
            return
        alter = f"alter table {table.name} alter column {name} type {kind.type}".encode()
        self._subscriber.execute(alter)
        with self._admin.transaction():
            self._admin.execute(alter)
            if kind is TEXT:
                self._admin.execute(f"update {table.name} set n = n".encode())
        columns[name] = kind

    def wait_for_subscriber(self) -> None:
        wanted = self.rest()

        def there() -> bool:
            return self._subscriber.execute("select from rests where id = %s", (wanted,)).fetchone() is not None

        until(there, "the native subscriber has all", timeout_s=PATIENCE_S)


class Busy(threading.Thread):
    """A workload beside a process that is killed. Its error, if there was one, is raised by `finish`."""

    def __init__(self, workload: Workload, pause_s: float = 0.02) -> None:
        super().__init__(name="workload", daemon=True)
        self._workload, self._pause_s, self._done = workload, pause_s, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._done.wait(self._pause_s):
                self._workload.step()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody looks
            self._error = error

    def finish(self) -> None:
        self._done.set()
        self.join()
        if self._error is not None:
            raise self._error


@contextmanager
def busy(workload: Workload, rest_s: float = 0.0) -> Iterator[None]:
    beside = Busy(workload)
    workload.rest_s = rest_s
    beside.start()
    try:
        yield
    finally:
        beside.finish()
        workload.rest_s = 0.0


@dataclass
class Places:
    """The databases of the source and of the native subscriber."""

    source: str
    subscriber: str
    more: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict)  # columns of what these servers have


@contextmanager
def places(folder: Path, binaries: Binaries | None = None) -> Iterator[Places]:
    with (
        postgres_server(folder / "source", SERVER, binaries=binaries) as source,
        postgres_server(folder / "subscriber", SERVER, binaries=binaries) as subscriber,
        fresh_database(source) as dsn,
        fresh_database(subscriber) as theirs,
    ):
        create = TYPES + ";".join(table.create for table in (*TABLES, RESTS))
        for each in (dsn, theirs):
            with psycopg.connect(each, autocommit=True) as conn:
                conn.execute(create.encode())
                more = more_columns(conn)
                add_columns(conn, more)
        with psycopg.connect(dsn, autocommit=True) as conn:
            names = ", ".join(table.name for table in (*TABLES, RESTS))
            options = "with (publish_via_partition_root = true)"
            conn.execute(f"create publication {_NATIVE} for table {names} {options}".encode())
        with psycopg.connect(theirs, autocommit=True) as conn:
            conn.execute(f"create subscription {_NATIVE} connection '{_conninfo(source, dsn)}'"
                         f" publication {_NATIVE}".encode())  # fmt: skip
        try:
            yield Places(dsn, theirs, more)
        finally:
            with psycopg.connect(theirs, autocommit=True) as conn:
                conn.execute(f"drop subscription {_NATIVE}".encode())


def _conninfo(server: PostgresServer, dsn: str) -> str:
    """With the password: the subscriber's server may not read the file that has it."""
    found = psycopg.conninfo.conninfo_to_dict(dsn)
    password = password_in(server.embedded.passfile)
    return f"host=127.0.0.1 port={server.port} dbname={found['dbname']} user={found['user']} password={password}"


class OracleScene(Stage):
    """Evermark beside the native subscriber. Tables may have rows from before it."""

    source = "shop"

    def __init__(self, folder: Path, at: Places, seed: int) -> None:
        super().__init__(folder, {})
        self.seed, self.at = seed, at
        self.env["SHOP_DSN"] = at.source
        self.workload = Workload(at.source, at.subscriber, random.Random(seed), at.more)

    def settings(self) -> str:
        names = ", ".join(table.stream for table in (*TABLES, RESTS))
        return f'{{type: postgres, dsn: "${{SHOP_DSN}}", mode: tables, start: copy, tables: [{names}]}}'

    def prepare(self) -> None:
        self.run("source", "install")

    def __exit__(self, *_: object) -> None:
        self.workload.close()
        super().__exit__(*_)

    def committed(self) -> list[str]:
        raise NotImplementedError("no outbox tells them")

    def copied(self) -> bool:
        """Whether every table was copied."""
        copies = json.loads(self.run("status", "--json").stdout)["copies"]
        return len(copies) == len(TABLES) + 1 and all(copy["state"] == "done" for copy in copies)

    def requires_equal(self, spark: SparkSession) -> int:
        """All is at rest, and everywhere the same; how many rows that are."""
        self.workload.wait_for_subscriber()
        last = str(self.workload.rest())
        until(lambda: last in self._rests(), f"the log has all (seed {self.seed})", timeout_s=PATIENCE_S)
        ids = self.logged()
        assert len(ids) == len(set(ids)), f"the log has an event twice (seed {self.seed})"
        self.workload.wait_for_subscriber()
        rows = 0
        with psycopg.connect(self.at.source) as source, psycopg.connect(self.at.subscriber) as subscriber:
            for table in TABLES:
                columns = self.workload.shape.columns[table.name]
                assert column_names(source, table) == columns.keys(), f"seed {self.seed}"
                wanted = rows_of(source, table, columns)
                _require_same(wanted, rows_of(subscriber, table, columns), f"{table.name}, subscriber", self.seed)
                found = self._implied(spark, table)
                _require_same(wanted, found, f"{table.name}, log", self.seed)
                rows += len(wanted)
        return rows

    def _implied(self, spark: SparkSession, table: OracleTable) -> dict[str, Row]:
        frame = Log(self.folder / "data" / "log").table(spark, self.source, table.stream)
        found: dict[str, Row] = {}
        for told in frame.select("payload", "position").collect():
            row = self.workload.shape.row(table.name, read_json(told["payload"]), told["position"].split(":")[1])
            key = key_of(table, row)
            assert key not in found, f"the log implies {table.name} {key} twice (seed {self.seed})"
            found[key] = row
        return found

    def _rests(self) -> set[str]:
        return {row["key"] for row in self._events(["stream", "key"]) if row["stream"] == RESTS.stream}

    def _events(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        return [row for file in files for row in pq.read_table(file.path, columns=list(columns)).to_pylist()]


def _require_same(wanted: Mapping[str, Row], found: Mapping[str, Row], what: str, seed: int) -> None:
    if wanted == found:
        return
    lacks, adds = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    differ = [
        f"{key} {name}: {str(row.get(name, 'absent'))[:80]!r} for {str(found[key].get(name, 'absent'))[:80]!r}"
        for key, row in wanted.items()
        if key in found
        for name in sorted(row.keys() | found[key].keys())
        if row.get(name, ...) != found[key].get(name, ...)
    ]
    raise AssertionError(
        f"seed {seed}: {what}: lacks {lacks[:_SHOWN]}, adds {adds[:_SHOWN]}, differs in {len(differ)}:"
        f" {differ[:_SHOWN]}"
    )
