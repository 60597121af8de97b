"""`evermark doctor` over real databases, well and ill, and that what it says to run repairs them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner, Result

from evermark.app.build import open_deployment
from evermark.checkpoints.base import Checkpoint
from evermark.cli.main import app
from evermark.cluster.fence import source_lease
from evermark.config import load
from evermark.observe.finding import Finding, Grade
from evermark.secrets import Plain
from evermark.sources.kinds import SourceState
from evermark.sources.postgres.admin import examine as examine_module
from evermark.sources.postgres.admin.doctor import judged
from evermark.sources.postgres.admin.examine import examine
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.slots import spare_name
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.lost_slot import lose
from evermark.testing.servers import PostgresServer, postgres_server, system_binaries
from tests.contract.postgres.outbox_scene import Scene, scene

ORDERS = "create table public.orders (id int primary key, total numeric)"
ORDERS_TABLE = TableChoice("public.orders")
FORGETFUL = {"max_wal_size": "64MB", "wal_keep_size": "0", "max_prepared_transactions": "2"}
FILE = """
version: 1
name: shop
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
"""


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Each Postgres at hand, with slots that can be lost."""
    with postgres_server(tmp_path_factory.mktemp("doctor"), FORGETFUL, binaries=request.param) as found:
        yield found


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    """A database with a captured table."""
    with scene(server, ORDERS_TABLE, create=ORDERS) as found:
        yield found


def findings(target: PostgresTarget, kept: SourceState | None = None) -> list[Finding]:
    return judged(examine(target), target, kept)


def wrong(target: PostgresTarget) -> dict[str, Finding]:
    return {f.check: f for f in findings(target) if f.grade is Grade.WRONG}


def warned(target: PostgresTarget, kept: SourceState | None = None) -> dict[str, Finding]:
    return {f.check: f for f in findings(target, kept) if f.grade is Grade.WARNING}


def test_a_healthy_database_is_found_healthy(at: Scene) -> None:
    """GIVEN a fresh outbox with events WHEN examined THEN nothing is wrong, and what is there is told."""
    at.db.execute("insert into orders values (1), (2), (3)")
    assert wrong(at.target) == {}
    assert set(warned(at.target)) == {"wal_limit"}  # this server's slots have no limit
    told = {f.check: f.found for f in findings(at.target)}
    assert told["events"].startswith("3, the oldest ") and "public.orders" in told["tables"]
    assert "7 days ahead" in told["partitions"] and at.target.slot in told["slot"]


def test_examining_changes_nothing(at: Scene) -> None:
    """GIVEN an outbox WHEN examined THEN slots, partitions and events are as they were."""
    look = """select slot_name, confirmed_flush_lsn::text from pg_replication_slots union all
              select inhrelid::text, '' from pg_inherits union all
              select id::text, '' from pgstream.events order by 1"""
    at.db.execute("insert into orders values (1)")
    before = at.db.execute(look).fetchall()
    findings(at.target)
    assert at.db.execute(look).fetchall() == before


def test_an_empty_database_is_told_to_install(server: PostgresServer, at: Scene) -> None:
    """GIVEN nothing installed under these names WHEN examined THEN one command repairs all of it."""
    target = replace(at.target, slot="no_slot", publication="no_publication", schema="no_schema")
    found = wrong(target)
    assert {"outbox", "publication", "slot"} <= set(found)
    assert all("evermark source install" in f.mend for f in found.values())


def test_a_lost_slot_is_found_and_so_is_what_recovery_left(at: Scene, server: PostgresServer) -> None:
    """GIVEN a slot the server threw away, and a second one WHEN examined THEN both are named."""
    at.db.execute("insert into orders values (1)")
    lose(server, at.target.slot)
    assert "was lost" in wrong(at.target)["slot"].found and "recover" in wrong(at.target)["slot"].mend
    spare = spare_name(at.target.slot)
    at.db.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (spare,))
    assert spare in warned(at.target)["spare_slot"].mend
    assert "spare_slot" not in warned(at.target, SourceState(None, {}, frozenset({0})))


def test_a_publication_that_is_gone_or_changed_is_found(at: Scene) -> None:
    """GIVEN a publication changed, then dropped WHEN examined THEN each is wrong."""
    at.db.execute(f"alter publication {at.target.publication} set (publish = 'insert, update')".encode())
    assert "changed" in wrong(at.target)["publication"].found
    at.db.execute(f"drop publication {at.target.publication}".encode())
    assert "no publication" in wrong(at.target)["publication"].found


