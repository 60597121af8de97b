"""What install makes for tables, what it refuses, and what doctor says later (P3, P12)."""

from __future__ import annotations

import hashlib
import json
import pickle
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest

from evermark.errors import BusyError, EvermarkError, GapError, SetupError
from evermark.event_file import as_batches
from evermark.ingest.repair.base import may_open
from evermark.observe.finding import Finding, Grade
from evermark.secrets import Plain, Secret
from evermark.sources.base import Slice
from evermark.sources.postgres.tables.doctor import examined
from evermark.sources.postgres.tables.install import TablesInstallation
from evermark.sources.postgres.tables.repair import repair_of
from evermark.testing.servers import PostgresServer, fresh_database
from evermark.testing.until import until
from tests.contract.postgres.tables_scene import Scene, scene, tables_settings

ORDERS = "create table orders (id bigint primary key, total numeric, note text);"
INVENTORY = """
select (select count(*) from pg_class where relnamespace <> 'pg_toast'::regnamespace),
       (select count(*) from pg_proc), (select count(*) from pg_trigger), (select count(*) from pg_namespace),
       (select count(*) from pg_event_trigger), (select count(*) from pg_publication),
       (select count(*) from pg_replication_slots where database = current_database())
"""


def install(dsn: str, *tables: Any) -> list[str]:
    installation = TablesInstallation(tables_settings(dsn, *tables))
    return installation.install([], wait_s=10.0, say=lambda line: None, goes_on=False)


def foreseen(dsn: str, *tables: Any) -> list[Finding]:
    """Besides what `doctor` finds."""
    return TablesInstallation(tables_settings(dsn, *tables)).foreseen([])


def inventory(dsn: str) -> tuple[Any, ...]:
    with psycopg.connect(dsn) as conn:
        found = conn.execute(INVENTORY.encode()).fetchone()
        assert found is not None
        return found


def findings(at: Scene) -> dict[str, Finding]:
    """What is wrong or warned of, by its check."""
    found = list(examined(at.settings.target(), lambda: at.source, None))
    return {each.check: each for each in found if each.grade is not Grade.OK}


def test_nothing_but_a_publication_and_a_slot_is_made(server: PostgresServer) -> None:
    """And uninstall leaves the database as it was."""
    with fresh_database(server) as dsn:
        with psycopg.connect(dsn) as conn:
            conn.execute(ORDERS.encode())
        before = inventory(dsn)
        installation = TablesInstallation(tables_settings(dsn, "public.orders"))
        for _ in range(2):  # again: what is there stays
            said = installation.install([], wait_s=10.0, say=lambda line: None, goes_on=False)
            assert "public.orders" in said[0] and installation.registered()
            after = inventory(dsn)
            assert after == (*before[:5], before[5] + 1, before[6] + 1)
        installation.uninstall(wait_s=10.0, say=lambda line: None)
        assert inventory(dsn) == before and not installation.registered()


def test_the_printed_sql_is_all_of_it(server: PostgresServer) -> None:
    """A DBA runs it, and a role with no right on any table reads."""
    with scene(server, "public.orders", create=ORDERS) as at:
        script = at.installation.script([], "reader")
        at.installation.uninstall(wait_s=10.0, say=lambda line: None)
        with psycopg.connect(at.dsn, autocommit=True) as dba:
            for statement in script.split("end $do$;"):
                if "do $do$" in statement:
                    dba.execute((statement + "end $do$;").encode())
        at.run("drop role if exists tables_reader", "create role tables_reader login replication password 'p'")
        at.source.check({})
        at.run("insert into orders values (1, 2, 'x')")
        settings = at.settings.model_copy(update={"dsn": as_role(at.dsn, "tables_reader")})
        source = type(at.source)(settings.target(), at.source._open)
        try:
            source.check({})
            rows = [row for batch in source.read(piece(at)) for row in batch.to_pylist()]
            assert [row["op"] for row in rows] == ["schema", "insert"]
            assert source.condition().warnings == {}
        finally:
            source.close()


