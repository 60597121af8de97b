"""`evermark log query` of a local log: at once, without a JVM, and with errors a person can use."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from evermark.cli.main import app
from evermark.errors import ConfigError
from evermark.event import EVENT
from evermark.log import query as log_query
from evermark.log.append import DeltaLog
from evermark.log.query import NeedsSpark, query
from evermark.log.read import LogReader
from tests.contract.log.log_scene import fill

README = Path(__file__).parents[3] / "README.md"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log of one source, `shop`, with three batches of four events."""
    root = tmp_path / "log"
    fill(DeltaLog(root / "shop"), 3, rows=4)
    return root


@pytest.fixture
def file(tmp_path: Path, root: Path) -> Path:
    path = tmp_path / "evermark.yaml"
    path.write_text(f"version: 1\nname: shop\nlog: {{path: {root}}}\n")
    return path


def ask(file: Path, sql: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["log", "query", sql, "-c", str(file), *options])


def test_the_query_of_the_readme_is_answered_at_once_and_without_noise(file: Path) -> None:
    """GIVEN a small log WHEN it is asked as the README does THEN within three seconds, nothing else said, no Spark."""
    (sql,) = [line.split('"')[1] for line in README.read_text().splitlines() if line.startswith("evermark log query")]
    code = """
import sys
from evermark.cli.main import run
try:
    run(["log", "query", sys.argv[2], "-c", sys.argv[1]])
finally:
    assert not {"pyspark", "py4j"} & set(sys.modules)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, str(file), sql]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split() for line in ran.stdout.splitlines()] == [
        ["stream", "op", "count(*)"],
        ["public.orders", "insert", "12"],
    ]
    # By what it computed, not by the clock: a busy machine is no failure.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 3.0


@pytest.mark.parametrize(
    ("sql", "error", "hint"),
    [
        ("select event_di from shop", "there is no column event_di", "did you mean event_id? the columns are event_id"),
        ("select nope from shop", "there is no column nope", "the columns are event_id, source"),
        ("select x from (select op as y from shop)", "there is no column x", "the columns are y"),
        ("select * from shp", "there is no table shp", "did you mean shop? the tables are shop"),
        ("select count(* from shop", "Expected: ), found: from at Line: 1, Column: 16", "the tables are shop"),
        ("selec * from shop", "selec is not something the log can be asked", "a query begins with select"),
        ("select nothing_like_it(op) from shop", "there is no function nothing_like_it", "the SQL is that of"),
        ("select cast('a' as int) from shop", "Cannot cast string 'a' to value of Int32 type", "compared with a text"),
        (
            "select * from shop where op = 1",
            "Cannot cast string 'insert' to value of Int64 type",
            "compared with a text",
        ),
        ("select batch, batch from shop", "two columns have the same name", "as batch_2"),
        ("select 1; select 2", "it has several statements", "one at a time"),
        ("  -- nothing", "it is empty", "for example"),
    ],
)
def test_a_wrong_query_is_one_clear_line_and_a_hint(file: Path, sql: str, error: str, hint: str) -> None:
    """GIVEN a query that cannot be right THEN exit code 1, what is wrong in a line, and what there is."""
    ran = ask(file, sql)
    assert ran.exit_code == 1 and ran.stdout == ""
    told, hinted = ran.stderr.splitlines()
    assert told == f"error: query: {error}"
    assert hinted.startswith("hint: ") and hint in hinted


@pytest.mark.parametrize(
    "sql",
    [
        "drop table shop",
        "delete from shop",
        "insert into shop select * from shop",
        "create table copy as select * from shop",
        "create external table passwd stored as csv location '/etc/passwd'",
        "copy shop to 'FOLDER/out.json'",
        "/* harmless */ copy (select 1) to 'FOLDER/out.json'",
        "explain analyze copy (select 1) to 'FOLDER/out.json'",
        "set datafusion.runtime.memory_limit = '1G'",
    ],
)
@pytest.mark.parametrize("engine", ["auto", "datafusion", "spark"])
def test_a_query_only_reads(file: Path, tmp_path: Path, sql: str, engine: str) -> None:
    """GIVEN a statement that makes, changes or removes something THEN every engine is spared it."""
    ran = ask(file, sql.replace("FOLDER", str(tmp_path)), "--engine", engine)
    assert ran.exit_code == 1 and "is not something the log can be asked" in ran.stderr
    assert not (tmp_path / "out.json").exists()


def test_rows_are_json_a_line_each_up_to_the_limit(file: Path) -> None:
    """GIVEN more rows than asked for WHEN reported as JSON THEN so many lines, with values as JSON has them."""
    ran = ask(
        file, "select event_id, batch, event_time, flags, tx from shop order by position", "--limit", "2", "--json"
    )
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [
        {
            "event_id": f"0-1-{row}",
            "batch": 1,
            "event_time": "2026-11-01T12:00:00.123456",
            "flags": ["repaired"],
            "tx": None,
        }
        for row in range(2)
    ]


def test_a_large_answer_is_read_only_as_far_as_it_is_wanted(root: Path) -> None:
    """GIVEN batches beyond the limit THEN rows of the first ones, all columns in their order."""
    columns, rows = query(root, "select * from shop", 5)
    assert columns == EVENT.names
    assert len(list(rows)) == 5


def test_the_tables_can_be_listed(file: Path) -> None:
    """GIVEN one source THEN `show tables` names it, and nothing of the engine's own."""
    assert ask(file, "show tables").stdout.split() == ["table_name", "shop"]


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("select get_json_object(payload, '$.n') from shop", "only Spark has the function get_json_object"),
        ("select payload:n from shop", "this means the same to Spark alone: payload:n"),
        ("select * from shop where op rlike 'in.*'", "this means the same to Spark alone"),
        ("select count(distinct key, op) from shop", "DataFusion cannot do this (COUNT DISTINCT with multiple"),
        ("select batch div 2 from shop", "this means the same to Spark alone"),
        ("select batch / 2 from shop", "this means the same to Spark alone: batch / 2"),
        ("select flags[0] from shop", "this means the same to Spark alone: flags[0]"),
        ("select concat(op, key) from shop", "this means the same to Spark alone"),
        ("select cast(event_time as bigint) from shop", "this means the same to Spark alone"),
        ('select * from shop where op = "insert"', "insert means something only to Spark"),
        ('select * from shop where "op" = 1', "what stands in double quotes is a text only to Spark"),
        ("select '\\n' as line from shop", "a backslash means something only to Spark"),
        ("select batch as b, b + 1 as c from shop", "b means something only to Spark"),
        ("select * from shop order by all", "all means something only to Spark"),
    ],
)
def test_what_only_spark_can_answer_is_told_apart(root: Path, sql: str, why: str) -> None:
    """GIVEN functions and syntax of Spark's THEN it is left to Spark, not called wrong."""
    with pytest.raises(NeedsSpark) as caught:
        query(root, sql, 10, spark_knows=lambda name: name == "get_json_object")
    assert why in caught.value.message


