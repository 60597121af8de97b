"""How each type becomes JSON, as docs/tables.md says, from a real server (P3)."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from evermark.errors import SetupError
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.tables.install import TablesInstallation
from evermark.sources.postgres.tables.scan import TableScan
from evermark.testing.servers import PostgresServer, drop_database, fresh_database
from evermark.testing.until import until
from tests.contract.postgres.tables_scene import Scene, made, scene, tables_settings

TYPES = """
create type mood as enum ('so "so"', 'fine');
create domain cents as bigint check (value >= 0);
create domain tags as text[];
create type point3 as (x int, "the y" numeric, z text);
create type nested as (p point3, ps point3[], big bigint);
"""
BIG = 9007199254740993

# (type, SQL of the value, what it is in JSON)
EXACT: list[tuple[str, str, Any]] = [
    ("smallint", "-32768", -32768),
    ("integer", "2147483647", 2147483647),
    ("bigint", "9007199254740991", 9007199254740991),
    ("bigint", str(BIG), str(BIG)),
    ("bigint", "-9223372036854775808", "-9223372036854775808"),
    ("cents", str(BIG), str(BIG)),
    ("cents", "7", 7),
    ("numeric", "'12345678901234567890.123456789'", "12345678901234567890.123456789"),
    ("numeric(6,2)", "1", "1.00"),
    ("numeric", "'NaN'", "NaN"),
    ("numeric", "'-Infinity'", "-Infinity"),
    ("real", "1.1", 1.1),
    ("double precision", "0.1::float8 + 0.2::float8", 0.30000000000000004),
    ("double precision", "1e300", 1e300),
    ("double precision", "'NaN'", "NaN"),
    ("double precision", "'-Infinity'", "-Infinity"),
    ("money", "'1234.5'", "$1,234.50"),
    ("boolean", "true", True),
    ("boolean", "false", False),
    ("text", r"E'a\"b\\c\n\t\x01 grüß 🙂'", 'a"b\\c\n\t\x01 grüß 🙂'),
    ("text", "''", ""),
    ("text", "'null'", "null"),
    ("varchar(3)", "'abc'", "abc"),
    ("char(4)", "'ab'", "ab  "),
    ('"char"', "'x'", "x"),
    ("name", "'n'", "n"),
    ("bytea", r"'\x00ff5c22'", r"\x00ff5c22"),
    ("bytea", "''", r"\x"),
    ("bit(4)", "B'1010'", "1010"),
    ("varbit", "B'1'", "1"),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("date", "'2024-02-29'", "2024-02-29"),
    ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    ("date", "'infinity'", "infinity"),
    ("time", "'24:00:00'", "24:00:00"),
    ("timetz", "'01:02:03.5+02'", "01:02:03.5+02"),
    ("timestamp", "'2024-01-02 03:04:05.678901'", "2024-01-02T03:04:05.678901"),
    ("timestamp", "'0044-03-15 12:00 BC'", "0044-03-15T12:00:00 BC"),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamptz", "'2024-01-02 03:04:05+02'", "2024-01-02T01:04:05+00:00"),
    ("timestamptz", "'0044-03-15 12:00+00 BC'", "0044-03-15T12:00:00+00:00 BC"),
    ("timestamptz", "'infinity'", "infinity"),
    ("timestamptz", "'294276-12-31 23:59:59+00'", "294276-12-31T23:59:59+00:00"),
    ("interval", "'1 year 2 months -3 days 4:05:06.7'", "P1Y2M-3DT4H5M6.7S"),
    ("interval", "'0'", "PT0S"),
    ("json", f"""'{{"b": {BIG}123, "a":\n [1.10, null]}}'""", {"b": int(f"{BIG}123"), "a": [Decimal("1.10"), None]}),
    ("json", r"""'"\u0000"'""", "\0"),
    ("jsonb", f"'[{BIG}123, 1.10, 1e3]'", [int(f"{BIG}123"), Decimal("1.10"), 1000]),
    ("jsonb", "'null'", None),
    ("xml", "'<a b=\"c\">d</a>'", '<a b="c">d</a>'),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    ("cidr", "'10.0.0.0/8'", "10.0.0.0/8"),
    ("macaddr", "'08:00:2b:01:02:03'", "08:00:2b:01:02:03"),
    ("macaddr8", "'08:00:2b:01:02:03:04:05'", "08:00:2b:01:02:03:04:05"),
    ("point", "'(1,2.5)'", "(1,2.5)"),
    ("box", "'(1,1),(0,0)'", "(1,1),(0,0)"),
    ("polygon", "'((0,0),(1,1))'", "((0,0),(1,1))"),
    ("circle", "'<(0,0),1>'", "<(0,0),1>"),
    ("tsvector", "'a:1 b'", "'a':1 'b'"),
    ("tsquery", "'a & b'", "'a' & 'b'"),
    ("int4range", "'[1,5)'", "[1,5)"),
    ("tstzrange", "'[2024-01-01,)'", '["2024-01-01 00:00:00+00",)'),
    ("int4multirange", "'{[1,2),[5,6)}'", "{[1,2),[5,6)}"),
    ("pg_lsn", "'1/2'", "1/2"),
    ("oid", "7", "7"),
    ("int2vector", "'1 2'", "1 2"),
    ("mood", "'so \"so\"'", 'so "so"'),
    ("int[]", "'{1,NULL,3}'", [1, None, 3]),
    ("int[]", "'{}'", []),
    ("int[]", "'[0:1]={1,2}'", [1, 2]),
    ("int[][]", "'{{1,2},{3,4}}'", [[1, 2], [3, 4]]),
    ("bigint[]", f"'{{1,{BIG}}}'", [1, str(BIG)]),
    ("text[]", """array['a,b', 'c"d', 'e\\f', '{g}', 'NULL', '', null, ' h ']""",
     ["a,b", 'c"d', "e\\f", "{g}", "NULL", "", None, " h "]),
    ("tags", "array['x']", ["x"]),
    ("box[]", "array[box '(1,1),(0,0)', box '(2,2),(1,1)']", ["(1,1),(0,0)", "(2,2),(1,1)"]),
    ("timestamptz[]", "array['2024-01-01 00:00+00']::timestamptz[]", ["2024-01-01T00:00:00+00:00"]),
    ("bytea[]", r"array['\x00'::bytea]", [r"\x00"]),
    ("jsonb[]", """array['{"a": 1}'::jsonb, 'null']""", [{"a": 1}, None]),
    ("boolean[]", "'{t,f}'", [True, False]),
    ("mood[]", "array['so \"so\"', 'fine']::mood[]", ['so "so"', "fine"]),
    ("point3", "row(1, 2.50, 'a \"q\", (b)')", {"x": 1, "the y": "2.50", "z": 'a "q", (b)'}),
    ("point3", "row(null, null, '')", {"x": None, "the y": None, "z": ""}),
    ("nested", f"row(row(1, 2, null), array[row(3, 4, 'x\\y')::point3], {BIG})",
     {"p": {"x": 1, "the y": "2", "z": None}, "ps": [{"x": 3, "the y": "4", "z": "x\\y"}], "big": str(BIG)}),
    ("point3[]", "array[row(1, 2, 'a'), null]::point3[]", [{"x": 1, "the y": "2", "z": "a"}, None]),
]  # fmt: skip


def parsed(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, Decimal):
        return float(found) == wanted
    return (type(found) is type(wanted) and found == wanted) or (isinstance(found, int) and found == wanted)


def has_xml(server: PostgresServer) -> bool:
    """Whether the server was built with it."""
    with server.admin() as admin:
        try:
            admin.execute("select '<a/>'::xml")
        except psycopg.errors.FeatureNotSupported:
            return False
    return True


def test_each_type_is_written_as_the_docs_say(server: PostgresServer) -> None:
    """And a null of it as null, and the same when it is sent as when it is asked for."""
    exact = [each for each in EXACT if each[0] != "xml" or has_xml(server)]
    columns = ", ".join(f"c{n} {kind}" for n, (kind, _, _) in enumerate(exact))
    with scene(server, "public.many", create=f"{TYPES} create table many (id int primary key, {columns})") as at:
        values = ", ".join(f"({text})::{kind}" for kind, text, _ in exact)
        at.run(f"insert into many values (1, {values})", "insert into many (id) values (2)")
        full, empty = (parsed(row["payload"]) for row in at.changes())
        wrong = [
            (kind, text, wanted, full[f"c{n}"])
            for n, (kind, text, wanted) in enumerate(exact)
            if not same(full[f"c{n}"], wanted)
        ]
        assert wrong == []
        assert set(empty.values()) == {2, None}
        # AND whatever the role or the database has set
        at.run(
            f"alter database {at.db.info.dbname} set datestyle = 'German'",
            f"alter database {at.db.info.dbname} set intervalstyle = 'postgres_verbose'",
            f"alter database {at.db.info.dbname} set timezone = 'Asia/Tokyo'",
            f"alter database {at.db.info.dbname} set bytea_output = 'escape'",
            f"alter database {at.db.info.dbname} set extra_float_digits = 0",
        )
        rows = at.all()
        streamed, _ = at.sent(at.source.earliest(0), len(rows))
        assert streamed == rows and parsed(rows[1]["payload"]) == full


def test_names_of_things_have_their_schema_whatever_the_path(server: PostgresServer) -> None:
    """GIVEN a role or database with a search_path of its own WHEN values that are names of tables, types and functions
    are peeked and sent THEN each has its schema, unless it is the server's own."""
    create = """create schema app;
        create table app.t (id int primary key, a regclass, b regtype, c regproc[], d regclass);
        create type app.mood as enum ('fine'); create function app.f() returns int language sql as 'select 1'"""
    with scene(server, "app.t", create=create) as at:
        at.run(
            f"alter database {at.db.info.dbname} set search_path = app",
            f"alter database {at.db.info.dbname} set quote_all_identifiers = on",
            "insert into app.t values (1, 'app.t', 'app.mood', '{app.f}', 'pg_class')",
        )
        at.source.close()
        rows = at.all()
        streamed, _ = at.sent(at.source.earliest(0), len(rows))
        assert streamed == rows
        wanted = {"id": 1, "a": "app.t", "b": "app.mood", "c": ["app.f"], "d": "pg_class"}
        assert json.loads(rows[-1]["payload"]) == wanted


