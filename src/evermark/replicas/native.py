"""A table and its versions as two SQLite files, for a peer on SQLite that made the table with the same statements.

Such a peer copies whole pages of them, which is several times as fast as any way through Python. Nothing is converted,
so this is only for tables whose values are in canonical form as they are stored; which the taker checks, together with
all else: that the files have the tables they should have and nothing else, and a version for each row. Where anything
is not so the files are `NotNative`, and the snapshot travels as columns, which tells what is wrong, if anything is.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evermark.errors import ConflictError
from evermark.replicas.event import ORIGIN
from evermark.replicas.values import VALUE_CHARS_MAX, Kind, Table

FILES = ("rows", "versions")
_FORM = "select type, name, sql from {schema}.sqlite_master where tbl_name = ? and sql is not null order by 1, 2"
_STORED = {
    Kind.INTEGER: "integer",
    Kind.REAL: "real",
    Kind.BOOLEAN: "integer",
    Kind.TEXT: "text",
    Kind.BYTES: "blob",
}
_LONG = {Kind.TEXT: VALUE_CHARS_MAX, Kind.BYTES: VALUE_CHARS_MAX // 2}
_NUMBER_MAX = 2**62 - 1


class NotNative(ConflictError):
    """Files of a snapshot cannot be made, or taken as they are; columns can."""


def names_of(table: str) -> tuple[str, str]:
    """The tables of the two files."""
    return table, f"{table}_Versions"


def form_of(connection: sqlite3.Connection, table: str, schema: str = "main") -> list[list[Any]]:
    """The statements that made the two tables and their indexes."""
    return [
        list(row)
        for name in names_of(table)
        for row in connection.execute(_FORM.format(schema=schema), [name])
        if row[0] in ("table", "index")
    ]


def digest_of(form: Sequence[Sequence[Any]]) -> str:
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()


def is_possible(spec: Table, columns: Sequence[tuple[str, int]]) -> bool:
    """Whether the table can travel this way: all its `columns` (name, hidden) are replicated, and all kinds compared as
    they are stored. A number of kind numeric has several forms."""
    named = [name for name, hidden in columns if not hidden]
    return named == list(spec.columns) and len(named) == len(columns) and set(spec.columns.values()) <= set(_STORED)


@contextmanager
def dumping(path: Path, folder: Path, table: str, form: Sequence[Sequence[Any]]) -> Iterator[Callable[[], list[Path]]]:
    """Two connections that see the moment at which this is entered, while the caller keeps writers out; what is
    returned dumps the tables side by side, when writers are let in again."""
    files = [folder / f"{name}.db" for name in FILES]
    opened: list[sqlite3.Connection] = []
    try:
        for file in files:
            opened.append(sqlite3.connect(file, isolation_level=None, check_same_thread=False))
            opened[-1].execute("pragma journal_mode = off")
            opened[-1].execute("pragma synchronous = off")
            opened[-1].execute("attach ? as source", [str(path)])
            opened[-1].execute("begin")
            opened[-1].execute("select 1 from source.sqlite_master limit 1").fetchone()

        def dump(connection: sqlite3.Connection, name: str) -> None:
            for kind, made, sql in form:
                if made == name or (kind == "index" and _indexed(connection, made) == name):
                    connection.execute(sql)
            connection.execute(f'insert into main."{name}" select * from source."{name}"')
            connection.execute("commit")

        def all_dumped() -> list[Path]:
            with ThreadPoolExecutor(len(files)) as threads:
                list(threads.map(dump, opened, names_of(table)))
            return files

        yield all_dumped
    except sqlite3.Error as error:
        raise NotNative(f"{table} cannot be copied as it is: {error}", hint="its snapshot is made as columns") from None
    finally:
        for connection in opened:
            connection.close()


def _indexed(connection: sqlite3.Connection, index: str) -> str:
    asked = "select tbl_name from source.sqlite_master where type = 'index' and name = ?"
    return str(connection.execute(asked, [index]).fetchone()[0])


def check(spec: Table, files: Sequence[Path], form: Sequence[Sequence[Any]], record_sql: str) -> int:
    """How many versions there are. `record_sql` is the record id of a row `b`. Two threads, each with a half of it."""

    def checked(part: Callable[[sqlite3.Connection, Table], Any]) -> Any:
        try:
            with closing(sqlite3.connect(f"{files[0].resolve().as_uri()}?mode=ro", uri=True)) as connection:
                connection.execute("pragma trusted_schema = off")
                connection.execute("pragma cell_size_check = on")
                connection.execute("attach ? as versions", [str(files[1])])
                _check_form(connection, spec, form)
                return part(connection, spec)
        except sqlite3.Error as error:
            raise _not_native(spec, str(error)) from None

    with ThreadPoolExecutor(2) as threads:
        rows_found = threads.submit(checked, _check_rows)
        every, live, both = threads.submit(
            checked, lambda connection, spec: _check_versions(connection, spec, record_sql)
        ).result()
        rows = rows_found.result()
    if not rows == live == both:
        raise _not_native(spec, f"{both} of {rows} rows have a version, {live} versions are there")
    return int(every)


def _check_form(connection: sqlite3.Connection, spec: Table, form: Sequence[Sequence[Any]]) -> None:
    """Nothing of a file is read that was not made by a statement of our own: so no SQL of a peer's is ever run."""
    found = [
        list(row)
        for schema in ("main", "versions")
        for row in connection.execute(f"select type, name, sql from {schema}.sqlite_master where sql is not null")
        if row[1] != "sqlite_sequence"
    ]
    if sorted(found) != sorted(map(list, form)):
        raise _not_native(spec, "its tables are others")