# Each fits a call better than the server's own, which takes arguments of any kind.
INTRUDERS = """
create table seen (who text);
create function format(text, name, name) returns text language sql as 'insert into seen values (''f3'') returning $1';
create function format(text, name) returns text language sql as 'insert into seen values (''f2'') returning $1';
create function format(text, text, text) returns text language sql as 'insert into seen values (''t3'') returning $1';
create function format(text, name, name, text, text) returns text language sql
    as 'insert into seen values (''f5'') returning pg_catalog.format($1, $2, $3, $4, $5)';
"""


def test_functions_that_others_made_in_public_are_not_run(server: PostgresServer) -> None:
    """GIVEN functions in schema public that fit our calls better than the server's WHEN tables are installed, by us or
    by the printed SQL, examined and watched THEN none of them was run."""
    create = f"{ORDERS} create table keyless (id int); alter table keyless replica identity full; {INTRUDERS}"
    with scene(server, "public.orders", "public.keyless", create=create) as at:
        with psycopg.connect(at.dsn, autocommit=True) as dba:
            for statement in at.installation.script([], None).split("end $do$;"):
                dba.execute((statement + "end $do$;").encode() if "do $do$" in statement else b"")
        at.run("alter table orders drop constraint orders_pkey")
        assert findings(at)["replica_identity"].found.startswith("public.orders has no replica identity")
        assert at.source.condition().gauges["unusable_tables"] == 1
        assert at.db.execute("select * from seen").fetchall() == []


def as_role(dsn: str, role: str) -> Secret:
    return Secret(psycopg.conninfo.make_conninfo(dsn, user=role, password="p"))


def piece(at: Scene, start: str | None = None) -> Slice:
    """All there is."""
    start = start or at.source.earliest(0)
    (flush,) = at.db.execute("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone() or (0,)
    return Slice(0, start, f"{start[:25]}{int(flush):016x}:{0:08x}")


REFUSED: list[tuple[str, Any, str, str]] = [
    ("create table t (id int)", "public.t", "has no replica identity", "alter table public.t add primary key"),
    ("create table t (id int not null unique)", "public.t", "has no replica identity",
     "alter table public.t replica identity using index t_id_key;"),
    ("create table t (id int primary key); alter table t replica identity nothing", "public.t",
     "has no replica identity", "replica identity using index t_pkey"),
    ("create table t (id int primary key deferrable)", "public.t", "has no replica identity", "add primary key"),
    ("create table t (id int primary key, v int)", {"name": "public.t", "columns": ["v"]},
     "has column id in its replica identity, which is not published", "publish all columns of the replica identity"),
    ("create table t (id int primary key, v int)", {"name": "public.t", "exclude": ["id"]},
     "has column id in its replica identity", "publish all columns"),
    ("create table t (id int primary key, v int); alter table t replica identity full",
     {"name": "public.t", "exclude": ["v"]}, "has replica identity full",
     "alter table public.t replica identity using index t_pkey"),
    ("create table t (id int primary key, v int)", {"name": "public.t", "where": "v > 1"},
     "is filtered by column v, which is not in its replica identity", "alter table public.t replica identity full"),
    (("create table t (id int, primary key (id)) partition by range (id);"
     " create table t_1 partition of t for values from (0) to (9);"
     " alter table t_1 replica identity nothing"), "public.t", "public.t_1 has no replica identity",
     "alter table public.t_1"),
    (("create table t (id int, primary key (id)) partition by range (id);"
     " create table t_1 partition of t for values from (0) to (9);"
     " alter table t_1 replica identity full"), "public.t", "another replica identity than public.t", "alter table"),
    ("create table t (id int primary key)", {"name": "public.t", "exclude": ["w"]}, 'has no column "w"', "id"),
    ("select 1", "public.t", "does not exist", "create it first"),
    ("create view t as select 1", "public.t", "not a table that can be captured", "views"),
    ("create unlogged table t (id int primary key)", "public.t", "not a table that can be captured", "unlogged"),
    (("create table p (id int primary key) partition by range (id);"
     " create table t partition of p for values from (0) to (9)"), "public.t", "is a partition", "whole table"),
    ("create table t (id int primary key)", {"name": "public.t", "where": "nothing = 1"},
     "`where` of table public.t cannot be used: column \"nothing\" does not exist (it is: nothing = 1)", "own columns"),
    ("create table t (id int primary key)", {"name": "public.t", "where": "id >"},
     "`where` of table public.t cannot be used: syntax error", "as SQL writes it"),
    ("create table t (id int primary key)", {"name": "public.t", "where": "id > (select 1)"},
     "`where` of table public.t cannot be used", "without queries"),
    ("create table t (id int primary key)", {"name": "public.t", "where": "id"},
     "`where` of table public.t cannot be used", "as SQL writes it"),
]  # fmt: skip


@pytest.mark.parametrize(("create", "table", "said", "hint"), REFUSED, ids=[each[2][:40] for each in REFUSED])
def test_a_table_that_the_publication_would_break_is_refused(
    server: PostgresServer, create: str, table: Any, said: str, hint: str
) -> None:
    """With the line to run; nothing is made, and the users' updates go on as before."""
    with fresh_database(server) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"create table sound (id int primary key); {create}".encode())
        before = inventory(dsn)
        with pytest.raises(EvermarkError) as caught:
            install(dsn, "public.sound", table)
        assert said in caught.value.message and hint in caught.value.hint
        # AND `config check --connect` says the same
        wrong = [each for each in foreseen(dsn, "public.sound", table) if each.grade is Grade.WRONG]
        assert [(each.check, each.found, each.mend) for each in wrong] == [
            ("tables", caught.value.message, caught.value.hint)
        ]
        assert inventory(dsn) == before


