"""Tables with a column of every built-in type, and how docs/tables.md says that their values are written as JSON.

The rules are written once more here, over texts that the server itself gives: the product's own are held against them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg

Value = Any  # as it is in JSON; numbers with a fraction are Decimals
Row = dict[str, Value]

_EXACT_MAX = 2**53 - 1
# A value's text is the same in every session that has these.
SESSION = """
set datestyle = 'ISO'; set timezone = 'UTC'; set intervalstyle = 'iso_8601'; set bytea_output = 'hex';
set extra_float_digits = 1; set lc_monetary = 'C'
"""


def read_json(text: str) -> Value:
    return json.loads(text, parse_float=Decimal)


def _bigint(text: str) -> Value:
    return int(text) if abs(int(text)) <= _EXACT_MAX else text


def _float(text: str) -> Value:
    return text if text in {"NaN", "Infinity", "-Infinity"} else Decimal(text)


def _moment(text: str) -> Value:
    return text if text.endswith("infinity") else text.replace(" ", "T", 1).replace("+00", "+00:00")


def _as_it_is(text: str) -> Value:
    return text


def _pair(fields: Sequence[str | None]) -> Value:
    x, y = fields
    return {"x": None if x is None else int(x), "the y": y}


@dataclass(frozen=True)
class Kind:
    """A type, some values of it as SQL, and how its text becomes JSON. `shown`: the text as SQL, where it is not just
    what the type's output function writes. `made_of`: SQL that the server makes each value of."""

    type: str
    values: tuple[str, ...]
    json: Callable[[Any], Value] = _as_it_is
    shown: str = "format('%s', {0})"
    made_of: str = ""

    @property
    def sql(self) -> str:
        """As a column is declared."""
        return f"{self.type} generated always as ({self.made_of}) stored" if self.made_of else self.type

    def select(self, column: str) -> str:
        quoted = '"' + column + '"'
        return f"case when {quoted} is null then null else {self.shown.format(quoted)} end"

    def read(self, text: Any) -> Value:
        return None if text is None else self.json(text)


def _array(of: Kind, *values: str) -> Kind:
    def each(value: Any) -> Value:
        return [each(one) for one in value] if isinstance(value, list) else of.read(value)

    return Kind(f"{of.type}[]", values, each, "{0}::text[]")


INT = Kind("integer", ("-2147483648", "0", "7"), int)
BIGINT = Kind("bigint", ("9007199254740991", "9007199254740993", "-9223372036854775808", "5"), _bigint)
NUMERIC = Kind("numeric", ("99.50", "12345678901234567890.123456789", "'NaN'", "'-Infinity'", "0.000"))
TEXT = Kind("text", ("''", "'null'", r"E'a\"b\\c\n\t\x01 grüß 🙂'", "repeat('long ', 800)"))
DOUBLE = Kind("double precision", ("0.1::float8 + 0.2", "1e300", "'NaN'", "'-Infinity'", "-0.0", "1e16"), _float)
STAMPTZ = Kind(
    "timestamptz", ("'2024-01-02 03:04:05.5+02'", "'0044-03-15 12:00+00 BC'", "'infinity'", "'9999-12-31'"), _moment
)
_PAIR_TEXTS = "array[format('%s', ({0}).x), ({0}).\"the y\"::text]"

