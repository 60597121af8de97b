"""A change of a record's key: one event that says which key is free now, from the trigger to the source's rows; and an
outbox of version 2, which cannot say it, read on and upgraded under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Self

import psycopg
import pytest

from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.read.outbox_capture import OutboxCapture
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.repair.gap import OutboxGap
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.target import TableChoice
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Row, Scene, scene
from tests.contract.postgres.outbox_v2_scene import install_version_2, scene_of_version_2

ORDERS = "create table public.orders (id int primary key, again int, note text)"
ORDERS_TABLE = TableChoice("public.orders")


@pytest.fixture
def old(server: PostgresServer) -> Iterator[Scene]:
    """A database with a captured table, by the program of version 2."""
    with scene_of_version_2(server, ORDERS_TABLE, create=ORDERS) as found:
        yield found


def keys(rows: list[Row]) -> list[tuple[str, str | None, str | None]]:
    return [(row["op"], row["key"], row["previous_key"]) for row in rows]


def test_a_changed_key_is_one_event_that_names_the_key_it_left(server: PostgresServer) -> None:
    """GIVEN changes that alter the key, or only look so WHEN captured THEN `previous_key` is there where it was."""
    with scene(server, ORDERS_TABLE, create=ORDERS) as at:
        at.db.execute("insert into orders values (1, 1, 'a')")
        at.db.execute("update orders set id = 2")  # the other column has the value of the old key still
        at.db.execute("update orders set again = 7")
        at.db.execute("update orders set id = id, note = 'b'")
        at.db.execute("delete from orders")
        assert keys(at.drain()) == [
            ("insert", "1", None),
            ("update", "2", "1"),
            ("update", "2", None),
            ("update", "2", None),
            ("delete", "2", None),
        ]


def test_a_composite_key_is_left_as_the_object_it_was(server: PostgresServer) -> None:
    """One column of a key of two; and a key that leaves the database only as its hash."""
    create = "create table lines (order_id int, nth bigint, v int, primary key (order_id, nth));"
    create += "create table people (email text primary key, v int); create table bare (v int)"
    tables = [TableChoice("public.lines"), TableChoice("public.people", hash=("email",)), TableChoice("public.bare")]
    with scene(server, *tables, create=create) as at:
        at.db.execute("insert into lines values (1, 9007199254740993, 0); update lines set nth = 2, v = 1")
        at.db.execute("insert into people values ('a@x', 0); update people set email = 'b@x'; update people set v = 1")
        at.db.execute("insert into bare values (1); update bare set v = 2")
        rows = at.drain()
        assert keys(rows[:2])[1] == ("update", '{"nth": 2, "order_id": 1}', rows[0]["key"])
        assert '"9007199254740993"' in rows[0]["key"]
        assert [row["previous_key"] for row in rows[2:5]] == [None, rows[2]["key"], None]
        assert rows[3]["key"].startswith("sha256:") and rows[3]["key"] != rows[2]["key"]
        assert keys(rows[5:]) == [("insert", None, None), ("update", None, None)]


def test_a_row_that_moves_to_another_partition_is_deleted_and_inserted(server: PostgresServer) -> None:
    """Postgres makes two changes of it, so no key is left behind either way."""
    create = "create table parts (id int primary key, v int) partition by range (id);"
    create += "create table low partition of parts for values from (0) to (10);"
    create += "create table high partition of parts for values from (10) to (20)"
    with scene(server, TableChoice("public.parts"), create=create) as at:
        at.db.execute("insert into parts values (1, 0); update parts set id = 2; update parts set id = 12")
        assert keys(at.drain())[1:] == [("update", "2", "1"), ("delete", "2", None), ("insert", "12", None)]


def test_an_outbox_of_version_2_is_read_on(old: Scene) -> None:
    """GIVEN an outbox that nobody upgraded WHEN this program reads it THEN its events come, without what they lack."""
    old.db.execute("insert into orders values (1, 1); update orders set id = 2")
    assert keys(old.drain()) == [("insert", "1", None), ("update", "2", None)]


def test_a_lost_slot_of_version_2_is_repaired_from_a_table_without_the_column(old: Scene) -> None:
    """GIVEN no column to read it from WHEN the gap is read THEN the events are found; after an upgrade with it."""
    old.db.execute("insert into orders values (1, 1); update orders set id = 2")
    assert sorted(keys(in_gap(old))) == [("insert", "1", None), ("update", "2", None)]
    install(old.target, [ORDERS_TABLE])
    old.db.execute("update orders set id = 3")
    assert ("update", "3", "2") in keys(in_gap(old))


def in_gap(at: Scene) -> list[Row]:
    """Everything in `events`, as a repair reads it; the publication is made again on the way."""
    at.db.execute(f"alter publication {at.target.publication} set (publish = 'insert, delete')".encode())
    repair = repair_of(at.target)
    gap = repair.begin(lambda: False)
    assert isinstance(gap, OutboxGap)
    gap.floor = None
    gap.survey()
    rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
    repair.finish(gap.position)
    return rows


def test_the_upgrade_changes_a_publication_once_and_every_reader_knows_it(old: Scene) -> None:
    """GIVEN two deployments on one outbox WHEN one upgrades THEN neither sees a publication changed by a stranger."""
    other = type(old.target)(old.target.dsn, f"{old.target.slot}_o", f"{old.target.publication}_o", slots=2)
    install_version_2(other)
    before = fingerprints(old)
    install(old.target, [ORDERS_TABLE])
    for part in (old.target, *other.parts()):
        SlotReader(OutboxCapture(part)).check(SlotReader(OutboxCapture(part)).earliest(), None)
    after = fingerprints(old)
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())
    install(old.target, [ORDERS_TABLE])
    assert fingerprints(old) == after
    # AND both hear of a changed key, each of its own share
    old.db.execute("insert into orders values (1); update orders set id = 2")
    assert keys(old.drain()) == [("insert", "1", None), ("update", "2", "1")]
    shares = [keys(drained(SlotReader(OutboxCapture(part)), old)) for part in other.parts()]
    assert sorted(row for share in shares for row in share) == [("insert", "1", None), ("update", "2", "1")]


def fingerprints(at: Scene) -> dict[str, str]:
    return dict(at.db.execute("select slot, fingerprint from pgstream.readers").fetchall())


def drained(reader: SlotReader, at: Scene) -> list[Row]:
    start, end = reader.earliest(), at.position(at.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))
    rows = [row for batch in reader.read(Slice(0, start, end)) for row in batch.to_pylist()]
    reader.close()
    return rows


def test_a_publication_that_a_stranger_changed_is_not_painted_over(old: Scene) -> None:
    """GIVEN a gap that nobody repaired yet WHEN the outbox is upgraded THEN the gap is still seen."""
    start = old.source.earliest(0)
    old.db.execute(f"alter publication {old.target.publication} set (publish = 'insert, delete')".encode())
    install(old.target, [ORDERS_TABLE])
    with pytest.raises(Exception, match="was changed by somebody"):
        old.source.check({0: start})


class Load:
    """Writers whose records wander through keys of their own, and a reader that follows them from the first on."""

    def __init__(self, at: Scene) -> None:
        self._at = at
        self._writing, self._reading = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in (1, 2, 3)]
        self._reader = threading.Thread(target=self._read)
        self.steps = dict.fromkeys((1, 2, 3), 0)
        self.rows: list[Row] = []
        self.trouble: Exception | None = None

    def __enter__(self) -> Self:
        for thread in (*self._threads, self._reader):
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._writing.set()
        for thread in self._threads:
            thread.join()
        self._patience_ends = time.monotonic() + 60
        self._reading.set()
        self._reader.join()

    def goes_on(self, steps: int = 30) -> None:
        """Wait until each record changed its key so many times more."""
        goal = {number: done + steps for number, done in self.steps.items()}

        def done() -> bool:
            return self.trouble is not None or all(self.steps[one] >= least for one, least in goal.items())

        until(done, "every record changed its key")

    def _has_all(self) -> bool:
        return len(self.rows) >= sum(steps + 1 for steps in self.steps.values())

    def _write(self, number: int) -> None:
        first = number * 1_000_000
        with psycopg.connect(self._at.dsn) as db:
            db.execute("insert into orders values (%s)", (first,))
            db.commit()
            while not self._writing.is_set():
                some = 1 + self.steps[number] % 3  # several in a transaction, now and then
                for nth in range(some):
                    db.execute("update orders set id = id + 1 where id = %s", (first + self.steps[number] + nth,))
                db.commit()
                self.steps[number] += some

    def _read(self) -> None:
        source = PostgresOutbox(self._at.target)
        try:
            at = source.earliest(0)
            idle = False
            while not (idle and self._reading.is_set()):
                last_look = self._reading.is_set()
                end = source.latest({0: at}, Limit(wait_s=0.1))[0]
                source.check({0: at})
                self.rows += [row for batch in source.read(Slice(0, at, end)) for row in batch.to_pylist()]
                source.confirm(0, end)
                # On a busy machine a look may find nothing in its tenth of a second, though there is more.
                idle, at = last_look and end == at and (self._has_all() or time.monotonic() > self._patience_ends), end
        except Exception as error:  # noqa: BLE001 - told by the test
            self.trouble = error
        finally:
            source.close()


def test_an_upgrade_under_load_loses_and_doubles_nothing(old: Scene) -> None:
    """GIVEN writers and a reader at work WHEN the outbox is upgraded THEN each event is read once, whole, in order."""
    with Load(old) as load:
        load.goes_on()
        install(old.target, [ORDERS_TABLE])
        load.goes_on()
    assert load.trouble is None
    assert len(load.rows) == len({row["event_id"] for row in load.rows})
    for number, steps in load.steps.items():
        mine = [row for row in load.rows if int(row["key"]) // 1_000_000 == number]
        first = number * 1_000_000
        assert [int(row["key"]) for row in mine] == list(range(first, first + steps + 1))
        # AND from some event on each names the key it left
        named = [row["previous_key"] is not None for row in mine]
        assert named == sorted(named) and not named[1] and named[-1]
        assert all(int(row["previous_key"]) == int(row["key"]) - 1 for row in mine if row["previous_key"])