def test_a_condition_that_a_repair_cannot_use_is_named(server: PostgresServer) -> None:
    """GIVEN a changed publication WHEN the file has another `where` by then THEN the table and it are named."""
    with scene(server, "public.orders", create=ORDERS) as at:
        at.run(f"alter publication {at.settings.publication} set (publish = 'insert')")
        broken = tables_settings(at.dsn, {"name": "public.orders", "where": "id >"}).tables
        target = at.settings.model_copy(update={"tables": broken}).target()
        with pytest.raises(SetupError, match=r"`where` of table public\.orders cannot be used: syntax error"):
            repair_of(target, lambda: at.source._versions).begin(lambda: False)


def test_what_can_be_published_is_foreseen_and_nothing_is_made(server: PostgresServer) -> None:
    """As `config check --connect` asks: tried, and rolled back. What another session holds just now is not judged."""
    with fresh_database(server) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn) as other:
            conn.execute(ORDERS.encode())
            before = inventory(dsn)
            chosen = {"name": "public.orders", "columns": ["id", "note"], "where": "id > 1"}
            assert "public.orders can be published" in [each.found for each in foreseen(dsn, chosen)]
            other.execute("lock table orders in access exclusive mode")
            assert "public.orders can be published" in [each.found for each in foreseen(dsn, chosen)]
            other.rollback()
        assert inventory(dsn) == before