KINDS: tuple[Kind, ...] = (
    Kind("smallint", ("-32768", "1"), int),
    INT,
    BIGINT,
    NUMERIC,
    Kind("numeric(6,2)", ("1", "-9999.99")),
    Kind("real", ("1.1", "3.4e38", "'Infinity'"), _float),
    DOUBLE,
    Kind("money", ("'1234.5'", "'-0.01'")),
    Kind("boolean", ("true", "false"), lambda text: text == "t"),
    TEXT,
    Kind("varchar(9)", ("'abc'", "'grün'")),
    Kind("char(4)", ("'ab'", "'abcd'")),
    Kind("name", ("'n'",)),
    Kind('"char"', ("'x'",)),
    Kind("bytea", (r"'\x00ff5c22'", "''")),
    Kind("bit(4)", ("B'1010'",)),
    Kind("varbit", ("B'1'", "B''")),
    Kind("uuid", ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",)),
    Kind("inet", ("'10.0.0.1/8'", "'::1'")),
    Kind("cidr", ("'10.0.0.0/8'",)),
    Kind("macaddr", ("'08:00:2b:01:02:03'",)),
    Kind("macaddr8", ("'08:00:2b:01:02:03:04:05'",)),
    Kind("pg_lsn", ("'1/2'",)),
    Kind("oid", ("7",)),
    Kind("date", ("'2024-02-29'", "'0044-03-15 BC'", "'infinity'")),
    Kind("timestamp", ("'2024-01-02 03:04:05.678901'", "'0044-03-15 12:00 BC'", "'-infinity'"), _moment),
    STAMPTZ,
    Kind("time", ("'24:00:00'", "'01:02:03.5'")),
    Kind("timetz", ("'01:02:03.5+02'", "'01:02:03-11:30'")),
    Kind("interval", ("'1 year 2 months -3 days 4:05:06.7'", "'0'", "'-1 month'")),
    Kind("json", ("""'{"b": 9007199254740993123, "a":  [1.10, null]}'""", "'null'", "'\"x\"'"), read_json),
    Kind("jsonb", ("'[9007199254740993123, 1.10, 1e3]'", """'{"z": {"y": []}}'""", "'null'"), read_json),
    Kind("mood", ("'so \"so\"'", "'fine'")),
    Kind("cents", ("7", "9007199254740993"), _bigint),
    Kind("pair", ("row(1, 2.50)", "row(3, null)"), _pair, _PAIR_TEXTS),
    Kind("int4range", ("'[1,5)'", "'empty'")),
    Kind("tstzrange", ("'[2024-01-01,)'",)),
    Kind("int4multirange", ("'{[1,2),[5,6)}'",)),
    Kind("point", ("'(1,2.5)'",)),
    Kind("box", ("'(1,1),(0,0)'",)),
    Kind("polygon", ("'((0,0),(1,1))'",)),
    Kind("circle", ("'<(0,0),1>'",)),
    Kind("tsvector", ("'a:1 b'",)),
    Kind("tsquery", ("'a & b'",)),
    _array(INT, "'{1,NULL,3}'", "'{}'", "'[0:1]={1,2}'", "'{{1,2},{3,4}}'"),
    _array(BIGINT, "'{1,9007199254740993}'"),
    _array(TEXT, """array['a,b', 'c"d', 'e\\f', '{g}', 'NULL', '', null, ' h ']"""),
    _array(NUMERIC, "'{1.50,NaN}'"),
    _array(DOUBLE, "'{0.5,Infinity}'"),
    _array(STAMPTZ, "array['2024-01-01 00:00+00']::timestamptz[]"),
)
# What not every server has, behind a statement that only one that has it can run.
MAYBE: tuple[tuple[str, Kind], ...] = (
    ("select '<a/>'::xml", Kind("xml", ("'<a b=\"c\">d</a>'", "'t &amp; u'"))),
    ("create extension hstore", Kind("hstore", ("'a=>1, \"b c\"=>NULL'", "''"))),
    ("create extension vector", Kind("vector(3)", ("'[1,2.5,-3]'",))),
)
PUBLISHES_GENERATED = 180000
# The large one of a row is not sent again where what it is made of did not change.
GENERATED = {
    "twice": Kind("bigint", (), _bigint, made_of="n::bigint * 2"),
    "loud": Kind("text", (), made_of="body || '!'"),
}
# Of a large value only what fits into a page is sent again when it did not change.
LARGE = Kind("text", ("null", "'short'", "repeat('x\"é', 1500)", "repeat('y\n\\', 3000)"))
DOCUMENT = Kind(
    "jsonb",
    ("null", "'{}'", """jsonb_build_object('n', 1.50, 'body', 5, 'text', repeat('j,"', 3000))""", "'[1.10, \"id\"]'"),
    read_json,
)
PLAIN = {"n": INT, "body": LARGE}


@dataclass(frozen=True)
class OracleTable:
    name: str
    key: Mapping[str, Kind]
    columns: Mapping[str, Kind]
    create: str

    @property
    def stream(self) -> str:
        return f"public.{self.name}"


def _table(name: str, key: Mapping[str, Kind], columns: Mapping[str, Kind], more: str, after: str = "") -> OracleTable:
    listed = ", ".join(f"{column} {kind.type} not null" for column, kind in key.items())
    rest = ", ".join(f"{column} {kind.type}" for column, kind in columns.items())
    external = "".join(
        f"alter table {name} alter {column} set storage external; " for column in columns if column in _OUT
    )
    return OracleTable(name, key, columns, f"create table {name} ({listed}, {rest}{more}; {after} {external}")


_OUT = {"body", "document", "loud"}
_ID = {"id": INT}
TYPES = """
create type mood as enum ('so "so"', 'fine');
create domain cents as bigint check (value >= 0);
create type pair as (x int, "the y" numeric);
"""
TABLES: tuple[OracleTable, ...] = (
    _table("kinds", _ID, {**{f"k{n}": kind for n, kind in enumerate(KINDS)}, **PLAIN}, ", primary key (id))"),
    _table(
        "whole", _ID, {**PLAIN, "document": DOCUMENT}, ", primary key (id))", "alter table whole replica identity full;"
    ),
    _table(
        "indexed",
        {"a": INT, "b": Kind("text", ())},
        PLAIN,
        ")",
        "create unique index indexed_key on indexed (b, a);"
        " alter table indexed replica identity using index indexed_key;",
    ),
    _table("two", {"id": INT, "other": INT}, {**PLAIN, "document": DOCUMENT}, ", primary key (id, other))"),
    _table(
        "parts",
        _ID,
        PLAIN,
        ", primary key (id)) partition by hash (id)",
        "create table parts_0 partition of parts for values with (modulus 2, remainder 0);"
        " create table parts_1 partition of parts for values with (modulus 2, remainder 1);"
        " alter table parts_0 alter body set storage external; alter table parts_1 alter body set storage external;",
    ),
)
RESTS = OracleTable("rests", _ID, {}, "create table rests (id integer primary key)")


def more_columns(conn: psycopg.Connection[Any]) -> dict[str, dict[str, Kind]]:
    """By table: columns of what this server has beyond others. Extensions are made."""
    found: dict[str, Kind] = {}
    for statement, kind in MAYBE:
        with suppress(psycopg.Error), conn.transaction():
            conn.execute(statement.encode())
            found[f"m{len(found)}"] = kind
    return {"kinds": found, "two": GENERATED if conn.info.server_version >= PUBLISHES_GENERATED else {}}


def add_columns(conn: psycopg.Connection[Any], more: Mapping[str, Mapping[str, Kind]]) -> None:
    for table, columns in more.items():
        for name, kind in columns.items():
            conn.execute(f"alter table {table} add column {name} {kind.sql}".encode())
            if name in _OUT:
                conn.execute(f"alter table {table} alter {name} set storage external".encode())


def rows_of(conn: psycopg.Connection[Any], table: OracleTable, columns: Mapping[str, Kind]) -> dict[str, Row]:
    """A table by its key; values as the docs say that they are written."""
    conn.execute(SESSION.encode())
    query = f"select {', '.join(kind.select(name) for name, kind in columns.items())} from {table.name}"
    found: dict[str, Row] = {}
    for row in conn.execute(query.encode()):
        values = {name: kind.read(text) for (name, kind), text in zip(columns.items(), row, strict=True)}
        found[key_of(table, values)] = values
    return found


def key_of(table: OracleTable, row: Row) -> str:
    return json.dumps([row[name] for name in table.key])


def column_names(conn: psycopg.Connection[Any], table: OracleTable) -> set[str]:
    query = "select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
    return {name for (name,) in conn.execute(query, (table.name,))}