def test_triggers_that_are_off_are_found_and_the_advice_repairs_them(at: Scene) -> None:
    """GIVEN a trigger switched off WHEN the advice is run THEN the table is captured again."""
    at.db.execute('alter table orders disable trigger "!pgstream_capture"')
    found = wrong(at.target)["triggers"]
    assert "switched off" in found.found
    at.db.execute(found.mend.encode())
    assert wrong(at.target) == {} and "triggers" not in warned(at.target)


def test_an_owner_who_could_use_the_rights_of_who_installed_is_named(at: Scene) -> None:
    """GIVEN a superuser's outbox WHEN a captured table belongs to a role with less THEN a warning names both."""
    assert "capture_rights" not in warned(at.target)
    at.db.execute("drop role if exists lesser; create role lesser; alter table orders owner to lesser")
    try:
        found = warned(at.target)["capture_rights"]
        assert "public.orders" in found.found and "lesser" in found.found and "as the tables' owner" in found.mend
        said: list[str] = []
        install(at.target, [ORDERS_TABLE], say=said.append)
        assert any("lesser" in line for line in said)
    finally:
        at.db.execute("reassign owned by lesser to current_user; drop owned by lesser; drop role lesser")


def test_tables_not_captured_or_changed_since_are_found(at: Scene) -> None:
    """GIVEN a table of the file without a trigger, and one with a new column WHEN examined THEN both are named."""
    at.db.execute("create table more (id int primary key)")
    at.db.execute("alter table orders add column note text")
    target = replace(at.target, tables=(*at.target.tables, TableChoice("public.more")))
    assert "public.more" in wrong(target)["tables"].found
    assert "public.orders" in warned(target)["tables"].found


def test_a_role_without_rights_is_told_the_grants_and_they_are_enough(at: Scene, server: PostgresServer) -> None:
    """GIVEN a bare role WHEN the advice is run, step by step THEN nothing is wrong, and it can repair a lost slot."""
    at.db.execute("drop role if exists bare")
    at.db.execute("create role bare login password 'x'")
    info = psycopg.conninfo.make_conninfo(at.dsn, user="bare", password="x", passfile="")
    target = replace(at.target, dsn=Plain(info))
    at.db.execute("insert into orders values (1)")
    try:
        found = wrong(target)
        assert {"replication", "rights", "wal_senders"} <= set(found)
        for check in ("replication", "rights"):
            at.db.execute(found[check].mend.partition(": ")[2].encode())
        assert wrong(target) == {}
        repair = repair_of(target)
        try:
            gap = repair.begin(lambda: False)
            assert sum(batch.num_rows for piece in gap.pieces for batch in gap.read(piece)) == 1
            repair.finish(gap.position)
        finally:
            repair.close()
        assert wrong(target) == {}
    finally:
        at.db.execute("drop owned by bare")
        at.db.execute("drop role bare")