def test_columns_and_rows_that_are_chosen(server: PostgresServer) -> None:
    """`columns`, `exclude` and `where` hold at the server: the rest never leaves it. `hash` leaves as a digest."""
    create = f"""{ORDERS}
    create table users (id int primary key, name text, password text, email text, "Odd Name" int);
    create table items (id int primary key, kind text, note text); alter table items replica identity full;
    """
    users = {"name": "public.users", "exclude": ["password"], "hash": ["email", "id"]}
    chosen = [{"name": "public.orders", "columns": ["id", "note"]}, users]
    with scene(server, *chosen, {"name": "public.items", "where": "kind = 'b''s'"}, create=create) as at:
        at.run(
            "insert into orders values (1, 2, 'n')",
            "insert into users values (1, 'ann', 'secret', 'a@b.c', 3)",
            "update users set id = 2",
            "insert into items values (1, 'a', 'x'), (2, 'b''s', 'y')",
            "update items set kind = 'a' where id = 2",
        )
        rows = at.changes()
        assert "secret" not in str(rows) and "a@b.c" not in str(rows)
        payloads = [(row["op"], row["payload"] and json.loads(row["payload"])) for row in rows]
        assert payloads[0] == ("insert", {"id": 1, "note": "n"})
        digest, one = (f"sha256:{hashlib.sha256(text).hexdigest()}" for text in (b"a@b.c", b"1"))
        assert payloads[1] == ("insert", {"id": one, "name": "ann", "email": digest, "Odd Name": 3})
        assert (rows[1]["key"], rows[2]["previous_key"]) == (one, one)
        # AND a row that leaves the choice is deleted, as far as anybody outside can see
        assert [(op, row["key"]) for (op, _), row in zip(payloads[3:], rows[3:], strict=True)] == [
            ("insert", "2"), ("delete", "2"),
        ]  # fmt: skip
        # AND a column that came later is not published, and doctor says so, until install is run again
        at.run("alter table users add column phone text", "insert into users values (9, 'b', 's', 'm', 1, 'phone 5')")
        assert "phone 5" not in str(at.all())
        assert "column phone came after install" in findings(at)["tables"].found
        at.installation.install([], wait_s=10.0, say=lambda line: None, goes_on=True)
        assert "tables" not in findings(at)
        at.run("insert into users values (10, 'b', 's', 'm', 1, 'phone 6')")
        assert "phone 6" in str(at.all())


def test_a_renamed_column_does_not_publish_what_was_to_be_hidden(server: PostgresServer) -> None:
    """Until the file names it, a column that came when a hashed one went is hashed, too."""
    create = "create table users (id int primary key, email text, city text)"
    with scene(server, {"name": "public.users", "hash": ["email"]}, create=create) as at:
        at.run(
            "insert into users values (1, 'a@b.c', 'Ulm')",
            "alter table users rename email to mail",
            "insert into users values (2, 'a@b.c', 'Ulm')",
            "alter table users add column zip text",
            "insert into users values (3, 'a@b.c', 'Ulm', '1')",
        )
        for rows in (at.changes(), [row for row in at.drain() if row["op"] != "schema"]):
            assert "a@b.c" not in str(rows)
            assert [json.loads(row["payload"])["city"] for row in rows] == ["Ulm"] * 3
        at.run("insert into users values (4, 'a@b.c', 'Ulm', '1')")
        assert "a@b.c" not in str(at.drain())  # also when the rename is long past
        # AND the file's new word holds as it is, and is remembered: zip was looked at, when the old one comes back
        start = at.source.earliest(0)
        for hashed, hidden in ((["email"], {"mail", "zip"}), (["mail"], {"mail"}), (["email"], {"mail"})):
            table = at.settings.tables[0].model_copy(update={"hash": hashed})
            settings = at.settings.model_copy(update={"tables": [table]})
            at.run("update users set city = city where id = 3")
            with closing(type(at.source)(settings.target(), at.source._open)) as source:
                found = [row for batch in source.read(piece(at, start)) for row in batch.to_pylist()]
            payload = json.loads(found[-1]["payload"])
            assert {name for name, value in payload.items() if str(value).startswith("sha256:")} == hidden


