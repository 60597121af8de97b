"""Tables captured and released under a reader, partitions maintained, and an outbox removed whatever state it is in."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.cli.main import app
from evermark.secrets import Plain
from evermark.sources.postgres.admin.examine import untaken_rows
from evermark.sources.postgres.admin.install import install, install_sql, uninstall, unwatch
from evermark.sources.postgres.outbox import maintain
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.slots import spare_name, walsender
from evermark.sources.postgres.target import TableChoice
from evermark.testing.lost_slot import lose
from evermark.testing.servers import PostgresServer, postgres_server, system_binaries
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Scene, list_tables, scene

CREATE = "create table orders (id int primary key); create table users (id int primary key)"
ORDERS = TableChoice("public.orders")
PLAYBOOK = Path(__file__).resolve().parents[3] / "docs" / "playbook.md"
FILE = """
version: 1
name: shop
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders, public.users], events_retention: 2d}
"""


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Each Postgres at hand, with slots that can be lost."""
    settings = {"max_wal_size": "64MB", "wal_keep_size": "0"}
    with postgres_server(tmp_path_factory.mktemp("upkeep"), settings, binaries=request.param) as found:
        yield found


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    """Two tables, one of them captured."""
    with scene(server, ORDERS, create=CREATE) as found:
        yield found


def keys(at: Scene, start: str) -> list[tuple[str, str]]:
    return [(row["stream"], row["key"]) for row in at.drain(start)]


def left(at: Scene) -> int:
    """How many things of ours are in the database."""
    return int(
        at.value(
            """select count(*) from (select 1 from pg_publication union all
               select 1 from pg_replication_slots where slot_name like %s union all
               select 1 from pg_trigger where tgname ~ '^!?pgstream' union all
               select 1 from pg_namespace where nspname = 'pgstream') x""",
            f"{at.target.slot}%",
        )
    )


def test_a_table_is_captured_and_released_while_the_source_is_read(at: Scene) -> None:
    """GIVEN a reader WHEN a table is added and another released THEN it reads on, and sees exactly what it should."""
    start = at.source.earliest(0)
    at.db.execute("insert into orders values (1); insert into users values (1)")
    assert keys(at, start) == [("public.orders", "1")]
    start = at.position(at.flush_lsn())
    # WHEN users are captured, too
    install(at.target, [ORDERS, TableChoice("public.users")])
    at.db.execute("insert into orders values (2); insert into users values (2)")
    assert keys(at, start) == [("public.orders", "2"), ("public.users", "2")]
    start = at.position(at.flush_lsn())
    # AND orders are not any more: what they wrote before is still read
    at.db.execute("insert into orders values (3)")
    assert unwatch(at.target, ["public.orders"]) == ["public.orders is not captured any more"]
    assert unwatch(at.target, ["public.orders"]) == ["public.orders was not captured"]
    at.db.execute("insert into orders values (4); insert into users values (4); truncate orders")
    assert keys(at, start) == [("public.orders", "3"), ("public.users", "4")]
    assert [table.name for table in list_tables(at.target)] == ["public.users"]


def test_uninstall_removes_a_slot_that_is_lost_and_the_one_that_was_to_replace_it(
    at: Scene, server: PostgresServer
) -> None:
    """GIVEN a lost slot and `<slot>_mend` WHEN uninstalled THEN nothing is left, and the user's tables work."""
    at.source.close()
    lose(server, at.target.slot)
    at.db.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (spare_name(at.target.slot),))
    uninstall(at.target)
    assert left(at) == 0
    at.db.execute("insert into orders values (1)")


def test_uninstall_removes_a_slot_that_a_dead_reader_still_holds(at: Scene) -> None:
    """GIVEN a server process that decodes for nobody WHEN uninstalled THEN it is ended, and nothing is left."""
    at.source.close()
    with closing(walsender(at.target)) as reader:
        options = f"proto_version '1', publication_names '{at.target.publication}'"
        command = f'START_REPLICATION SLOT "{at.target.slot}" LOGICAL 0/0 ({options})'
        reader.pgconn.send_query(command.encode())
        active = "select active from pg_replication_slots where slot_name = %s"
        until(lambda: bool(at.value(active, at.target.slot)), "the slot is held")
        uninstall(at.target)
    assert left(at) == 0


