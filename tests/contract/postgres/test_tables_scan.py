"""The rows of a published table, read beside its slot, are what the slot gives for an insert of the same row (X6)."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

import psycopg
import pytest

from evermark.errors import DeniedError, EvermarkError, SetupError
from evermark.secrets import Plain
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.tables.scan import KeyRange, TableScan
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.servers import PostgresServer
from tests.contract.postgres.tables_scene import Row, Scene, scene
from tests.contract.postgres.test_tables_values import EXACT, TYPES, has_xml

SAID = ("stream", "key", "payload")


def scanned(at: Scene, keys: KeyRange | None = None, condition: str = "") -> list[Row]:
    target = at.settings.target()
    with connect(target.dsn) as link:
        scan = TableScan(link, target, target.tables[0])
        return [row for batch in scan.rows(keys, condition) for row in batch.to_pylist()]


def said(rows: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in SAID) for row in rows)


def test_each_type_is_read_as_it_is_streamed(server: PostgresServer) -> None:
    """GIVEN a row with every type, and one of nulls WHEN they are read THEN they are what the slot said of them."""
    exact = [each for each in EXACT if each[0] != "xml" or has_xml(server)]
    columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(exact))
    with scene(server, "public.many", create=f"{TYPES} create table many (id int primary key, {columns})") as at:
        values = ", ".join(f"({text})::{kind}" for kind, text, _ in exact)
        at.run(f"insert into many values (1, {values})", "insert into many (id) values (2)")
        found = scanned(at)
        assert said(found) == said(at.changes())
        assert {row["op"] for row in found} == {"read"}


def test_odd_text_is_read_as_it_is_streamed(server: PostgresServer) -> None:
    """GIVEN every character that COPY escapes, and what looks like an escape WHEN read THEN the slot says the same."""
    odd = ["\\N", "\\\\N", "\\", "a\tb\nc\rd\be\ff\vg", "\\n", "\\\\n\n\\", "\x01\x7f", "", "{%s}", "grüß 🙂", "\\."]
    with scene(server, "public.t", create="create table t (id int primary key, a text, b text)") as at:
        for number, text in enumerate(odd):
            at.db.execute("insert into t values (%s, %s, %s)", (number, text, odd[-number]))
        assert said(scanned(at)) == said(at.changes())
        assert [json.loads(row["payload"])["a"] for row in scanned(at)] == odd
        alone = [scanned(at, KeyRange((str(n - 1),), (str(n),))) for n in range(len(odd))]
        assert said([row for rows in alone for row in rows]) == said(at.changes())


def test_the_publication_says_which_columns_and_rows(server: PostgresServer) -> None:
    """GIVEN columns left out, hashed, and a row filter WHEN rows are read THEN they are those of the slot."""
    table = {"name": 'public."T x"', "exclude": ["secret"], "hash": ["mail", "id"], "where": "id > 2"}
    create = """create table "T x" (id int primary key, secret text, mail text, "a ""b" int, gone int);
        alter table "T x" drop column gone"""
    with scene(server, table, create=create) as at:
        at.run("""insert into "T x" select n, 'hidden', 'm' || n, n from generate_series(1, 5) n""")
        found = scanned(at)
        assert said(found) == said(at.changes()) and len(found) == 3
        assert "hidden" not in str(found) and "m3" not in str(found)


def test_partitions_generated_columns_and_identities(server: PostgresServer) -> None:
    """GIVEN a partitioned table with replica identity full WHEN rows are read THEN all partitions' are, as streamed."""
    create = """create table p (id int primary key, v text, twice int generated always as (id * 2) stored)
        partition by range (id);
        create table p1 partition of p for values from (0) to (10); create table p2 partition of p default;
        alter table p replica identity full; alter table p1 replica identity full;
        alter table p2 replica identity full"""
    with scene(server, "public.p", create=create) as at:
        at.run("insert into p (id, v) values (1, 'a'), (11, 'b')")
        assert said(scanned(at)) == said(at.changes())


