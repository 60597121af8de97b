"""A table and its versions as two SQLite files, for a peer on SQLite that made the table with the same statements.

Such a peer copies all cells of them as they are, which is several times as fast as any way through Python. Nothing is
converted, so this is only for tables whose values are in canonical form as they are stored; which the taker checks,
together with all else: that the files have the tables they should have and nothing else, that their pages are in order,
and that there is a version for each row. Where anything is not so the files are `NotNative`, and the snapshot travels
as columns, which tells what is wrong, if anything is.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from evermark.errors import ConflictError
from evermark.replicas.event import ORIGIN
from evermark.replicas.values import VALUE_CHARS_MAX, Kind, Table

FILES = ("rows", "versions")
_SCHEMAS = ("main", "versions")  # what the two files are called where they are checked
_FORM = "select type, name, sql from {schema}.sqlite_master where tbl_name = ? and sql is not null order by 1, 2"
# Whether a value is stored as its kind says, by the order of SQLite's classes: numbers, texts, bytes. That is quicker
# than `typeof`; the plus keeps a column's affinity from making a number of a text. It leaves integers and reals to be
# told apart in columns that are not of reals, where a sum shows a real.
_STORED = {
    Kind.INTEGER: f"+{{0}} between {-(2**63)} and {2**63 - 1}",  # a sum does not show infinity, which is a real, too
    Kind.REAL: "+{0} < ''",
    Kind.BOOLEAN: "+{0} in (0, 1)",
    Kind.TEXT: "+{0} >= '' and +{0} < x''",
    Kind.BYTES: "+{0} >= x''",
}
_INTEGERS = (Kind.INTEGER, Kind.BOOLEAN)
_SEQUENCE = ("table", "sqlite_sequence", "CREATE TABLE sqlite_sequence(name,seq)")  # SQLite makes it for AUTOINCREMENT
_PAGE_BYTES = 65536  # the largest there are: a dump takes a fifth less than with pages of the usual size
_NUMBERS = ("hlc", "origin_seq")
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
def dumping(
    path: Path, folder: Path, table: str, form: Sequence[Sequence[Any]], made: Callable[[Path], None]
) -> Iterator[Callable[[], list[Path]]]:
    """Two connections that see the moment at which this is entered, while the caller keeps writers out; what is
    returned dumps the tables side by side, when writers are let in again. `made` is told of each file at once, while
    the other may still be growing."""
    files = [folder / f"{name}.db" for name in FILES]
    opened: list[sqlite3.Connection] = []
    try:
        for file in files:
            opened.append(sqlite3.connect(file, isolation_level=None, check_same_thread=False))
            opened[-1].execute(f"pragma page_size = {_PAGE_BYTES}")
            opened[-1].execute("pragma journal_mode = off")
            opened[-1].execute("pragma synchronous = off")
            opened[-1].execute("attach ? as source", [str(path)])
            opened[-1].execute("begin")
            opened[-1].execute("select 1 from source.sqlite_master limit 1").fetchone()

        def dump(file: Path, connection: sqlite3.Connection, name: str) -> None:
            for kind, what, sql in sorted(form, key=lambda each: each[0] != "table"):
                if what == name or (kind == "index" and _indexed(connection, what) == name):
                    connection.execute(sql)
            connection.execute(f'insert into main."{name}" select * from source."{name}"')
            connection.execute("commit")
            made(file)

        def all_dumped() -> list[Path]:
            with ThreadPoolExecutor(len(files)) as threads:
                list(threads.map(dump, files, opened, names_of(table)))
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


def load(connection: sqlite3.Connection, spec: Table, schemas: Sequence[str]) -> None:
    """Copy the tables of two attached files, whose form was checked, into their empty counterparts, within the caller's
    transaction; `check` goes on meanwhile."""
    row_bytes_max = VALUE_CHARS_MAX // (2 if Kind.BYTES in spec.columns.values() else 1)  # a byte is two characters
    before = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, row_bytes_max)
    try:
        for schema, name in zip(schemas, names_of(spec.name), strict=True):
            connection.execute(f'insert into main."{name}" select * from {schema}."{name}"')
    except sqlite3.OperationalError:  # of the database, not of what the files have in them
        raise
    except sqlite3.DatabaseError as error:
        raise _not_native(spec, str(error)) from None
    finally:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)


def check(spec: Table, files: Sequence[Path], record_sql: str, clock: int) -> int:
    """How many versions there are; keys are in order and none comes twice, indexes have what their table has, no rule
    of it is broken, each row has a version, none is beyond the snapshot's `clock`, and every value is of its column's
    kind. `record_sql` is the record id of a row `b`. For SQLite trusts the pages of a file, and copies cells as they
    are, whatever a peer has made of them: so what was loaded stays only if this finds nothing."""
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(partial(_check_pages, spec, files), _SCHEMAS, names_of(spec.name)))
    with _opened(spec, files) as connection:
        return _check_pairs(connection, spec, record_sql, clock)


def _check_pages(spec: Table, files: Sequence[Path], schema: str, name: str) -> None:
    with _opened(spec, files) as connection:
        (found,) = connection.execute(f'pragma {schema}.integrity_check("{name}")').fetchone()
        if found != "ok":
            raise _not_native(spec, str(found)[:200])


@contextmanager
def _opened(spec: Table, files: Sequence[Path]) -> Iterator[sqlite3.Connection]:
    try:
        # Not `mode=ro`: SQLite has no CHECK constraints in a file that it opens for reading.
        with closing(sqlite3.connect(f"{files[0].resolve().as_uri()}?mode=rw", uri=True)) as connection:
            connection.execute("pragma query_only = on")
            connection.execute("pragma trusted_schema = off")
            connection.execute("pragma cell_size_check = on")
            connection.execute("attach ? as versions", [str(files[1])])
            yield connection
    except sqlite3.Error as error:
        raise _not_native(spec, str(error)) from None


def check_form(spec: Table, files: Sequence[Path], form: Sequence[Sequence[Any]]) -> None:
    """Comes before all else: nothing of a file is read that was not made by a statement of our own, so no SQL of a
    peer's is ever run."""
    with _opened(spec, files) as connection:
        found = [
            list(row)
            for schema in _SCHEMAS
            for row in connection.execute(f"select type, name, sql from {schema}.sqlite_master where sql is not null")
            if row != _SEQUENCE
        ]
    if sorted(found, key=repr) != sorted(map(list, form), key=repr):  # a field of a peer's may be of any kind
        raise _not_native(spec, "its tables are others")