def _check_rows(connection: sqlite3.Connection, spec: Table) -> int:
    """By the few sets of types that there are: what is looked at in each row is kept to the least."""
    where = f'main."{spec.name}"'
    types = ", ".join(f'typeof("{column}")' for column in spec.columns)
    for found in connection.execute(f"select distinct {types} from {where}"):
        for (column, kind), stored in zip(spec.columns.items(), found, strict=True):
            if stored != _STORED[kind] and (stored != "null" or column in spec.key):
                raise _not_native(spec, f"{column} has a {stored}")
    odd = [f'length("{column}") > {_LONG[kind]}' for column, kind in spec.columns.items() if kind in _LONG]
    odd += [f'"{column}" not in (0, 1)' for column, kind in spec.columns.items() if kind is Kind.BOOLEAN]
    if odd and connection.execute(f"select 1 from {where} where {' or '.join(odd)} limit 1").fetchone():
        raise _not_native(spec, "a value is too long, or no boolean")
    return int(connection.execute(f"select count(*) from {where}").fetchone()[0])


def _check_versions(connection: sqlite3.Connection, spec: Table, record_sql: str) -> tuple[int, int, int]:
    """How many there are, how many of rows that are there, and how many of these have their row."""
    where = f'versions."{spec.name}_Versions"'
    every, gone, *found = connection.execute(
        "select count(*), coalesce(sum(is_deleted), 0), min(hlc), max(hlc), min(origin_seq), max(origin_seq), "
        f"max(typeof(hlc)), max(typeof(origin_seq)), min(is_deleted), max(is_deleted) from {where}"
    ).fetchone()
    # The order of SQLite is null, numbers, texts, bytes; and of the types of numbers, integer and real.
    ends, types, deleted = found[:4], found[4:6], found[6:]
    is_good = all(type(end) is int and 0 < end <= _NUMBER_MAX for end in ends) and types == ["integer"] * 2
    if every and not (is_good and all(type(each) is int and each in (0, 1) for each in deleted)):
        raise _not_native(spec, "a version has a field that is none")
    for (origin,) in connection.execute(f"select distinct origin_node_id from {where}"):
        if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
            raise _not_native(spec, "an origin is none")
    for (record,) in connection.execute(f"select record_id from {where} where is_deleted"):
        if not isinstance(record, str):
            raise _not_native(spec, "a deleted row has no record id")
        spec.checked_record(record)
    # With one column in the key its text finds the row, which is much faster than to find the version by that text.
    found_by = f'b."{spec.key[0]}" = v.record_id and ' if len(spec.key) == 1 else ""
    ways = [f"{where} v", f'main."{spec.name}" b']
    first, second = ways if found_by else reversed(ways)
    both = connection.execute(
        f"select count(*) from {first} cross join {second} on {found_by}{record_sql} = v.record_id "
        "where not v.is_deleted"
    ).fetchone()[0]
    return int(every), int(every) - int(gone), int(both)


def _not_native(spec: Table, why: str) -> NotNative:
    return NotNative(f"files of {spec.name} cannot be taken as they are: {why}", hint="they are taken as columns")