def test_the_description_is_the_slots_own(server: PostgresServer) -> None:
    """GIVEN tables of each replica identity WHEN the catalog describes them THEN it is pgoutput's own message."""
    creates = {
        "d": "create table t (b text, a int, primary key (a, b))",
        "i": "create table t (a int not null, v varchar(7)); create unique index u on t (a);"
        " alter table t replica identity using index u",
        "f": "create table t (a int primary key, v numeric(6, 2)); alter table t replica identity full",
    }
    for identity, create in creates.items():
        with scene(server, "public.t", create=create) as at:
            at.run("insert into t (a, b) values (1, 'x')" if identity == "d" else "insert into t values (1, '2')")
            at.all()
            target = at.settings.target()
            with connect(target.dsn) as link:
                scan = TableScan(link, target, target.tables[0])
            known = at.source._versions.before(at_the_end())
            assert scan.relation.identity == identity
            assert known["public.t"].shape == shape_of(scan)


def test_key_ranges_are_disjoint_and_complete(server: PostgresServer) -> None:
    """GIVEN a composite key WHEN the table is read by ranges between bounds THEN each row is read once."""
    create = "create table t (a text, b numeric, v int, primary key (b, a))"
    with scene(server, "public.t", create=create) as at:
        at.run("insert into t select chr(97 + n % 7), n / 7, n from generate_series(0, 99) n")
        target = at.settings.target()
        with connect(target.dsn) as link:
            scan = TableScan(link, target, target.tables[0])
            bounds = list(scan.bounds(15))
            assert len(bounds) == 6 and scan.key == ("b", "a")
            edges = [None, *bounds, None]
            parts = [
                [row["key"] for batch in scan.rows(KeyRange(after, upto)) for row in batch.to_pylist()]
                for after, upto in itertools.pairwise(edges)
            ]
        assert [len(part) for part in parts] == [15] * 6 + [10]
        assert len({key for part in parts for key in part}) == 100
        assert len(scanned(at, condition="v % 10 = 3")) == 10


# A text without regard to capitals, as an extension makes it: its operators stand in a schema of their own.
OWN_TYPE = """
create schema ext; set search_path = ext, public;
create type ci; create function ci_in(cstring) returns ci language internal immutable strict as 'textin';
create function ci_out(ci) returns cstring language internal immutable strict as 'textout';
create type ci (input = ci_in, output = ci_out, like = text, collatable = true);
create cast (ci as text) without function as implicit;
create function lt(ci, ci) returns boolean language sql immutable as 'select lower($1::text) < lower($2::text)';
create function le(ci, ci) returns boolean language sql immutable as 'select lower($1::text) <= lower($2::text)';
create function eq(ci, ci) returns boolean language sql immutable as 'select lower($1::text) = lower($2::text)';
create function ge(ci, ci) returns boolean language sql immutable as 'select lower($1::text) >= lower($2::text)';
create function gt(ci, ci) returns boolean language sql immutable as 'select lower($1::text) > lower($2::text)';
create function cmp(ci, ci) returns int language sql immutable
    as 'select (lower($1::text) > lower($2::text))::int - (lower($1::text) < lower($2::text))::int';
create operator < (leftarg = ci, rightarg = ci, function = lt);
create operator <= (leftarg = ci, rightarg = ci, function = le);
create operator = (leftarg = ci, rightarg = ci, function = eq);
create operator >= (leftarg = ci, rightarg = ci, function = ge);
create operator > (leftarg = ci, rightarg = ci, function = gt);
create operator class ci_ops default for type ci using btree as
    operator 1 <, operator 2 <=, operator 3 =, operator 4 >=, operator 5 >, function 1 cmp(ci, ci);
set search_path = public;
"""


@pytest.mark.parametrize("key", ["a", "a, b", "b, a", "a, b, c"])
def test_a_key_of_a_type_of_an_extension_is_cut_in_its_own_order(server: PostgresServer, key: str) -> None:
    """GIVEN a key of a type that sorts in a way of its own WHEN it is read by ranges THEN each row comes once."""
    create = f"""{OWN_TYPE} create table t (a ext.ci not null, b int not null, c ext.ci not null, v int);
        create unique index u on t ({key}); alter table t replica identity using index u"""
    with scene(server, "public.t", create=create) as at:
        values = "chr(case n % 2 when 0 then 65 else 97 end + n)::ext.ci, n / 4, ('X' || n)::ext.ci, n"
        at.run(f"insert into t select {values} from generate_series(0, 24) n")
        target = at.settings.target()
        with connect(target.dsn) as link:
            scan = TableScan(link, target, target.tables[0])
            edges = [None, *scan.bounds(4), None]
            parts = [
                [json.loads(row["payload"])["v"] for batch in scan.rows(KeyRange(*ends)) for row in batch.to_pylist()]
                for ends in itertools.pairwise(edges)
            ]
        assert [len(part) for part in parts] == [4] * 6 + [1]
        assert sorted(v for part in parts for v in part) == list(range(25))