@pytest.mark.parametrize(
    "renames",
    [
        ["rename email to email_old", "add column email text"],
        ["rename email to x", "rename city to email", "rename x to city"],
        ["rename email to mail", "rename name to email"],
        ["drop column city", "rename email to email_old", "add column email text"],
    ],
    ids=["another of its name", "swapped", "an earlier one takes its name", "in place of one dropped"],
)
def test_a_hashed_name_that_goes_to_another_column_publishes_nothing(
    server: PostgresServer, renames: list[str]
) -> None:
    """The file's column is still there by name; what was under it before stays hidden, and so in later versions."""
    create = "create table users (id int primary key, name text, email text, city text)"
    with scene(server, {"name": "public.users", "hash": ["email"]}, create=create) as at:
        at.run("insert into users values (1, 'ann', 'a@b.c', 'Ulm')", "begin")
        at.run(*(f"alter table users {each}" for each in renames), "commit", "update users set id = 1")
        at.run("alter table users add column zip text", "update users set zip = '89073'")
        for rows in (at.changes(), [row for row in at.drain() if row["op"] != "schema"]):
            assert len(rows) == 3 and "a@b.c" not in str(rows)
            assert json.loads(rows[2]["payload"])["zip"] == "89073"  # merely added, later
        at.run("update users set zip = '89075'")
        assert "a@b.c" not in str(at.drain())


def test_a_renamed_table_stops_until_the_file_names_it(server: PostgresServer) -> None:
    """Its rows are neither lost nor taken without what the file says of its columns; one taken out is passed over."""
    create = ORDERS + "create table users (id int primary key, email text)"
    with scene(server, "public.orders", {"name": "public.users", "hash": ["email"]}, create=create) as at:
        at.run("insert into users values (1, 'a@b.c')", "alter table users rename to people")
        at.run("insert into people values (2, 'd@e.f')")
        with pytest.raises(SetupError, match=r"public.people is published, and the file does not name it"):
            at.all()
        wider = tables_settings(at.dsn, "public.orders", *(
            {"name": f"public.{name}", "hash": ["email"]} for name in ("users", "people")
        ))  # fmt: skip
        wider = wider.model_copy(update={"slot": at.settings.slot, "publication": at.settings.publication})
        source = type(at.source)(wider.target(), at.source._open)
        rows = [row for batch in source.read(piece(at)) for row in batch.to_pylist()]
        source.close()
        assert [row["stream"] for row in rows if row["op"] == "insert"] == ["public.users", "public.people"]
        assert "d@e.f" not in str(rows)
        # WHEN it is taken out of the file and the publication, what it wrote before is not wanted any more
        at.run("insert into orders values (1, 1, 'x')")
        narrow = wider.model_copy(update={"tables": wider.tables[:1]})
        TablesInstallation(narrow).install([], wait_s=10.0, say=lambda line: None, goes_on=True)
        source = type(at.source)(narrow.target(), at.source._open)
        rows = [row for batch in source.read(piece(at)) for row in batch.to_pylist()]
        source.close()
        assert {row["stream"] for row in rows} == {"public.orders"}


def test_tables_named_by_keywords_and_letters_of_any_kind(server: PostgresServer) -> None:
    """As SQL takes them without quotes, or with: installed, read, and nothing for doctor to say."""
    names = ["order.items", "public.user", "public.größe", 'public."Select"', '"a.b"."c""d"']
    quoted = ['"order".items', 'public."user"', *names[2:]]
    create = 'create schema "order"; create schema "a.b";' + "".join(
        f"create table {name} (id int primary key);" for name in quoted
    )
    with scene(server, *names, create=create) as at:
        at.run(*(f"insert into {name} values (1)" for name in quoted))
        streams = [row["stream"] for row in at.changes()]
        assert streams == ["order.items", "public.user", "public.größe", "public.Select", 'a.b.c"d']
        assert "tables" not in findings(at)