def _check_pairs(connection: sqlite3.Connection, spec: Table, record_sql: str, clock: int) -> int:
    """Rows, live versions, and pairs of the two that are as they should be: when there are as many of each, every row
    and every version is in one pair, since none comes twice (`_check_pages`). So one pass does for all."""
    rows_from, versions_from = f'main."{spec.name}"', f'versions."{spec.name}_Versions"'
    rows, every = (_count(connection, f"from {where}") for where in (rows_from, versions_from))
    gone = 0 if every == rows else _check_tombstones(connection, spec, versions_from, clock)
    for (origin,) in connection.execute(f"select distinct origin_node_id from {versions_from}"):
        if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
            raise _not_native(spec, "an origin is none")
    # With one column in the key its text finds the row, which is much faster than to find the version by that text.
    found_by = f'b."{spec.key[0]}" = v.record_id and ' if len(spec.key) == 1 else ""
    ways = [f"{versions_from} v", f"{rows_from} b"]
    first, second = ways if found_by else reversed(ways)
    numbers = [f"+v.hlc between 1 and {clock}", f"+v.origin_seq between 1 and {_NUMBER_MAX}"]
    values = [_value_sql(spec, column) for column in spec.columns]
    good = " and ".join(["+v.is_deleted = 0", *numbers, *values])
    pairs = f"from {first} cross join {second} on {found_by}{record_sql} = v.record_id where {good}"
    whole, *found = connection.execute(f"select count(*), {_sums_sql(spec)} {pairs}").fetchone()
    if any(isinstance(each, float) for each in found):
        raise _not_native(spec, "a real is among integers")
    if not rows == every - gone == whole:
        why = f"of {rows} rows and {every - gone} versions {whole} belong together and have no value of another kind"
        raise _not_native(spec, why)
    return every


def _check_tombstones(connection: sqlite3.Connection, spec: Table, versions_from: str, clock: int) -> int:
    count = 0
    columns = ", ".join(("record_id", "is_deleted", *_NUMBERS))
    for record, deleted, hlc, seq in connection.execute(f"select {columns} from {versions_from} where is_deleted <> 0"):
        if not isinstance(record, str):
            raise _not_native(spec, "a deleted row has no record id")
        bounds = ((deleted, 1), (hlc, clock), (seq, _NUMBER_MAX))
        if not all(type(number) is int and 0 < number <= bound for number, bound in bounds):
            raise _not_native(spec, "a version has a field that is none")
        spec.checked_record(record)
        count += 1
    return count


def _value_sql(spec: Table, column: str) -> str:
    quoted = f'b."{column}"'
    good = _STORED[spec.columns[column]].format(quoted)
    return good if column in spec.key else f"({good} or {quoted} is null)"


def _sums_sql(spec: Table) -> str:
    """A real if one is among the integers. What may be null has a sum of its own: it would hide the others."""
    integers = [column for column, kind in spec.columns.items() if kind in _INTEGERS]
    never_null = [f"v.{name} * 0" for name in ("is_deleted", *_NUMBERS)]
    never_null += [f'b."{column}" * 0' for column in integers if column in spec.key]
    nullable = [f'b."{column}" * 0' for column in integers if column not in spec.key]
    return ", ".join(f"sum({each})" for each in (" + ".join(never_null), *nullable))


def _count(connection: sqlite3.Connection, what: str) -> int:
    return int(connection.execute(f"select count(*) {what}").fetchone()[0])


def _not_native(spec: Table, why: str) -> NotNative:
    return NotNative(f"files of {spec.name} cannot be taken as they are: {why}", hint="they are taken as columns")