def test_numbers_keep_their_digits(server: PostgresServer) -> None:
    """Whatever the value, reading it back gives what the table has."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    create = "create table n (id int primary key, i bigint, f double precision, d numeric, t timestamptz, a bigint[])"
    with scene(server, "public.n", create=create) as at:
        for number in range(300):
            at.db.execute(
                "insert into n values (%s, %s, %s, %s, %s, %s)",
                (
                    number,
                    rng.choice([rng.randint(-(2**63), 2**63 - 1), rng.randint(2**53 - 3, 2**53 + 3), -1]),
                    rng.choice([rng.uniform(-1e3, 1e3), rng.uniform(0, 1) * 10 ** rng.randint(-300, 300), 1e16, -0.0]),
                    Decimal(rng.randint(-(10**30), 10**30)).scaleb(-rng.randint(0, 30)),
                    f"{rng.randint(1, 9999):04}-{rng.randint(1, 12)}-{rng.randint(1, 28)} {rng.randint(0, 23)}:00+00",
                    [rng.randint(-(2**63), 2**63 - 1) for _ in range(rng.randint(0, 3))],
                ),
            )
        for row in at.changes():
            found = json.loads(row["payload"])
            query = "select i = %s, f = %s, d = %s, t = %s, a = %s::bigint[] from n where id = %s"
            values = (int(found["i"]), float(found["f"]), Decimal(found["d"]), found["t"])
            args = (*values, [int(value) for value in found["a"]], found["id"])
            assert at.db.execute(query, args).fetchone() == (True,) * 5, (seed, found)


def test_generated_and_dropped_columns(server: PostgresServer) -> None:
    """Stored generated columns come from version 18 on, which can publish them; dropped ones are gone."""
    create = "create table g (id int primary key, gone int, twice int generated always as (id * 2) stored)"
    with scene(server, "public.g", create=create) as at:
        at.run("alter table g drop column gone", "insert into g values (2)")
        stored = {"twice": 4} if at.db.info.server_version >= 180000 else {}
        assert [json.loads(row["payload"]) for row in at.changes()] == [{"id": 2, **stored}]


def test_a_composite_type_that_is_altered_while_it_is_read(server: PostgresServer) -> None:
    """A reader that knows the old fields gives the value as text: nothing is dropped, and nothing stops."""
    create = "create type pair as (a int, b bigint); create table p (id int primary key, v pair)"
    with scene(server, "public.p", create=create) as at:
        feed = at.source.follow(0, at.source.earliest(0), lambda: None)
        found: list[Any] = []

        def take(count: int) -> bool:
            fed = feed.next()
            if fed is not None:
                rows = [row for batch in fed.batches() for row in batch.to_pylist()]
                found.extend(json.loads(row["payload"])["v"] for row in rows if row["op"] == "insert")
            return len(found) >= count

        try:
            at.run("insert into p values (1, row(1, 2))")
            until(lambda: take(1), "the first row is sent", timeout_s=30)
            at.run("alter type pair add attribute c text", "insert into p values (2, row(1, 2, 'x'))")
            until(lambda: take(2), "the second row is sent", timeout_s=30)
        finally:
            feed.close()
        assert found == [{"a": 1, "b": 2}, "(1,2,x)"]
        assert json.loads(at.changes()[1]["payload"])["v"] == {"a": 1, "b": 2, "c": "x"}  # one that asks later


@contextmanager
def latin(server: PostgresServer, *tables: Any, create: str) -> Iterator[Scene]:
    """A scene in a database that is in LATIN1."""
    name = f"latin_{secrets.token_hex(6)}"
    with server.admin() as admin:
        options = "template template0 encoding 'LATIN1' lc_collate 'C' lc_ctype 'C'"
        admin.execute(f"create database {name} {options}".encode())
    dsn = server.dsn(name)
    try:
        with psycopg.connect(dsn, client_encoding="utf-8") as db:
            db.execute(create.encode())
        with fresh_database(server) as other, made(dsn, other, *tables) as at:
            yield at
    finally:
        drop_database(server, name)


def test_a_database_in_another_encoding(server: PostgresServer) -> None:
    """Values come in the encoding of the database, and are told in UTF-8."""
    with latin(server, "public.t", create="create table t (id int primary key, v text)") as at:
        at.db.execute("insert into t values (1, %s)", ("grüß",))
        rows = at.changes()
    assert [json.loads(row["payload"]) for row in rows] == [{"id": 1, "v": "grüß"}]


def test_another_encoding_of_the_client_changes_nothing(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an environment, or a database, that asks for another encoding than the server's WHEN rows are peeked and
    sent THEN every letter is as it is in the table."""
    with latin(server, "public.t", create="create table t (id int primary key, v text)") as at:
        monkeypatch.setenv("PGCLIENTENCODING", "UTF8")
        at.db.execute("insert into t values (1, %s)", ("grüß",))
        rows = at.all()
        assert json.loads(rows[-1]["payload"]) == {"id": 1, "v": "grüß"}
        assert at.sent(at.source.earliest(0), len(rows))[0] == rows
        monkeypatch.undo()
    with scene(server, "public.t", create="create table t (id int primary key, v text)") as at:
        at.run(f"alter database {at.db.info.dbname} set client_encoding = 'LATIN1'")
        at.run("insert into t values (1, 'grüß €')")
        at.source.close()
        rows = at.all()
        assert json.loads(rows[-1]["payload"]) == {"id": 1, "v": "grüß €"}
        assert at.sent(at.source.earliest(0), len(rows))[0] == rows