def test_the_printed_role_can_close_a_gap(at: Scene, server: PostgresServer) -> None:
    """GIVEN a role with the printed rights alone WHEN a slot is lost THEN it reads every partition, later ones too."""
    at.db.execute("drop role if exists printed")
    at.db.execute("create role printed login replication password 'x'")
    script = install_sql(at.target, [ORDERS], role="printed")
    psql = [server.binaries.folder / "psql", at.dsn, "-v", "ON_ERROR_STOP=1", "-q"]
    done = subprocess.run(psql, input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    info = psycopg.conninfo.make_conninfo(at.dsn, user="printed", password="x", passfile="")
    target = replace(at.target, dsn=Plain(info))
    try:
        # GIVEN a partition that the role had made itself, and events in it and in the default one
        for (name,) in at.db.execute("select inhrelid::regclass::text from pg_inherits").fetchall():
            if "events_p" in name and "pkey" not in name:
                at.db.execute(f"drop table {name}".encode())
        at.db.execute("insert into pgstream.events (stream, created_at) values ('s', '2020-01-01')")
        assert maintain(target)[0] > 7
        at.db.execute("insert into orders values (1)")
        at.source.close()
        lose(server, at.target.slot)
        # WHEN it closes the gap
        with closing(repair_of(target)) as repair:
            gap = repair.begin(lambda: False)
            rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
            repair.finish(gap.position)
        # THEN both events were found
        assert {row["stream"] for row in rows} == {"public.orders", "s"}
    finally:
        at.db.execute("drop owned by printed")
        at.db.execute("drop role printed")


def test_the_playbook_removes_everything_by_hand(at: Scene) -> None:
    """GIVEN the statements of the playbook WHEN a person runs them THEN all of them work, and nothing is left."""
    at.source.close()
    uninstall(at.target)
    install(replace(at.target, slot="evermark_shop_shop", publication="evermark_shop_shop"), [ORDERS])
    text = PLAYBOOK.read_text()
    for section in ("## What is there", "## Replay", "## The disk fills with WAL", "## Uninstalling"):
        block = text.partition(section)[2].partition("```sql")[2].partition("```")[0]
        at.db.execute(block.encode())
    assert left(at) == 0
    assert at.value("select count(*) from pg_replication_slots where slot_name like 'evermark_shop%%'") == 0


def test_retention_is_as_configured(at: Scene) -> None:
    """GIVEN a partition of five days ago WHEN maintained with 7 days and with 2 THEN only the second lets it go."""
    day = str(at.value("select to_char((now() at time zone 'UTC')::date - 5, 'YYYYMMDD')"))
    at.db.execute(
        f"create table pgstream.events_p{day} partition of pgstream.events"
        f" for values from ('{day}'::date) to ('{day}'::date + 1)".encode()
    )
    there = f"select to_regclass('pgstream.events_p{day}') is not null"
    short = replace(at.target, events_retention_s=2 * 86_400.0)

    def maintained(target: object) -> tuple[int, int, int]:
        at.emit("s", "more")
        at.drain()
        at.source.close()  # confirms what was held back
        return maintain(short if target is short else at.target)

    assert [maintained(at.target) for _ in range(2)] == [(0, 0, 0)] * 2 and at.value(there) is True
    assert maintained(short) == (0, 0, 1)  # sealed: it goes when that is confirmed
    assert maintained(short) == (0, 1, 0) and at.value(there) is False


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment that was never started, on the test's own database."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE + f"data: {tmp_path / 'data'}\n")
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(CREATE)
    return path


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(app, ["source", *[str(arg) for arg in args]])
    assert "Traceback" not in result.output
    return result


def test_maintain_tells_what_it_did(file: Path, pg_dsn: str) -> None:
    """GIVEN an outbox without tomorrow's partition WHEN maintained THEN it is made, and said to be."""
    assert invoke("install", "-c", file).exit_code == 0
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            "do $$ begin execute 'drop table pgstream.events_p' || to_char(current_date + 1, 'YYYYMMDD'); end $$"
        )
    result = invoke("maintain", "--json", "-c", file)
    assert json.loads(result.stdout) == [{"source": "shop", "created": 1, "dropped": 0, "waiting": 0}]
    assert invoke("maintain", "-c", file).exit_code == 0


