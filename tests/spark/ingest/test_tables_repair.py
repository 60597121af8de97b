"""Tables of a real Postgres compared with the log: after a lost slot the log implies the very rows there are (P7)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from evermark import Log
from evermark.errors import BusyError, SetupError
from evermark.ingest.repair.steps import RepairTarget, batches_of
from evermark.log import kept_table
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.tables import repair as tables_repair
from evermark.spark import repair
from evermark.spark.repair import found_missing
from evermark.testing.servers import PostgresServer
from tests.contract.postgres.tables_scene import Row, Scene, scene
from tests.contract.postgres.test_tables_random import CREATE, NAMES, Writers, there

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Taken:
    """The log of a scene, taken batch by batch; or not taken, for a gap."""

    def __init__(self, at: Scene, root: Path) -> None:
        self.scene, self.folder = at, root / "shop"
        self.at, self.batch = at.source.earliest(0), 0
        self.log = DeltaLog(self.folder)

    def take(self) -> None:
        source = self.scene.source
        while (end := source.latest({0: self.at}, Limit(wait_s=0.3))[0]) != self.at:
            self._append(source.read(Slice(0, self.at, end)), end)
            source.confirm(0, end)

    def _append(self, rows: Any, end: str) -> None:
        file = BatchWriter(self.folder, "shop", 0, self.batch + 1).write_all(rows)
        if file is not None:
            self.batch += 1
            self.log.commit(Append(0, self.batch, 1, self.at, end, (file,)))
        self.at = end

    def repair(self, spark: SparkSession) -> list[Row]:
        """As nobody asked for; the rows that were added."""
        repair = self.scene.source.repair(0)
        added: list[Row] = []
        try:
            gap = repair.begin(lambda: False, self.at)
            wanted = RepairTarget("shop", 0, self.batch, 1, self.at)
            found = found_missing(spark, gap, LogReader(self.folder).files(), wanted, self.folder)
            for taken in batches_of(found, gap, wanted):
                for file in taken.files:
                    added += pq.read_table(self.folder / file.path).to_pylist()
                if taken.files:
                    self.log.commit(taken)
                    self.batch = taken.batch
            repair.finish(gap.position)
            self.at = gap.position
        finally:
            repair.close()
        return added

    def implied(self, spark: SparkSession, name: str) -> dict[str, Any]:
        rows = Log(self.folder.parent).table(spark, "shop", f"public.{name}").select("key", "payload").collect()
        assert len(rows) == len({row["key"] for row in rows})
        return {row["key"]: json.loads(row["payload"]) for row in rows}


def lose(at: Scene) -> None:
    at.source.close()
    at.run(f"select pg_drop_replication_slot('{at.settings.slot}')")


def change_publication(at: Scene) -> None:
    name = at.settings.publication
    at.run(f"alter publication {name} drop table plain", f"alter publication {name} add table plain")


# Tables that are kept one by one, all of them by one query over the log, and those of a small log without a query.
@pytest.mark.parametrize(
    ("harm", "kept_max", "kept_from"), [(lose, 99, 0), (change_publication, 0, 0), (lose, 0, 50_000)]
)
def test_p7_a_lost_slot_of_tables_is_repaired_exactly(
    spark: SparkSession,
    pg_server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Any,
    kept_max: int,
    kept_from: int,
) -> None:
    """GIVEN random changes, keys, truncates, DDL and large values among them, some never read WHEN tables and log are
    compared THEN they are equal, a second look finds nothing more, and reading goes on."""
    monkeypatch.setattr(kept_table, "KEPT_FROM_ROWS", kept_from)
    monkeypatch.setattr(repair, "_KEPT_STREAMS_MAX", kept_max)
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    with scene(pg_server, *(f"public.{name}" for name in NAMES), create=CREATE) as at:
        at.run("insert into plain values (100, 1, 'from before', now())")
        taken = Taken(at, tmp_path)
        writers = Writers(at, random.Random(seed))

        def wander() -> None:
            for _ in range(150):
                writers.step()
            for conn in writers.open:
                conn.commit()

        wander()
        taken.take()
        wander()  # nobody reads these
        at.run("delete from plain where id = 100", "update whole set n = n + 1 where id < 10")
        harm(at)
        added = taken.repair(spark)
        assert {row["op"] for row in added} <= {"insert", "update", "delete"}, f"seed {seed}"
        assert all(row["flags"] == ["repaired"] and row["position"] < taken.at for row in added)
        for name in NAMES:
            assert taken.implied(spark, name) == there(at, name), f"seed {seed}, {name}"
        harm(at)
        assert taken.repair(spark) == [], f"seed {seed}"
        wander()
        taken.take()
        wander()
        writers.end()
        harm(at)
        assert taken.repair(spark), f"seed {seed}"
        for name in NAMES:
            assert taken.implied(spark, name) == there(at, name), f"seed {seed}, {name}"


def test_p7_what_is_hidden_stays_hidden_and_pieces_are_ranges_of_keys(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN excluded and hashed columns, a filter, and a large table WHEN a gap is closed THEN what is found is as the
    slot would have told it."""
    monkeypatch.setattr(tables_repair, "PIECE_ROWS", 100)
    create = "create table users (id int, site text, email text, password text, primary key (site, id))"
    chosen = {
        "name": "public.users", "exclude": ["password"], "hash": ["email"], "where": "site <> 'secret'",
    }  # fmt: skip
    fill = "insert into users select n, case when n % 10 = 0 then 'secret' else 'a''b' end, 'm' || n, 'pw' from"
    with scene(pg_server, chosen, create=create) as at:
        taken = Taken(at, tmp_path)
        at.run(f"{fill} generate_series(1, 50) n")
        taken.take()
        at.run(f"{fill} generate_series(51, 1000) n", "update users set id = -id where id = 7", "analyze users")
        lose(at)
        repair = at.source.repair(0)
        gap = repair.begin(lambda: False, taken.at)
        assert len(gap.pieces) > 5
        repair.close()
        added = taken.repair(spark)
        assert len(added) == 950 - 95 + 2
        assert not [row for row in added if "pw" in str(row) or "secret" in str(row) or '"m' in str(row["payload"])]
        assert {row["op"] for row in added if row["key"] == '{"id": 7, "site": "a\'b"}'} == {"delete"}
        # AND it is what a copy of the rows by the slot would say
        at.run("create table told as select * from users", "truncate users", "insert into users select * from told")
        before = taken.implied(spark, "users")
        taken.take()
        assert taken.implied(spark, "users") == before