def test_what_takes_too_much_memory_is_left_to_spark(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a bound on memory WHEN a join needs more THEN Spark is needed; the process does not grow for ever."""
    monkeypatch.setattr(log_query, "MEMORY_BYTES_MAX", 1024**2)
    fill(DeltaLog(root / "shop"), 4, first=4, rows=50_000)
    with pytest.raises(NeedsSpark, match="it needs more than 1 MiB of memory"):
        query(root, "select a.event_id from shop a join shop b on a.event_id = b.event_id order by 1", 10)


def test_an_engine_that_was_asked_for_is_not_replaced(file: Path) -> None:
    """GIVEN --engine datafusion WHEN only Spark could answer THEN that is said, and no Spark is started."""
    ran = ask(file, "select get_json_object(payload, '$.n') from shop", "--engine", "datafusion")
    assert ran.exit_code == 1
    assert "only Spark has the function get_json_object" in ran.stderr and "--engine spark" in ran.stderr


def test_the_own_dialect_of_the_engine_can_be_asked_for(file: Path) -> None:
    """GIVEN --engine datafusion THEN a query means what it means there: whole numbers divide to a whole number."""
    sql = "select 7 / 2 as n, flags[1] as f from shop limit 1"
    assert json.loads(ask(file, sql, "--engine", "datafusion", "--json").stdout) == {"n": 3, "f": "repaired"}
    ran = ask(file, 'select * from shop where op = "insert"', "--engine", "datafusion")
    assert "there is no column insert" in ran.stderr and "a text stands in single quotes" in ran.stderr


def test_a_file_that_is_missing_or_damaged_is_no_fault_of_the_query(file: Path, root: Path) -> None:
    """GIVEN a log one file of which was deleted, or cut off WHEN all is asked for THEN that
    file is named, with what to do; a question that the list of files answers is answered."""
    victim = Path(LogReader(root / "shop").files()[1].path)
    whole = victim.read_bytes()
    for state, damage in (("missing", victim.unlink), ("damaged", lambda: victim.write_bytes(whole[:100]))):
        damage()
        ran = ask(file, "select key, op from shop")
        assert f"error: the file {victim} of the log is {state}" in ran.stderr and ran.exit_code == 1
        assert "put it back from a copy" in ran.stderr
        assert ask(file, "select count(*) as n from shop").exit_code == 0


def test_a_log_that_has_nothing_yet_says_so(tmp_path: Path) -> None:
    """GIVEN no log WHEN asked THEN that is the hint."""
    with pytest.raises(ConfigError) as caught:
        query(tmp_path / "none", "select * from shop", 10)
    assert caught.value.message == "query: there is no table shop"
    assert caught.value.hint == "the log has nothing yet"


def test_times_are_utc_wherever_the_machine_is(file: Path) -> None:
    """GIVEN a machine in another zone THEN the same times."""
    code = "import sys; from evermark.cli.main import run; run(sys.argv[1:])"
    command = [sys.executable, "-c", code, "log", "query", "select max(event_time) as t from shop", "--json"]
    env = {**os.environ, "TZ": "Asia/Tokyo"}
    ran = subprocess.run([*command, "-c", str(file)], capture_output=True, text=True, check=True, env=env)
    assert json.loads(ran.stdout) == {"t": "2026-11-01T12:00:00.123456"}