def test_one_table_is_uninstalled_and_the_rest_stays(file: Path, pg_dsn: str, tmp_path: Path) -> None:
    """GIVEN two captured tables WHEN one is uninstalled THEN the other is captured still, the file's line is named."""
    assert invoke("install", "-c", file).exit_code == 0
    done = invoke("uninstall", "--table", "orders", "-c", file)
    assert done.exit_code == 0 and "public.orders is not captured any more" in done.stderr
    assert "stands in the file" in done.stderr
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("insert into orders values (1); insert into users values (1)")
        assert conn.execute("select stream from pgstream.events").fetchall() == [("public.users",)]
        assert conn.execute(
            "select count(*) from pg_replication_slots where database = current_database()"
        ).fetchone() == (1,)
    assert not (tmp_path / "data").exists()
    assert invoke("uninstall", "--table", 'a"b', "-c", file).exit_code == 2


def test_uninstall_says_how_many_events_it_leaves(file: Path, pg_dsn: str) -> None:
    """GIVEN three events that nobody took WHEN uninstalled THEN the question and the answer count them."""
    assert invoke("install", "-c", file).exit_code == 0
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("insert into orders values (1), (2), (3)")
    asked = CliRunner().invoke(app, ["source", "uninstall", "-c", str(file)], input="n\n")
    assert asked.exit_code == 1 and "At least 3 events were not taken yet" in asked.stderr
    done = invoke("uninstall", "--yes", "-c", file)
    assert done.exit_code == 0 and "At least 3 events were not taken yet: they are dropped" in done.stderr
    # AND where nothing is installed any more, the number is not known, and nothing fails
    assert "Events that were not taken yet are dropped" in invoke("uninstall", "--yes", "-c", file).stderr


def test_what_was_taken_is_not_counted_as_left(at: Scene) -> None:
    """GIVEN events before and after a checkpoint THEN only those after it are left; of several slots, each its own."""
    at.emit("s", "1")
    at.drain()
    end = at.position(at.flush_lsn())
    assert untaken_rows(at.target, {0: end}) == 0
    at.emit("s", "2")
    at.emit("s", "3")
    assert untaken_rows(at.target, {0: end}) == 2
    assert untaken_rows(at.target, {}) == 4
    assert untaken_rows(replace(at.target, slots=2), {}) == 4


def test_an_event_is_found_by_its_stream_while_the_stream_is_being_registered(at: Scene) -> None:
    """GIVEN a stream that another transaction is registering WHEN an event is sent THEN the playbook's query has it."""
    query = PLAYBOOK.read_text().partition("## What is there")[2].partition("```sql")[2].partition("```")[0]
    by_stream = query.strip().splitlines()[-1]
    with at.connection() as first:
        first.execute("select pgstream.emit('fresh', 'a', '{}')")
        at.emit("fresh", "b")  # does not wait for the first
        assert at.value("select stream_id is null from pgstream.events") is True
        rows = at.db.execute(by_stream.encode()).fetchall()
        assert [(row[0], row[1], row[4]) for row in rows] == [("fresh", "message", 1)]
        first.commit()
    rows = at.db.execute(by_stream.encode()).fetchall()
    assert [(row[0], row[1], row[4]) for row in rows] == [("fresh", "message", 2)]
    assert {row["stream"] for row in at.drain()} == {"fresh"}