def test_transactions_that_hold_the_slot_back_are_named_without_their_text(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an open and a prepared transaction WHEN examined THEN both are named, not their text; advice ends them."""
    monkeypatch.setattr(examine_module, "TRANSACTION_AGE_S", 0)
    with closing(at.connection()) as open_, closing(at.connection()) as prepared:
        open_.execute("insert into orders values (1) /* a-secret */")
        prepared.execute("insert into orders values (2)")
        prepared.execute("prepare transaction 'one''s own'")
        found = [f for f in findings(at.target) if f.check == "transactions"]
        assert len(found) == 2 and "a-secret" not in str(found)
        (repair,) = [f.mend for f in found if "prepared" in f.mend]
        at.db.execute(repair.partition("or: ")[2].partition("or: ")[2].partition(" in database")[0].encode())
        (repair,) = [f.mend for f in findings(at.target) if f.check == "transactions"]
        at.db.execute(repair.partition("or: ")[2].encode())
    assert [f.grade for f in findings(at.target) if f.check == "transactions"] == [Grade.OK]


def test_days_without_a_partition_and_rows_without_one_are_found(at: Scene) -> None:
    """GIVEN no partition of today and a row in the default one WHEN examined THEN both are warned of."""
    tables = at.db.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'pgstream.events'::regclass"
    )
    for (name,) in tables.fetchall():
        if "default" not in name:
            at.db.execute(sql.SQL("drop table {}").format(sql.SQL(name)))
    at.db.execute("insert into orders values (1)")
    assert {"partitions", "default_partition"} <= set(warned(at.target))


def test_partitions_past_the_retention_are_told(at: Scene) -> None:
    """GIVEN a partition of years ago WHEN examined THEN it is said to wait."""
    at.db.execute(
        "create table pgstream.events_p20200101 partition of pgstream.events"
        " for values from ('2020-01-01') to ('2020-01-02')"
    )
    assert "1 partitions are past" in warned(at.target)["retention"].found


def test_many_events_are_estimated_not_counted(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN more than may be counted WHEN examined THEN the number is of the planner's statistics, the times exact."""
    at.db.execute("insert into orders select n from generate_series(1, 500) n")
    at.db.execute("analyze pgstream.events")
    monkeypatch.setattr(examine_module, "COUNT_BYTES_MAX", 0)
    (found,) = [f.found for f in findings(at.target) if f.check == "events"]
    assert found.startswith("about 500, the oldest ")


def test_a_server_without_logical_wal_is_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    """GIVEN wal_level = replica WHEN examined THEN it is wrong, with the statement that sets it."""
    with postgres_server(tmp_path_factory.mktemp("replica"), {"wal_level": "replica"}) as server:
        target = PostgresTarget(Plain(server.dsn()), "s", "p")
        assert "alter system set wal_level" in wrong(target)["wal_level"].mend


def test_a_server_that_is_away_is_found_without_its_password() -> None:
    """GIVEN a port nobody listens on WHEN examined THEN one finding, no password."""
    target = PostgresTarget(Plain("postgresql://u:pw-do-not-show@127.0.0.1:1/db"), "s", "p")
    (found,) = findings(target)
    assert found.check == "reachable" and "pw-do-not-show" not in str(found)


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment without any state, whose source is the test's own database, installed."""
    user = {"user": "told", "password": "pw-do-not-show", "passfile": ""}
    monkeypatch.setenv("PG_DSN", psycopg.conninfo.make_conninfo(pg_dsn, **user))
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE + f"data: {tmp_path / 'data'}\n")
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        if conn.execute("select 1 from pg_roles where rolname = 'told'").fetchone() is None:
            conn.execute("create role told superuser login password 'pw-do-not-show'")
        conn.execute(ORDERS.encode())
    return path


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert "pw-do-not-show" not in result.output and "Traceback" not in result.output
    return result


def told(file: Path, code: int) -> dict[str, Any]:
    """What doctor reports to a program, by check."""
    result = invoke("doctor", "shop", "--json", "-c", file)
    assert result.exit_code == code, result.output
    document = json.loads(result.stdout)
    assert document["grade"] == ("wrong" if code == 3 else document["grade"])
    return {row["check"]: row for row in document["findings"]}


def test_doctor_ends_with_3_when_something_is_wrong_and_makes_no_state(file: Path, tmp_path: Path) -> None:
    """GIVEN no outbox, then one WHEN asked THEN exit code 3 and 0, and nothing was made in the data folder."""
    assert "evermark source install" in told(file, 3)["outbox"]["mend"]
    assert invoke("source", "install", "-c", file).exit_code == 0
    assert "none yet" in told(file, 0)["state"]["found"]
    assert not (tmp_path / "data").exists()
    people = invoke("doctor", "-c", file)
    assert people.exit_code == 0 and "wal_level" in people.stdout and "do: " in people.stderr