def test_p7_a_table_that_changes_under_its_repair_is_no_failure_of_spark(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN a gap that is to be looked through WHEN a column goes, or the table is emptied, before tasks read it THEN
    the repair is told that the place was busy, which spends no try, and the next one finds what is there."""
    create = "create table orders (id int primary key, n int, note text)"
    with scene(pg_server, "public.orders", create=create) as at:
        taken = Taken(at, tmp_path)
        at.run("insert into orders select n, 0, 'x' from generate_series(1, 20) n")
        taken.take()
        lose(at)
        for harm, said in (("alter table orders drop column note", "altered"), ("truncate orders", "truncated")):
            at.run("insert into orders (id, n) values (100, 1) on conflict do nothing")
            repair = at.source.repair(0)
            gap = repair.begin(lambda: False, taken.at)
            at.run(harm)
            wanted = RepairTarget("shop", 0, taken.batch, 1, taken.at)
            with pytest.raises(BusyError, match=said) as caught:
                found_missing(spark, gap, LogReader(taken.folder).files(), wanted, taken.folder)
            assert caught.value.hint == "the repair begins again by itself"
            repair.close()
        at.run("insert into orders values (1, 5)")
        taken.repair(spark)
        assert taken.implied(spark, "orders") == {"1": {"id": 1, "n": 5}}


@pytest.mark.parametrize("kept_from", [0, 50_000])
def test_p7_rows_that_the_log_has_without_a_key_are_gone_after_a_repair(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_from: int
) -> None:
    """GIVEN a table that got its first key after rows were inserted WHEN the slot is lost THEN a truncate, which is all
    that can name those rows, and the rows there are; the other table is compared as ever, and a second look finds
    nothing."""
    monkeypatch.setattr(kept_table, "KEPT_FROM_ROWS", kept_from)
    create = """
    create table bare (n int, v int); alter table bare replica identity full;
    create table plain (id int primary key, v int);
    """
    with scene(pg_server, "public.bare", "public.plain", create=create) as at:
        taken = Taken(at, tmp_path)
        at.run("insert into bare values (1, 1), (2, 1)", "insert into plain values (1, 1), (2, 1)")
        taken.take()
        at.run(
            "alter table bare add primary key (n)",
            "alter table bare replica identity default",
            "update bare set v = 2 where n = 1",
        )
        taken.take()
        at.run("delete from bare where n = 2", "delete from plain where id = 2")
        lose(at)
        added = taken.repair(spark)
        assert [(row["stream"], row["op"], row["key"]) for row in added] == [
            ("public.bare", "truncate", None), ("public.plain", "delete", "2"), ("public.bare", "insert", "1"),
        ]  # fmt: skip
        assert all(row["flags"] == ["repaired"] and row["position"] < taken.at for row in added)
        assert taken.implied(spark, "bare") == {"1": {"n": 1, "v": 2}}
        assert taken.implied(spark, "plain") == {"1": {"id": 1, "v": 1}}
        lose(at)
        assert taken.repair(spark) == []
        at.run("insert into bare values (3, 1)")
        taken.take()
        assert taken.implied(spark, "bare").keys() == {"1", "3"}


def test_p7_a_table_without_a_key_is_named_and_a_person_may_skip(
    spark: SparkSession, pg_server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN a table whose rows cannot be told apart WHEN the slot is lost THEN the gap is not closed by itself, and the
    table is named; WHEN a person skips it THEN reading goes on."""
    create = "create table bare (n int); alter table bare replica identity full"
    with scene(pg_server, "public.bare", create=create) as at:
        taken = Taken(at, tmp_path)
        at.run("insert into bare values (1)")
        taken.take()
        lose(at)
        with pytest.raises(SetupError, match=r"bare .*has no key") as caught:
            taken.repair(spark)
        assert "--choice skip" in caught.value.hint
        repair = at.source.repair(0)
        gap = repair.begin(lambda: False)
        repair.finish(gap.position)
        repair.close()
        at.source.check({0: gap.position})
