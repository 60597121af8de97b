"""The two engines that answer `evermark log query` mean the same."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from evermark import Log
from evermark.cli.console import shown_as_json
from evermark.errors import ConfigError
from evermark.event import taken_batch
from evermark.log import query as local
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.write import BatchWriter
from evermark.spark import query as by_spark
from tests.unit.event_files import written_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = datetime(2026, 11, 1, 12, 0, 0, 123_456, tzinfo=UTC)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Events with all that a column can hold: null, empty, bytes, Unicode, times before 1970 and without a fraction."""
    columns: dict[str, object] = {
        "event_id": ["a", "b", "c"],
        "position": ["1", "2", "3"],
        "stream": ["public.orders", "public.users", "public.orders"],
        "key": ["1", None, ""],
        "op": ["insert", "update", "delete"],
        "origin_seq": [2**53 + 1, None, -1],
        "event_time": [NOON, None, datetime(1969, 7, 20, 20, 17, 40, tzinfo=UTC)],
        "payload": ['{"total": 1.5}', "Ünïcode \n line", None],
        "schema_version": [1, 2, None],
        "flags": [["repaired", "recovered"], [], None],
        "bytes": [b"\x00\xff", b"", None],
    }
    folder = tmp_path / "shop"
    log = DeltaLog(folder)
    file = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(columns, 3)])
    assert file is not None
    log.commit(Append(0, 1, 1, "", "", (file,)))
    return tmp_path


def as_json(found: tuple[list[str], Any]) -> list[str]:
    columns, rows = found
    return [shown_as_json(dict(zip(columns, row, strict=True))) for row in rows]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from shop order by position",
        "select stream, op, count(*) as n from shop group by all order by stream, op",
        "select event_time, ingested_at, max(event_time) over () as newest from shop order by event_time, position",
        "select key, event_time, flags, bytes from shop order by key, position",
        "select key from shop order by key desc",
        "select flags is null as n, origin_seq + 1 as s, null as nothing from shop order by position limit 1",
        "select case when op = 'insert' then 1 end as c, -batch as m, rank() over (order by op) as r from shop",
        "select event_id from shop where key = '1' or batch = '7' or event_time < now() - interval '1 hour' order by 1",
        "select cast('1.50' as decimal(10, 2)) as d, cast(event_time as date) as day from shop where event_id = 'a'",
        "select date_trunc('hour', event_time) as h, sum(batch) as b, avg(batch) as a from shop group by 1 order by 1",
        "with few as (select * from shop where stream like 'public.o%') select count(distinct key) as n from few",
        "select event_id from shop where event_time >= '2026-11-01' and event_time < timestamp '2026-11-02 00:00:00'",
        "select a.event_id as a, b.event_id as b from shop a left join shop b on a.key = b.key order by 1",
        "select event_id from shop where op in ('insert', 'delete') and payload is not null",
        "select length(payload) as n, upper(op) as o, coalesce(key, '-') as k from shop order by position",
    ],
)
def test_both_engines_give_the_same_rows(spark: SparkSession, root: Path, sql: str) -> None:
    """GIVEN nulls, arrays, bytes, times and numbers WHEN both are asked THEN the same JSON, line for line."""
    mine = as_json(local.query(root, sql, 100))
    assert mine == as_json(by_spark.query(spark, Log(root), sql, 100))
    assert mine


def test_structs_keep_their_names_with_both_engines(spark: SparkSession, root: Path) -> None:
    """GIVEN a struct, also within an array THEN names and values, not a list of values."""
    sql = "select named_struct('a', 1) as s"
    assert as_json(local.query(root, sql, 1, own_dialect=True)) == ['{"s": {"a": 1}}']
    assert as_json(by_spark.query(spark, Log(root), sql, 1)) == ['{"s": {"a": 1}}']
    nested = by_spark.query(spark, Log(root), "select array(named_struct('a', 1)) as s", 1)
    assert as_json(nested) == ['{"s": [{"a": 1}]}']


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("select nope from shop", "`nope` cannot be resolved"),
        ("select * from nowhere", "The table or view `nowhere` cannot be found"),
        ("select count(* from shop", "Syntax error at or near 'from'"),
    ],
)
def test_a_query_that_spark_refuses_is_one_line_too(
    spark: SparkSession, root: Path, sql: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a wrong query THEN one line without codes and stacks, a hint with the columns, and nothing on stderr."""
    logging.getLogger("SQLQueryContextLogger").disabled = False
    with pytest.raises(ConfigError) as caught:
        by_spark.query(spark, Log(root), sql, 10)
    assert told in caught.value.message and "\n" not in caught.value.message
    assert "[" not in caught.value.message.split("Did you mean")[0] and "SQLSTATE" not in caught.value.message
    assert "the tables are shop, their columns event_id, source" in caught.value.hint
    assert capfd.readouterr().err == ""


def test_functions_of_spark_are_known_without_starting_it() -> None:
    """GIVEN a name THEN whether Spark SQL has it, so that a slip is not asked of Spark."""
    assert by_spark.knows_function("get_json_object") and by_spark.knows_function("From_JSON")
    assert not by_spark.knows_function("nothing_like_it")


def test_a_file_that_was_filled_in_is_read_by_others(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN rows of a copy that were taken over as they were written WHEN the log is asked by programs that are not
    ours (delta-rs, and Spark's own reader of Parquet) THEN each gives what is in it, and finds it by its batch."""
    rows = taken_batch(
        {name: [f"{name} {n}" for n in range(200)] for name in ("event_id", "key", "stream", "op", "payload")}
        | {"position": [""] * 200, "flags": [[]] * 200},
        200,
    )
    log = DeltaLog(tmp_path / "shop")
    file = BatchWriter(tmp_path / "shop", "shop", 0, 1).take_over(written_events(tmp_path, rows, rows))
    log.commit(Append(0, 1, 1, "", "", (file,)))
    wanted = pq.read_table(tmp_path / "shop" / file.path).sort_by("position")
    columns = [name for name in wanted.schema.names if name != "flags"]
    sql = f"select {', '.join(columns)} from shop where batch = 1 order by position"
    _, found = local.query(tmp_path, sql, 1000)
    mine = [[value.replace(tzinfo=UTC) if isinstance(value, datetime) else value for value in row] for row in found]
    assert mine == [list(row.values()) for row in wanted.select(columns).to_pylist()]
    theirs = spark.read.parquet(str(tmp_path / "shop" / file.path))
    for name in columns:
        values = [row[0] for row in theirs.where("batch = 1").orderBy("position").select(name).collect()]
        told = [value.astimezone(UTC) if isinstance(value, datetime) else value for value in values]  # in local time
        assert told == wanted[name].to_pylist(), name
    assert theirs.where("batch = 2").count() == 0
