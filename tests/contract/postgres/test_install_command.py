"""`evermark source install` where it cannot go straight through: a busy database, a wrong table, a run cut short."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from evermark.cli.main import app
from evermark.errors import BusyError, DeniedError, EvermarkError, SetupError
from evermark.secrets import Plain
from evermark.sources.postgres.admin import install as install_module
from evermark.sources.postgres.admin import waiting as waiting_module
from evermark.sources.postgres.admin.install import install, uninstall
from evermark.sources.postgres.target import PostgresTarget, TableChoice
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server, system_binaries
from evermark.testing.until import until

CREATE = "create table orders (id int primary key); create table users (id int primary key); create view v as select 1"
ORDERS, USERS = TableChoice("public.orders"), TableChoice("public.users")
SECRET = "hunter2"


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Each Postgres at hand."""
    settings = {"max_prepared_transactions": "4", "max_replication_slots": "4"}
    with postgres_server(tmp_path_factory.mktemp("busy"), settings, binaries=request.param) as found:
        yield found


@dataclass
class Shop:
    """A database without an outbox, and what an install says there."""

    dsn: str
    db: psycopg.Connection[Any]
    target: PostgresTarget
    said: list[str] = field(default_factory=list)

    def install(self, *tables: TableChoice, wait_s: float = 60.0) -> list[str]:
        return install(self.target, tables, wait_s=wait_s, say=self.said.append)

    def made(self) -> set[str]:
        """Everything of ours in the database."""
        return {
            row[0]
            for row in self.db.execute(
                """select 'slot ' || slot_name from pg_replication_slots where database = current_database()
                   union all select 'publication ' || pubname from pg_publication
                   union all select 'schema ' || nspname from pg_namespace where nspname = 'pgstream'
                   union all select 'event trigger ' || evtname from pg_event_trigger
                   union all select 'trigger on ' || tgrelid::regclass from pg_trigger where tgname ~ '^pgstream_'"""
            ).fetchall()
        }


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[Shop]:
    """An empty shop."""
    with fresh_database(server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        db.execute(CREATE.encode())
        yield Shop(dsn, db, PostgresTarget(Plain(dsn), "busy_slot", "busy_pub"))


@pytest.fixture
def open_transaction(shop: Shop) -> Iterator[psycopg.Connection[Any]]:
    """One that has written, and stays open; its text holds a secret."""
    with psycopg.connect(shop.dsn) as conn:
        conn.execute(f"insert into users values (1) /* {SECRET} */".encode())
        yield conn


def test_an_open_transaction_is_waited_for_and_named(
    shop: Shop, open_transaction: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a transaction that stays open WHEN installed THEN whose it is is said, never its text; then it is done."""
    monkeypatch.setattr(waiting_module, "SAY_AFTER_S", 1.5)  # longer than a lock is waited for
    pid = open_transaction.info.backend_pid
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.extend(shop.install(ORDERS)))
    thread.start()
    until(lambda: shop.said, "who is waited for was said")
    assert f"process {pid} of role" in shop.said[0] and "open for" in shop.said[0]
    assert "make slot busy_slot" in shop.said[0]
    assert not done and SECRET not in str(shop.said)
    open_transaction.commit()
    thread.join(30)
    assert done == ["public.orders captured"]


def test_giving_up_says_for_how_long_and_for_whom_and_leaves_nothing(
    shop: Shop, open_transaction: psycopg.Connection[Any]
) -> None:
    """GIVEN a transaction that outlasts the wait WHEN installed THEN the true reason, what ends it, nothing left."""
    with pytest.raises(BusyError) as refused:
        shop.install(ORDERS, wait_s=2.0)
    pid = open_transaction.info.backend_pid
    assert "waited 2 s to make slot busy_slot" in refused.value.message
    assert f"process {pid}" in refused.value.message and SECRET not in str(refused.value)
    assert f"pg_terminate_backend({pid})" in refused.value.hint and "--wait" in refused.value.hint
    assert shop.made() == set()


def test_a_prepared_transaction_is_named_by_its_id(shop: Shop, open_transaction: psycopg.Connection[Any]) -> None:
    """GIVEN a prepared transaction WHEN installed THEN it is what is said to be open, and how to end it."""
    open_transaction.execute("prepare transaction 'tx''1'")
    open_transaction.commit()
    try:
        with pytest.raises(BusyError) as refused:
            shop.install(wait_s=2.0)
        assert "prepared transaction" in refused.value.message
        assert "rollback prepared 'tx''1';" in refused.value.hint
    finally:
        shop.db.execute("rollback prepared 'tx''1'")


def test_a_locked_table_is_waited_for_and_writers_are_not_held_up(
    shop: Shop, open_transaction: psycopg.Connection[Any]
) -> None:
    """GIVEN an outbox and a table in use WHEN the table is added THEN others write it meanwhile; then it is done."""
    open_transaction.commit()
    shop.install(ORDERS)
    open_transaction.execute("insert into users values (2)")
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.extend(shop.install(USERS)))
    thread.start()
    until(lambda: shop.said, "who is waited for was said")
    assert "put triggers on public.users" in shop.said[0]
    with psycopg.connect(shop.dsn, autocommit=True) as writer:
        writer.execute("set lock_timeout = '5s'")
        writer.execute("insert into users values (3)")
    open_transaction.commit()
    thread.join(30)
    assert done == ["public.users captured"]


WRONG = [
    ([ORDERS, TableChoice("public.nothing")], SetupError, "public.nothing does not exist"),
    ([TableChoice("public.v")], SetupError, "not a table that can be captured"),
    ([TableChoice("public.orders", exclude=("nope",))], SetupError, 'no column "nope"'),
    ([TableChoice("public.orders", hash=("Id",))], SetupError, 'no column "Id"'),
]


@pytest.mark.parametrize(("tables", "kind", "why"), WRONG, ids=[why for _, _, why in WRONG])
def test_what_can_be_known_beforehand_fails_before_anything_is_made(
    shop: Shop, tables: list[TableChoice], kind: type[EvermarkError], why: str
) -> None:
    """GIVEN a table that cannot be captured WHEN installed THEN it is named, with a hint, and nothing was made."""
    with pytest.raises(kind, match=why) as refused:
        shop.install(*tables)
    assert refused.value.hint
    assert shop.made() == set()


def test_a_role_that_may_not_is_told_before_anything_is_made(shop: Shop) -> None:
    """GIVEN roles without a right each WHEN installing THEN the right is named, and nothing was made."""
    shop.db.execute("drop role if exists modest")
    shop.db.execute("create role modest login password 'x'")
    try:
        info = psycopg.conninfo.make_conninfo(shop.dsn, user="modest", password="x", passfile="")
        target = PostgresTarget(Plain(info), "busy_slot", "busy_pub")
        steps = [
            ("may not make replication slots", "alter role modest replication"),
            ("may not make a schema", f"grant create on database {shop.db.info.dbname} to modest"),
            ("does not own table public.orders", "alter table orders owner to modest"),
        ]
        for why, mend in steps:
            with pytest.raises(DeniedError, match=why):
                install(target, [ORDERS])
            assert shop.made() == set()
            shop.db.execute(mend.encode())
        assert install(target, [ORDERS]) == ["public.orders captured"]
        uninstall(target)
    finally:
        shop.db.execute("drop owned by modest cascade")
        shop.db.execute("drop role modest")


def test_no_room_for_a_slot_is_told_before_anything_is_made(shop: Shop) -> None:
    """GIVEN all replication slots in use WHEN installed THEN that is said, with what to do, and nothing was made."""
    free = 4 - int(str(shop.db.execute("select count(*) from pg_replication_slots").fetchone()[0]))  # type: ignore[index]
    names = [f"other_{n}" for n in range(free)]
    for name in names:
        shop.db.execute("select pg_create_physical_replication_slot(%s)", (name,))
    try:
        with pytest.raises(SetupError, match=r"1 replication slots are needed .* 0 are free"):
            shop.install(ORDERS)
        assert shop.made() == set()
    finally:
        for name in names:
            shop.db.execute("select pg_drop_replication_slot(%s)", (name,))


@pytest.mark.parametrize("step", ["_register", "create_slot", "_watch"])
def test_an_install_that_fails_takes_away_what_it_made(shop: Shop, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a failure at any step, a Ctrl-C as well WHEN installing THEN nothing is left; the next one works."""
    works = getattr(install_module, step)
    for failure in (SetupError("boom"), KeyboardInterrupt()):
        left = [1 if step == "_watch" else 0]  # the first table is captured, the second is not

        def fails(*args: object, failure: BaseException = failure, left: list[int] = left) -> object:
            if left[0] == 0:
                raise failure
            left[0] -= 1
            return works(*args)

        with monkeypatch.context() as patch:
            patch.setattr(install_module, step, fails)
            with pytest.raises(type(failure)):
                shop.install(ORDERS, USERS)
        assert shop.made() == set()
    assert shop.install(ORDERS) == ["public.orders captured"]


def test_what_was_there_before_a_failed_install_stays(shop: Shop) -> None:
    """GIVEN an outbox in use WHEN a second install fails half-way THEN the first one's things are untouched."""
    shop.install(ORDERS)
    before = shop.made()
    with psycopg.connect(shop.dsn) as other:
        other.execute("lock table users")
        with pytest.raises(BusyError):
            shop.install(ORDERS, USERS, wait_s=0.5)
    assert shop.made() == before
    # AND another deployment's failed install leaves this one's outbox alone
    second = PostgresTarget(shop.target.dsn, "second_slot", "second_pub")
    with psycopg.connect(shop.dsn) as other:
        other.execute("insert into users values (1)")
        with pytest.raises(BusyError):
            install(second, [USERS], wait_s=1.0)
    assert shop.made() == before
    readers = shop.db.execute("select slot from pgstream.readers").fetchall()
    assert readers == [("busy_slot",)]


def test_the_command_line_says_the_reason_and_leaves_no_slot(
    shop: Shop, open_transaction: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a busy database WHEN `source install --wait 2s` gives up THEN exit code 1, a true reason, nothing made."""
    monkeypatch.setenv("PG_DSN", shop.dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(f"""
version: 1
name: busy
data: {tmp_path / "data"}
sources:
  shop: {{type: postgres, dsn: "${{PG_DSN}}", tables: [public.orders]}}
""")
    result = CliRunner().invoke(app, ["source", "install", "--wait", "2s", "-c", str(path)])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "waited 2 s" in result.stderr and f"process {open_transaction.info.backend_pid}" in result.stderr
    assert SECRET not in result.output
    assert shop.made() == set()
    assert CliRunner().invoke(app, ["source", "install", "--wait", "soon", "-c", str(path)]).exit_code == 2