def test_what_is_dropped_before_it_is_taken_out(server: PostgresServer) -> None:
    """As the docs say: a listed column cannot go alone, and what leaves the publication is a gap."""
    chosen = {"name": "public.orders", "columns": ["id", "note"]}
    with scene(server, chosen, create=ORDERS) as at:
        start = at.source.earliest(0)
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            at.run("alter table orders drop column note")
        at.run("alter table orders drop column note cascade")
        with pytest.raises(GapError, match="was changed by somebody"):
            at.source.check({0: start})
        with closing(at.source.repair(0)) as repair:
            assert repair.begin(lambda: False).pieces  # closed by itself, without the column
            repair.abandon()


def test_a_dropped_table_is_named_until_the_file_is_without_it(server: PostgresServer) -> None:
    """It is no gap that a repair could close, and spends none of its tries: file, instance and nothing else mend it."""
    with scene(server, "public.orders", "public.more", create=ORDERS + "create table more (id int primary key)") as at:
        start = at.source.earliest(0)
        at.run("drop table more", "insert into orders values (1, 1, 'x')")
        repair = repair_of(at.settings.target(), lambda: at.source._versions)
        for ask in (lambda: at.source.check({0: start}), lambda: at.all(start), lambda: repair.begin(lambda: False)):
            with pytest.raises(SetupError, match=r"public\.more, which .* does not exist any more") as caught:
                ask()
            assert not may_open(caught.value)
            assert "take it out of the file, and start `evermark up` again" in caught.value.hint
        found = findings(at)
        for check in ("publication", "tables"):
            assert "public.more" in found[check].found and "start `evermark up` again" in found[check].mend
        # WHEN the file is without it THEN it is a gap, which is closed by itself
        narrow = at.settings.model_copy(update={"tables": at.settings.tables[:1]}).target()
        source = type(at.source)(narrow, at.source._open)
        with pytest.raises(GapError, match="was changed by somebody"):
            source.check({0: start})
        with closing(source.repair(0)) as again:
            assert again.begin(lambda: False).pieces
            again.abandon()
        source.check({0: start})
        source.close()


def test_a_table_that_is_not_there_yet_stops_no_other(server: PostgresServer) -> None:
    """Nor one that was renamed, beside its new name: the publication is as it was installed."""
    with scene(server, "public.orders", create=ORDERS) as at:
        wider = at.settings.model_copy(update={"tables": tables_settings(at.dsn, "public.orders", "public.new").tables})
        source = type(at.source)(wider.target(), at.source._open)
        source.check({0: source.earliest(0)})
        source.close()
        found = {each.check: each for each in examined(wider.target(), lambda: at.source, None)}
        assert found["publication"].grade is Grade.OK
        assert found["tables"].found == "public.new stands in the file and does not exist"
        assert "or create it" in found["tables"].mend


def test_a_dropped_constraint_is_noticed_and_said(server: PostgresServer) -> None:
    """By doctor and by a running source, with the line to run: the users' own updates fail from then on."""
    with scene(server, "public.orders", create=ORDERS) as at:
        assert at.source.condition().warnings == {} and "replica_identity" not in findings(at)
        at.run("alter table orders drop constraint orders_pkey")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            at.run("insert into orders values (1, 1, ''); update orders set total = 2")
        found = findings(at)["replica_identity"]
        assert found.grade is Grade.WRONG and "public.orders has no replica identity" in found.found
        assert "alter table public.orders add primary key" in found.mend
        warned = at.source.condition().warnings
        assert "public.orders" in warned["unusable_tables"].said
        # AND that what is inserted meanwhile may have no key
        keys = findings(at)["keys"]
        assert keys.grade is Grade.WARNING and keys.found == f"public.orders {warned['keyless_tables'].said[14:]}"
        assert "rows that are inserted have the key it had before" in keys.found
        at.run("alter table orders replica identity full")
        assert list(at.source.condition().warnings) == ["keyless_tables"]
        assert "its events have no key" in findings(at)["keys"].found
        at.run("alter table orders add primary key (id)", "alter table orders replica identity nothing")
        assert list(at.source.condition().warnings) == ["unusable_tables"] and "keys" not in findings(at)