def test_doctor_looks_at_the_checkpoint_too(file: Path, pg_dsn: str, tmp_path: Path) -> None:
    """GIVEN a state with a checkpoint WHEN the slot is dropped THEN lag is told first, and the gap afterwards."""
    assert invoke("source", "install", "-c", file).exit_code == 0
    file.write_text(FILE + f'data: {tmp_path / "data"}\nstate: {{dsn: "${{PG_DSN}}"}}\n')
    assert "none yet" in told(file, 0)["state"]["found"]  # a dsn alone is no state
    deployment = open_deployment(load(file))
    try:
        source = deployment.sources["shop"]
        lease = deployment.leases.acquire(source_lease("shop"), deployment.holder, 60.0)
        assert lease is not None
        deployment.checkpoints.save("shop", 0, Checkpoint(source.earliest(0), 0, lease.epoch))
        found = told(file, 0)
        assert "behind the server" in found["checkpoint"]["found"] and found["resume"]["grade"] == "ok"
        assert str(deployment.holder.pid) in found["reader"]["found"]
        deployment.leases.release(lease)
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            conn.execute("select pg_drop_replication_slot('evermark_shop_shop')")
        found = told(file, 3)
        assert "is gone" in found["slot"]["found"] and "by itself" in found["resume"]["mend"]
        assert found["reader"]["grade"] == "warning" and found["reader"]["mend"] == "evermark up"
        # AND where nothing is installed any more, no instance could read: `evermark up` is no remedy
        assert invoke("source", "uninstall", "--yes", "-c", file).exit_code == 0
        found = told(file, 3)
        assert "reader" not in found and "evermark source install" in found["resume"]["mend"]
    finally:
        deployment.close()


def test_doctor_says_what_of_the_outbox_is_missing_and_install_makes_it(
    file: Path, pg_dsn: str, tmp_path: Path
) -> None:
    """GIVEN a state, and no outbox, an empty schema, or an outbox without one of its parts WHEN asked THEN what is
    missing is said in our words, with the command that makes it; and it does."""
    file.write_text(FILE + f'data: {tmp_path / "data"}\nstate: {{dsn: "${{PG_DSN}}"}}\n')
    open_deployment(load(file)).close()
    assert "is not installed: there is no schema pgstream" in told(file, 3)["resume"]["found"]
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        function = "publication_fingerprint"
        for broken, missing in (
            ("create schema pgstream", "meta"),
            ("drop table pgstream.readers", "readers"),
            (f"drop function pgstream.{function}", f"{function}()"),
        ):
            conn.execute(broken.encode())
            found = told(file, 3)
            for check in ("outbox", "resume"):
                assert f"pgstream.{missing}" in found[check]["found"] and "install" in found[check]["mend"]
            assert not [each for each in found.values() if "does not exist" in each["found"]]
            assert "unseen" not in found, "no right is missing"
            assert invoke("source", "install", "-c", file).exit_code == 0
            told(file, 0)


def test_what_is_to_be_run_names_the_source_where_there_are_several(file: Path, tmp_path: Path) -> None:
    """GIVEN two sources, neither installed WHEN doctor, the check of the file, `source recover` and `source maintain`
    say what to run THEN each command names its source: without a name it would be refused."""
    second = '  other: {type: postgres, dsn: "${PG_DSN}", schema: other, tables: []}\n'
    file.write_text(FILE + second + f'data: {tmp_path / "data"}\nstate: {{dsn: "${{PG_DSN}}"}}\n')
    open_deployment(load(file)).close()
    for command, code in (
        (("doctor",), 3), (("doctor", "shop"), 3), (("config", "check", "--connect"), 0),
        (("source", "recover", "shop"), 3), (("source", "maintain", "shop"), 1),
    ):  # fmt: skip
        result = invoke(*command, "-c", file)
        assert result.exit_code == code, result.output
        said = result.stderr.replace("`", "")
        assert "evermark source install shop" in said
        assert not re.search(r"evermark source (install|recover|maintain)(?! (shop|other))", said), said
        assert ("evermark source install other" in said) == (command in {("doctor",), ("config", "check", "--connect")})


def test_doctor_goes_on_when_state_does_not_answer(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GIVEN a state that is away WHEN asked THEN that is wrong, and the source is examined all the same."""
    monkeypatch.setenv("STATE", "postgresql://u:pw-do-not-show@127.0.0.1:1/db")
    file.write_text(FILE + f'data: {tmp_path / "data"}\nstate: {{dsn: "${{STATE}}"}}\n')
    found = told(file, 3)
    assert found["state"]["grade"] == "wrong" and found["wal_level"]["grade"] == "ok"


def test_installing_twice_leaves_a_healthy_doctor(at: Scene) -> None:
    """GIVEN an outbox WHEN installed once more THEN all is as healthy as before."""
    install(at.target, [ORDERS_TABLE])
    assert wrong(at.target) == {}
