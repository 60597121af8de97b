"""`evermark config check`: what only `evermark up` would find, found before; and what is at the other end."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.cli.main import app
from evermark.log.append import DeltaLog
from evermark.testing.etcds import Etcd
from evermark.testing.servers import free_port
from tests.contract.log.log_scene import fill

SECRET = "whsec_" + "A" * 43 + "="
HOOK = "url: 'https://billing.example/hooks', secret: '${SECRET}'"
GOOD = f"""
version: 1
name: shop
state: {{dsn: "${{PG_DSN}}"}}
sources:
  shop: {{type: postgres, dsn: "${{PG_DSN}}", tables: [public.orders]}}
subscriptions:
  billing: {{{HOOK}, streams: [public.orders], where: "op = 'insert' and data.total > 100"}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file without a fault, and a source that nobody can reach: without --connect it is not asked."""
    monkeypatch.setenv("PG_DSN", "postgresql://shop:pw-do-not-show@127.0.0.1:1/shop")
    monkeypatch.setenv("SECRET", SECRET)
    path = tmp_path / "evermark.yaml"
    path.write_text(GOOD)
    return path


def check(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["config", "check", "-c", str(file), *options])


def found(file: Path, *options: str, code: int = 3) -> dict[str, dict[str, Any]]:
    """The findings that are not ok, by their check."""
    ran = check(file, "--json", *options)
    assert ran.exit_code == code, ran.output
    assert SECRET not in ran.output and "pw-do-not-show" not in ran.output
    return {row["check"]: row for row in json.loads(ran.stdout)["findings"] if row["grade"] != "ok"}


def test_a_good_file_is_said_to_be_good_and_nothing_is_made(file: Path) -> None:
    """GIVEN a file without a fault WHEN checked THEN exit code 0, each part named, no data folder, nobody asked."""
    ran = check(file)
    assert ran.exit_code == 0, ran.output
    for part in ("file", "sources", "log.path", "data", "spark.master", "subscriptions"):
        assert part in ran.stdout
    assert "0 wrong" not in ran.output and " ok" in ran.output
    assert [path.name for path in file.parent.iterdir()] == ["evermark.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "where", "told"),
    [
        ("data.total > 100", "data.total > ", "subscriptions.billing.where", "cannot be read"),
        ("op = 'insert'", "reflect('x')", "subscriptions.billing.where", "reflect is not allowed"),
        ("version: 1", "version: 1\nspark: {master: 'spark://far:7077'}", "log.path", "do not see the log at"),
        ("version: 1", "version: 1\nlog: {path: 's3a://acme/shop'}", "file", "log.path: expected a local path"),
        ("version: 1", "version: 1\ndata: /etc/passwd/data", "data", "not a folder that this user may write to"),
        ("subscriptions:", f"bots:\n  b: {{{HOOK}, source: chat, user: u}}\nsubscriptions:", "bots.b.source", "chat"),
        ("sources:", "unknown_key: 1\nsources:", "file", "unknown_key: unknown key"),
        ("subscriptions:", "  own: {type: 'no_such_module:Own'}\nsubscriptions:", "sources.own", "no_such_module"),
        ("subscriptions:", "  own: {type: 'json:Own'}\nsubscriptions:", "sources.own", "json:Own cannot be made"),
        ("${SECRET}", "${NOT_SET}", "file", "the variable NOT_SET is not set"),
        ("name: shop", "name: [shop", "file", "line"),
    ],
)
def test_what_up_would_refuse_is_found_before(file: Path, old: str, new: str, where: str, told: str) -> None:
    """GIVEN one fault WHEN checked THEN exit code 3, and the fault with the key it stands at and what to do."""
    file.write_text(GOOD.replace(old, new, 1))
    rows = found(file)
    assert told in rows[where]["found"] and rows[where]["grade"] == "wrong" and rows[where]["mend"]
    people = check(file)
    assert people.exit_code == 3 and told in people.output and "Traceback" not in people.output


def test_all_faults_are_found_at_once(file: Path) -> None:
    """GIVEN two wrong predicates, a wrong master and an unknown stream WHEN checked THEN all four are listed."""
    text = GOOD.replace("data.total > 100", "data.total >").replace(
        "version: 1", "version: 1\nspark: {master: nowhere}"
    )
    file.write_text(text + f"  mail: {{{HOOK}, where: 'sleep(1)', streams: [orders]}}\n")
    rows = found(file)
    assert set(rows) == {
        "subscriptions.billing.where",
        "subscriptions.mail.where",
        "spark.master",
        "subscriptions.mail.streams",
    }
    assert "did you mean public.orders?" in rows["subscriptions.mail.streams"]["found"]


def test_each_problem_of_the_file_is_told_once_in_a_row_of_its_own(file: Path) -> None:
    """GIVEN three unknown keys WHEN checked THEN three findings, each text once, and no escape in the table."""
    file.write_text(GOOD.replace("version: 1", "version: 1\nfirst_key: 1\nsecond_key: 1\nthird_key: 1"))
    ran = check(file, "--json")
    told = [row["found"] for row in json.loads(ran.stdout)["findings"]]
    assert [text.partition(", ")[2][:17] for text in told] == [
        "line 3: first_key",
        "line 4: second_ke",
        "line 5: third_key",
    ]
    people = check(file)
    assert people.exit_code == 3 and "\\n" not in people.output
    for key in ("first_key", "second_key", "third_key"):
        assert people.output.count(f"{key}: unknown key") == 1


def test_a_stream_that_the_log_knows_is_not_warned_of(file: Path) -> None:
    """GIVEN a log with a stream that no table stands for WHEN a subscription wants it THEN nothing is said."""
    file.write_text(GOOD.replace("tables: [public.orders]", "tables: [public.users]"))
    warned = found(file, code=0)["subscriptions.billing.streams"]
    assert warned["grade"] == "warning" and "known are public.users" in warned["found"]
    fill(DeltaLog(file.parent / "evermark-data" / "log" / "shop"), 1)
    assert found(file, code=0) == {}


def test_a_file_that_is_not_there_is_an_error(file: Path) -> None:
    """GIVEN no file THEN there is nothing to check: exit code 1, and how to make one."""
    ran = check(file.with_name("other.yaml"))
    assert ran.exit_code == 1 and "evermark init" in ran.stderr


def test_connecting_says_that_nobody_answers(file: Path) -> None:
    """GIVEN a source that cannot be reached WHEN asked to connect THEN that is found, with its address, no password."""
    rows = found(file, "--connect")
    assert "127.0.0.1:1/shop does not answer" in rows["reachable"]["found"] and rows["reachable"]["source"] == "shop"
    assert "does not answer" in rows["state"]["found"]


def test_connecting_tries_the_stores_beside_state_before_there_is_a_state(file: Path, etcd: Etcd) -> None:
    """GIVEN a deployment that was never started, with checkpoints and leases in etcd WHEN asked to connect THEN both
    are tried: nobody answers, the prefix is another deployment's, or all is well; and nothing is claimed. A State that
    is away hides nothing of them."""
    prefix = f"/{secrets.token_hex(6)}/"

    def stores(url: str, *, embedded: bool = True) -> dict[str, dict[str, Any]]:
        kept = f"{{backend: etcd, etcd: {{endpoints: '{url}', prefix: {prefix}}}}}"
        good = GOOD.replace('state: {dsn: "${PG_DSN}"}\n', "") if embedded else GOOD
        file.write_text(f"{good}reliability: {{checkpoint: {kept}}}\ncluster: {{leases: {kept}}}\n")
        return {name: row for name, row in found(file, "--connect").items() if name in ("checkpoints", "leases")}

    nowhere = f"http://127.0.0.1:{free_port()}"
    for embedded in (True, False):
        away = stores(nowhere, embedded=embedded)
        assert {row["grade"] for row in away.values()} == {"wrong"} and len(away) == 2
        for row in away.values():
            assert f"in etcd at {nowhere}" in row["found"] and "is etcd up" in row["mend"]
    assert stores(etcd.url) == {}
    assert etcd.control("get", "--prefix", prefix) == ""
    etcd.control("put", f"{prefix}state", "another's")
    theirs = stores(etcd.url)
    assert {row["grade"] for row in theirs.values()} == {"wrong"} and len(theirs) == 2
    assert "those of another State" in theirs["checkpoints"]["found"]
    assert "reliability.checkpoint.etcd.prefix" in theirs["checkpoints"]["mend"]
    assert stores(etcd.url, embedded=False) == {}, "whose they are is in State, which is away"


def test_connecting_tries_a_mongodb_that_is_to_keep_the_checkpoints(file: Path) -> None:
    """GIVEN a deployment that was never started, whose MongoDB does not answer WHEN asked to connect THEN that is
    found, with what to do, and without the password."""
    url = f"mongodb://u:pw-do-not-show@127.0.0.1:{free_port()}/?serverSelectionTimeoutMS=200"
    kept = f"reliability: {{checkpoint: {{backend: mongo, mongo: {{url: '{url}'}}}}}}\n"
    file.write_text(GOOD.replace('state: {dsn: "${PG_DSN}"}\n', "") + kept)
    row = found(file, "--connect")["checkpoints"]
    assert row["grade"] == "wrong" and "MongoDB" in row["found"] and row["mend"]


def test_connecting_finds_what_install_and_up_would(file: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a database WHEN asked to connect THEN a missing table, column and outbox; then all is well."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    rows = found(file, "--connect")
    assert "table public.orders does not exist" in rows["tables"]["found"]
    assert rows["outbox"]["grade"] == "warning" and rows["outbox"]["mend"] == "evermark source install"
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, total numeric)")
    file.write_text(GOOD.replace("[public.orders]}", "[{name: public.orders, exclude: [secret]}]}", 1))
    rows = found(file, "--connect")
    assert 'table public.orders has no column "secret"' in rows["tables"]["found"]
    assert "its columns are id, total" in rows["tables"]["mend"]
    file.write_text(GOOD)
    assert {"tables", "slot", "publication"} & set(found(file, "--connect", code=0)) == set()
    assert CliRunner().invoke(app, ["source", "install", "-c", str(file)]).exit_code == 0
    assert {row["grade"] for row in found(file, "--connect", code=0).values()} <= {"warning"}


def test_connecting_finds_a_slot_of_another_database(file: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a deployment of the same name for another database of the server THEN its slot is in the way."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    elsewhere = psycopg.conninfo.make_conninfo(pg_dsn, dbname="postgres")
    with psycopg.connect(pg_dsn, autocommit=True) as conn, psycopg.connect(elsewhere, autocommit=True) as other:
        conn.execute("create table orders (id int primary key)")
        other.execute("select pg_create_logical_replication_slot('evermark_shop_shop', 'pgoutput')")
        try:
            rows = found(file, "--connect")
        finally:
            other.execute("select pg_drop_replication_slot('evermark_shop_shop')")
    assert "belongs to database postgres" in rows["slot"]["found"]


def test_connecting_as_a_role_without_rights_says_which(
    file: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a role that owns nothing WHEN asked to connect THEN each missing right, and the statement that gives it."""
    plain = psycopg.conninfo.make_conninfo(pg_dsn, user="no_rights", password="pw-do-not-show")
    monkeypatch.setenv("PG_DSN", plain)
    file.write_text(GOOD.replace('state: {dsn: "${PG_DSN}"}\n', ""))
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key)")
        conn.execute("create role no_rights login password 'pw-do-not-show'")
        try:
            rows = found(file, "--connect")
        finally:
            conn.execute("drop role no_rights")
    assert "grant create on database" in rows["may_install"]["mend"]
    assert "belongs to" in rows["tables"]["found"] and "source install --print" in rows["tables"]["mend"]
    assert "replication" in rows["replication"]["mend"]