def test_a_publication_changed_by_somebody_is_a_gap(server: PostgresServer) -> None:
    """Dropped and added again it looks the same, and rows are missing; install does not paper over it."""
    with scene(server, "public.orders", create=ORDERS) as at:
        start, name = at.source.earliest(0), at.settings.publication
        at.run(f"alter publication {name} drop table orders", f"alter publication {name} add table only orders")
        with pytest.raises(GapError, match="was changed by somebody"):
            at.source.check({0: start})
        with pytest.raises(GapError, match="was changed by somebody"):
            at.all(start)
        with pytest.raises(SetupError, match="was changed by somebody"):
            at.installation.install([], wait_s=10.0, say=lambda line: None, goes_on=True)
        assert "changed by somebody" in findings(at)["publication"].found


def test_a_table_is_added_and_taken_out_while_reading_goes_on(server: PostgresServer) -> None:
    """The file says which, install alters the publication in one transaction, and no row of the others is missed."""
    with scene(server, "public.orders", create=ORDERS + "create table more (id int primary key)") as at:
        start = at.source.earliest(0)
        at.run("insert into orders values (1, 1, '')")
        added = tables_settings(at.dsn, "public.orders", "public.more")
        added = added.model_copy(update={"slot": at.settings.slot, "publication": at.settings.publication})
        TablesInstallation(added).install([], wait_s=10.0, say=lambda line: None, goes_on=True)
        at.run("insert into more values (1)", "insert into orders values (2, 1, '')")
        source = type(at.source)(added.target(), at.source._open)
        source.check({0: start})
        rows = [row for batch in source.read(piece(at)) for row in batch.to_pylist()]
        source.close()
        assert [row["stream"] for row in rows if row["op"] == "insert"] == [
            "public.orders", "public.more", "public.orders",
        ]  # fmt: skip


def test_a_table_that_is_put_back_while_the_old_file_is_read_stops_reading(server: PostgresServer) -> None:
    """GIVEN rows of a table that were still to be read when it was taken out of the file, and were left out WHEN it is
    put back, and a row of it comes to the reader with the old file THEN that reader stops, and takes nothing of it."""
    with scene(server, "public.orders", "public.more", create=ORDERS + "create table more (id int primary key)") as at:
        at.run("insert into more values (1)")
        at.drain()
        start = piece(at).end  # what the checkpoint says: the table is known there
        at.run("insert into more values (2)")
        without = tables_settings(at.dsn, "public.orders")
        without = without.model_copy(update={"slot": at.settings.slot, "publication": at.settings.publication})
        TablesInstallation(without).install([], wait_s=10.0, say=lambda line: None, goes_on=True)
        source = type(at.source)(without.target(), at.source._open)
        feed = source.follow(0, start, lambda: None)
        taken: list[str] = []

        def take(stream: str) -> bool:
            fed = feed.next()
            if fed is not None:
                taken.extend(row["stream"] for batch in as_batches(fed.batches()) for row in batch.to_pylist())
            return stream in taken

        try:
            at.run("insert into orders values (1, 1, '')")
            until(partial(take, "public.orders"), "the row of the other table is sent", timeout_s=30)
            at.installation.install([], wait_s=10.0, say=lambda line: None, goes_on=True)
            at.run("insert into more values (3)", "insert into orders values (2, 1, '')")
            with pytest.raises(SetupError, match=r"public\.more is published, and the file does not name it"):
                until(lambda: take("public.more"), "the row of the table that is back is met", timeout_s=10)
        finally:
            feed.close()
            source.close()