def test_names_in_a_database_in_another_encoding(server: PostgresServer) -> None:
    """GIVEN names of a table, of columns and of a type beyond ASCII in a database in LATIN1 WHEN rows are peeked, sent
    and copied THEN each name is as it is."""
    create = """create type paar as ("ö" int); create table "straße" ("ä" int primary key, "ö" int, "é" paar);"""
    with latin(server, 'public."straße"', create=create) as at:
        at.db.execute("""insert into "straße" values (1, 2, row(3))""".encode("latin-1"))
        rows = at.all()
        assert [row["stream"] for row in rows] == ["public.straße"] * 2
        assert json.loads(rows[-1]["payload"]) == {"ä": 1, "ö": 2, "é": {"ö": 3}}
        assert at.sent(at.source.earliest(0), len(rows))[0] == rows
        target = at.settings.target()
        with connect(target.dsn) as link:
            (copied,) = [row for batch in TableScan(link, target, target.tables[0]).rows() for row in batch.to_pylist()]
        assert (copied["stream"], copied["payload"]) == ("public.straße", rows[-1]["payload"])
        assert at.source.condition().warnings == {}


def test_words_of_the_file_in_a_database_in_another_encoding(server: PostgresServer) -> None:
    """GIVEN a condition beyond ASCII in a database in LATIN1 WHEN rows are written THEN those are published for which
    it is true; AND a letter that the database has not is refused by name."""
    if server.binaries.major < 15:
        pytest.skip("conditions need Postgres 15")
    create = "create table t (id int, city text, primary key (id, city))"
    with latin(server, {"name": "public.t", "where": "city = 'Zürich'"}, create=create) as at:
        at.db.execute("insert into t values (1, 'Zürich'), (2, 'Bern')".encode("latin-1"))
        assert [json.loads(row["payload"]) for row in at.changes()] == [{"id": 1, "city": "Zürich"}]
        other = TablesInstallation(tables_settings(at.dsn, {"name": "public.t", "where": "city = '€'"}))
        with pytest.raises(SetupError, match="has no '€'"):
            other.install([], wait_s=10.0, say=lambda line: None, goes_on=False)