def test_names_of_a_condition_are_looked_up_where_the_persons_are(server: PostgresServer) -> None:
    """GIVEN a database with a search_path of its own WHEN rows are read by a condition with a function found there THEN
    it is understood, and the rows are as the slot gives them."""
    create = """create schema app; create function app.odd(int) returns boolean language sql as 'select $1 % 2 = 1';
        create table app.t (id int primary key, v regclass)"""
    with scene(server, "app.t", create=create) as at:
        at.run(f"alter database {at.db.info.dbname} set search_path = app")
        at.run("insert into app.t select n, 'app.t' from generate_series(1, 4) n")
        target = at.settings.target()
        with connect(target.dsn) as link:
            with link.connection.transaction():
                scan = TableScan(link, target, target.tables[0])
                found = [row for batch in scan.rows(None, "odd(id)") for row in batch.to_pylist()]
            (path,) = link.one("select current_setting('search_path')", doing="looking")
        assert said(found) == [row for row in said(at.changes()) if row[1] in "13"] and len(found) == 2
        assert path == "pg_catalog, pg_temp" and not link.warnings


def test_what_may_not_be_read_is_said(server: PostgresServer) -> None:
    """GIVEN a role without rights, or one that a policy hides rows from WHEN it reads THEN it is told so."""
    with scene(server, "public.t", create="create table t (id int primary key)") as at:
        at.run("insert into t values (1)", "drop role if exists reading", "create role reading login password 'x'")
        try:
            parts = psycopg.conninfo.conninfo_to_dict(at.dsn)
            target = at.settings.target()
            other = psycopg.conninfo.make_conninfo(**{**parts, "user": "reading", "password": "x"})
            low = PostgresTarget(Plain(other), target.slot, target.publication, tables=target.tables)
            with connect(low.dsn) as link, pytest.raises(DeniedError):
                list(TableScan(link, low, low.tables[0]).rows())
            at.run("grant select on t to reading", "alter table t enable row level security")
            with connect(low.dsn) as link, pytest.raises(EvermarkError):
                list(TableScan(link, low, low.tables[0]).rows())
        finally:
            at.run("drop owned by reading", "drop role reading")


def test_a_table_without_a_key_or_not_published_is_refused(server: PostgresServer) -> None:
    """GIVEN no key WHEN its keys are walked THEN the line to run is told; a table not published is named, too."""
    create = "create table t (v int); alter table t replica identity full; create table u (id int)"
    with scene(server, "public.t", create=create) as at:
        target = at.settings.target()
        with connect(target.dsn) as link:
            with pytest.raises(SetupError, match="no key") as refused:
                list(TableScan(link, target, target.tables[0]).bounds(10))
            assert "add primary key" in refused.value.hint
            with pytest.raises(SetupError, match="not published"):
                TableScan(link, target, type(target.tables[0])("public.u"))


def at_the_end() -> Position:
    return Position(Incarnation(2**64 - 1, 1), 2**63)


def shape_of(scan: TableScan) -> str:
    return hashlib.sha256(scan.relation.shape).hexdigest()[:32]


def test_a_range_of_a_composite_key_is_read_through_its_index(server: PostgresServer) -> None:
    """GIVEN a key of two columns WHEN a range of it is asked for THEN both of its ends are conditions of the index."""
    with scene(server, "public.t", create="create table t (a int, b int, v int, primary key (a, b))") as at:
        target = at.settings.target()
        with connect(target.dsn, enable_seqscan="off", enable_bitmapscan="off") as link:
            scan = TableScan(link, target, target.tables[0])
            where = scan._where(KeyRange(("1", "2"), ("3", "4")), "").as_string(link.connection)
            lines = [row[0] for row in link.rows(f"explain select * from public.t{where}", doing="looking")]
        assert any("Index Cond" in line and ">" in line and "<=" in line for line in lines), lines