@pytest.mark.parametrize("lost", ["slot", "publication"])
def test_p7_a_gap_in_tables_has_their_rows_as_of_the_new_slot(server: PostgresServer, lost: str) -> None:
    """GIVEN a lost slot or a changed publication WHEN the gap is opened THEN it has the rows as they were where the new
    slot begins, under the old name at the end, and later changes come from the slot."""
    with scene(server, "public.orders", create=ORDERS) as at:
        left_at = at.source.earliest(0)
        name = at.settings.publication
        at.run("insert into orders values (1, 1, 'lost')")
        if lost == "slot":
            at.run(f"select pg_drop_replication_slot('{at.settings.slot}')")
        else:
            at.run(f"alter publication {name} drop table orders", f"alter publication {name} add table only orders")
        with pytest.raises(GapError):
            at.source.check({0: left_at})
        repair = at.source.repair(0)
        gap = pickle.loads(pickle.dumps(repair.begin(lambda: False, left_at)))
        at.run("update orders set note = 'later'")
        (found,) = (row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist())
        assert found["op"] == "read" and found["key"] == "1" and "lost" in found["payload"]
        assert gap.is_state and gap.covers("public.orders") and not gap.covers("public.users")
        places = gap.positions(0, 2).to_pylist()
        assert left_at < places[0] < places[1] < gap.position
        repair.finish(gap.position)
        repair.close()
        at.source.check({0: gap.position})
        at.run("insert into orders values (2, 1, 'after')")
        told = [(row["op"], row["key"]) for row in at.all(gap.position) if row["op"] != "schema"]
        assert told == [("update", "1"), ("insert", "2")]
        assert "publication" not in findings(at) and "spare_slot" not in findings(at)


@pytest.mark.parametrize("done", ["alter table orders alter column total type text", "truncate orders"])
def test_p7_a_table_that_is_rewritten_during_the_repair_is_not_taken_for_empty(
    server: PostgresServer, done: str
) -> None:
    """GIVEN a gap that is being looked through WHEN a table is rewritten, which empties it for older snapshots, THEN
    the repair begins again: all its rows would be logged as deleted."""
    with scene(server, "public.orders", create=ORDERS) as at:
        left_at = at.source.earliest(0)
        at.run("insert into orders values (1, 1, 'kept')", f"select pg_drop_replication_slot('{at.settings.slot}')")
        repair = at.source.repair(0)
        try:
            gap = repair.begin(lambda: False, left_at)
            at.run(done)
            with pytest.raises(BusyError, match="was rewritten or truncated"):
                [list(gap.read(piece)) for piece in gap.pieces]
            again = repair.begin(lambda: False, left_at)
            rows = sum(batch.num_rows for piece in again.pieces for batch in again.read(piece))
            assert rows == (1 if done.startswith("alter") else 0)
            repair.abandon()
        finally:
            repair.close()


def test_p7_a_role_without_the_right_to_read_is_told_before_anything_is_read(server: PostgresServer) -> None:
    """GIVEN a role that may use slots alone WHEN a gap is to be looked through THEN the line to run is said; a person
    may still skip it."""
    with scene(server, "public.orders", create=ORDERS) as at:
        left_at, role = at.source.earliest(0), f"reader_{at.settings.slot}"
        at.run(
            f"create role {role} login replication password 'p'",
            f"select pg_drop_replication_slot('{at.settings.slot}')",
        )
        target = replace(
            at.settings.target(), dsn=Plain(psycopg.conninfo.make_conninfo(at.dsn, user=role, password="p"))
        )
        repair = repair_of(target, lambda: at.source._versions)
        try:
            gap = repair.begin(lambda: False, left_at)
            with pytest.raises(SetupError, match=r"may not read table public\.orders") as caught:
                next(iter(gap.pieces))
            assert f'grant select on public.orders to "{role}";' in caught.value.hint
            at.run(f"grant select (id, total, note) on orders to {role}")
            assert len(repair.begin(lambda: False).pieces) == 1
            repair.abandon()
        finally:
            repair.close()
            at.run(f"drop owned by {role}", f"drop role {role}")
