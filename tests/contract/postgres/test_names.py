"""Tables whose names need quotes in SQL, wherever a table is named: the file, the command line, printed SQL, doctor."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.cli.main import app
from evermark.errors import SetupError
from evermark.observe.finding import Grade
from evermark.secrets import Plain
from evermark.sources.postgres.admin.doctor import judged
from evermark.sources.postgres.admin.examine import examine
from evermark.sources.postgres.admin.install import install, install_sql, unwatch
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.postgres.outbox_scene import list_tables, scene

ODD = {
    'public."Orders"': "public.Orders",
    '"My Shop"."order items"': "My Shop.order items",
    'public."it\'s 50% \\ off"': "public.it's 50% \\ off",
    'public."say ""hi"""': 'public.say "hi"',
    'public."user"': "public.user",
    "public.größe": "public.größe",
}
CREATE = 'create schema "My Shop"; create table public.orders (id int primary key);' + "".join(
    f'create table {name} (id int primary key, "Pass Word" text, "it\'s" text);' for name in ODD
)


def odd_tables() -> list[TableChoice]:
    return [TableChoice(name, exclude=("Pass Word",), hash=("it's",)) for name in ODD]


def test_tables_with_odd_names_are_captured_and_released(server: PostgresServer) -> None:
    """GIVEN quoted names WHEN captured THEN each table has its own stream, the hidden columns stay, and it lets go."""
    with scene(server, *odd_tables(), create=CREATE) as at:
        for name in ODD:
            at.db.execute(f"insert into {name} values (1, 'geheim', 'x'); truncate {name}".encode())
        at.db.execute("insert into public.orders values (7)")  # not captured: it is not "Orders"
        rows = at.drain()
        assert [(row["op"], row["stream"]) for row in rows] == [
            (op, stream) for stream in ODD.values() for op in ("insert", "truncate")
        ]
        inserted = [json.loads(row["payload"]) for row in rows if row["op"] == "insert"]
        assert all(set(row) == {"id", "it's"} and row["it's"].startswith("sha256:") for row in inserted)
        assert [table.name for table in list_tables(at.target)] == sorted(ODD.values())
        looked = judged(examine(at.target), at.target, None)
        assert [(f.check, f.grade) for f in looked if f.check in ("tables", "triggers")] == [("tables", Grade.OK)]
        assert unwatch(at.target, list(ODD)) == [f"{name} is not captured any more" for name in ODD]
        assert list_tables(at.target) == []


def test_printed_sql_captures_tables_with_odd_names(server: PostgresServer) -> None:
    """GIVEN the SQL for a DBA WHEN run with psql THEN it captures the same tables."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(CREATE.encode())
        target = PostgresTarget(Plain(dsn), "odd_slot", "odd_pub")
        psql = [server.binaries.folder / "psql", dsn, "-v", "ON_ERROR_STOP=1", "-q"]
        script = install_sql(target, odd_tables(), role=None)
        done = subprocess.run(psql, input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert [table.name for table in list_tables(target)] == sorted(ODD.values())
        db.execute("select pg_drop_replication_slot('odd_slot')")


def test_two_tables_that_come_to_one_stream_are_never_merged(server: PostgresServer) -> None:
    """GIVEN a."b.c" and "a.b".c WHEN both are to be captured, at once or one after the other THEN it is refused."""
    create = 'create schema a; create schema "a.b"; create table a."b.c" (id int); create table "a.b".c (id int)'
    first, second = TableChoice('a."b.c"'), TableChoice('"a.b".c')
    with scene(server, first, create=create) as at:
        with pytest.raises(SetupError, match=r"would both be stream a\.b\.c"):
            install(at.target, [first, second])
        with pytest.raises(SetupError, match=r'stream a\.b\.c is that of table a\."b\.c" already'):
            install(at.target, [second])
        at.db.execute('insert into a."b.c" values (1); insert into "a.b".c values (2)')
        assert [json.loads(row["payload"]) for row in at.drain()] == [{"id": 1}]


def test_a_table_renamed_after_capture_does_not_share_its_stream_with_its_successor(server: PostgresServer) -> None:
    """GIVEN orders renamed and made anew WHEN the new one is captured THEN it is refused until the old one is gone."""
    orders = TableChoice("public.orders")
    with scene(server, orders, create="create table orders (id int primary key)") as at:
        at.db.execute("alter table orders rename to orders_old; create table orders (id int primary key)")
        with pytest.raises(SetupError, match=r"stream public\.orders is that of table public\.orders_old already"):
            install(at.target, [orders])
        unwatch(at.target, ["public.orders_old"])
        assert install(at.target, [orders]) == ["public.orders captured"]


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment that captures a table with capitals, named in its file."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(f"""
version: 1
name: odd
data: {tmp_path / "data"}
sources:
  shop: {{type: postgres, dsn: "${{PG_DSN}}", tables: ['public."Orders"', {{name: '"it''s"', exclude: [Pass Word]}}]}}
""")
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            'create table orders (id int); create table "Orders" (id int); create table "it\'s" ("Pass Word" text)'
        )
    return path


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert "Traceback" not in result.output
    return result


def streams(pg_dsn: str) -> list[str]:
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        return [row[0] for row in conn.execute("select name from pgstream.streams order by id").fetchall()]


def test_the_file_and_the_command_line_name_the_table_that_is_meant(file: Path, pg_dsn: str) -> None:
    """GIVEN "Orders" and orders WHEN one is named THEN that one is captured, listed, found well by doctor, released."""
    done = invoke("source", "install", "-c", file)
    assert done.exit_code == 0, done.output
    assert 'public."Orders": stream public.Orders captured' in done.stderr
    assert streams(pg_dsn) == ["public.Orders", "public.it's"]
    listed = json.loads(invoke("source", "list", "--json", "-c", file).stdout)
    assert listed[0]["tables"] == ['public."Orders"', 'public."it\'s"']
    found = json.loads(invoke("doctor", "--json", "-c", file).stdout)
    assert "not captured" not in json.dumps(found)
    released = invoke("source", "uninstall", "--table", '"Orders"', "-c", file)
    assert released.exit_code == 0 and 'public."Orders" is not captured any more' in released.stderr
    assert 'public."Orders" stands in the file' in released.stderr
    assert invoke("source", "uninstall", "--yes", "-c", file).exit_code == 0


def test_capitals_without_quotes_capture_nothing_and_say_what_to_write(file: Path, pg_dsn: str) -> None:
    """GIVEN public.Orders on the command line WHEN installed THEN exit code 2, both readings named, nothing made."""
    refused = invoke("source", "install", "--table", "public.Orders", "-c", file)
    said = " ".join(refused.stderr.replace("│", " ").split())
    assert refused.exit_code == 2
    assert 'public."Orders" is the table with capitals' in said and "public.orders the one without" in said
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        assert conn.execute("select to_regnamespace('pgstream')").fetchone() == (None,)
