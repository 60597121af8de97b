"""The rows of a published table as they are, in the words of its events: `op = read`, with the key and payload that the
slot gives for an insert of the same row.

COPY writes a value with its type's output function, as a slot does. (A cast to text is another function for some
types: of `boolean`, `char(n)` and `inet` it makes another text.) The publication alone says which columns and rows
there are: what it leaves out is never asked for.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from evermark.errors import FormatError, SetupError
from evermark.event import Op, taken_batch
from evermark.sources.postgres.connect import SEARCH_PATH, Link, server_encoding
from evermark.sources.postgres.failures import INSTALL_HINT, python_encoding, translated, where
from evermark.sources.postgres.read.columns import decoded, gather
from evermark.sources.postgres.read.copy_out import copied_rows
from evermark.sources.postgres.read.pgoutput import I64, Mask, Relation, View, parse_relation
from evermark.sources.postgres.tables.catalog import Catalog
from evermark.sources.postgres.tables.table import Table, columns_to_hash, key_of, known_table, payload_of
from evermark.sources.postgres.tables.values import column
from evermark.sources.postgres.tables.versions import TableVersion
from evermark.sources.postgres.target import PostgresTarget, TableChoice

BATCH_ROWS_MAX = 32 * 1024
BATCH_BYTES_MAX = 8 * 1024 * 1024
_TAB, _NEWLINE = b"\t\n"
_ESCAPE = b"\\"
# What COPY writes for characters that would end a value or row. The backslash comes first, as a byte that no text has.
_BACKSLASH = b"\0"
_ESCAPES = (
    (b"\\\\", _BACKSLASH), (b"\\n", b"\n"), (b"\\t", b"\t"), (b"\\r", b"\r"), (b"\\b", b"\b"), (b"\\f", b"\f"),
    (b"\\v", b"\v"), (_BACKSLASH, b"\\"),
)  # fmt: skip
# As pgoutput describes it: the columns that are published, in their order, and which of them are the replica identity.
# `key`: the columns of the identity in the order of its index; where that is the whole row, the primary key's. Each
# with the schema of the operators by which it is sorted: those of a type of an extension are found in no pinned path.
_DESCRIBED = """
with named as (
    select c.oid, n.nspname, c.relname, c.relreplident, c.relkind, to_jsonb(r) as membership, to_jsonb(p) as publication
    from pg_catalog.pg_publication p join pg_catalog.pg_publication_rel r on r.prpubid = p.oid
    join pg_catalog.pg_class c on c.oid = r.prrelid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where p.pubname = %s and c.oid = to_regclass(%s)
), identity as (
    select x.indrelid, x.indisprimary, x.indisreplident, x.indnkeyatts, x.indkey, x.indclass
    from named join pg_catalog.pg_index x on x.indrelid = named.oid
    where x.indislive and case named.relreplident when 'i' then x.indisreplident else x.indisprimary end
), key as (
    select k.place, a.attname, a.attnum, (
        select s.nspname::text from pg_catalog.pg_opclass c
        join pg_catalog.pg_opclass d on d.opcintype = c.opcintype and d.opcdefault and d.opcmethod = b.oid
        join pg_catalog.pg_amop m on m.amopfamily = d.opcfamily and m.amopstrategy = 5
          and m.amoplefttype = d.opcintype and m.amoprighttype = d.opcintype
        join pg_catalog.pg_operator o on o.oid = m.amopopr join pg_catalog.pg_namespace s on s.oid = o.oprnamespace
        where c.oid = k.class) as operators
    from identity i cross join unnest(i.indkey::int2[], i.indclass::oid[]) with ordinality k(number, class, place)
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number
    join pg_catalog.pg_am b on b.amname = 'btree' where k.place <= i.indnkeyatts
)
select n.oid::bigint, n.nspname::text, n.relname::text, n.relreplident::text, n.relkind = 'p',
       (select pg_catalog.pg_get_expr(r.prqual, r.prrelid) from pg_catalog.pg_publication_rel r
        where r.oid = (n.membership ->> 'oid')::oid),
       (select jsonb_agg(jsonb_build_array(a.attname, a.atttypid::bigint, a.atttypmod,
                    n.relreplident = 'f' or (n.relreplident in ('d', 'i') and a.attnum in (select attnum from key)))
                order by a.attnum)
        from pg_catalog.pg_attribute a where a.attrelid = n.oid and a.attnum > 0 and not a.attisdropped
          and case when jsonb_typeof(n.membership -> 'prattrs') = 'array'
                   then exists (select from jsonb_array_elements_text(n.membership -> 'prattrs') x
                                where x::int = a.attnum)
                   else a.attgenerated = '' or a.attgenerated = n.publication ->> 'pubgencols' end),
       array(select attname::text from key order by place),
       array(select coalesce(operators, 'pg_catalog') from key order by place)
from named n
"""
# In front of a person's condition, whose names the server has looked up by the time this is done, once, before the
# first row: from here on values are written as in a slot.
_PINNED = f"(select pg_catalog.set_config('search_path', '{SEARCH_PATH}', true)) is not null"
# Servers before 15 have no row filters.
_UNFILTERED = """(select pg_catalog.pg_get_expr(r.prqual, r.prrelid) from pg_catalog.pg_publication_rel r
        where r.oid = (n.membership ->> 'oid')::oid)"""


@dataclass(frozen=True)
class KeyRange:
    """Keys behind `after`, up to `upto` itself, as texts in the order of `TableScan.key`; none: no bound there."""

    after: tuple[str, ...] | None = None
    upto: tuple[str, ...] | None = None


class TableScan:
    """One published table, seen on one connection: within a transaction, as of its snapshot.

    `latest` is what State remembers of the table: a column that may be a hashed one under another name is hashed, too.
    """

    def __init__(
        self, link: Link, target: PostgresTarget, choice: TableChoice, latest: TableVersion | None = None
    ) -> None:
        self._link = link
        oid, schema, name, identity, self._partitioned, self._filter, columns, key, operators = relation_of(
            link, target, choice
        )
        self._encoding = _as_the_server_writes(link)
        self.message = relation_message(oid, schema, name, identity, columns, self._encoding)
        self.relation: Relation = parse_relation(self.message, self._encoding)
        self.key: tuple[str, ...] = tuple(key)  # its columns, in the order of its index; none: the table has no key
        self._operators: tuple[str, ...] = tuple(operators)
        facts = Catalog(link.row, target.publication).table(self.relation)
        hidden = columns_to_hash(self.relation.columns, choice.hash, latest)
        former, version = (latest.key, latest.version) if latest is not None else ((), 0)
        self.table: Table = known_table(self.relation, facts, hidden, version, former)
        self._schema, self._name = schema, name

    @property
    def sql_name(self) -> sql.Identifier:
        return sql.Identifier(self._schema, self._name)

    def rows(self, keys: KeyRange | None = None, condition: str = "") -> Iterator[pa.RecordBatch]:
        """As TAKEN, without id, position, time and version; `condition` is SQL of a person's own. With it, this stands
        in a transaction: its names are looked up where the person's are, as the role has it."""
        columns = sql.SQL(", ").join(sql.Identifier(name) for name in self.relation.columns)
        only = sql.SQL("" if self._partitioned else "only ")
        query = sql.SQL("copy (select {} from {}{}{}) to stdout").format(
            columns, only, self.sql_name, self._where(keys or KeyRange(), condition)
        )
        with translated(self._link.dsn, f"reading the rows of {self.relation.stream}"):
            if condition:
                self._link.connection.execute("set local search_path to default")
            for count, data in _joined(copied_rows(self._link.connection, query)):
                yield self._batch(count, data)

    def bounds(self, every: int, after: tuple[str, ...] | None = None) -> Iterator[tuple[str, ...]]:
        """Every so many keys one of them, through the key's index. Each step is a query of its own."""
        key = self._key_columns()
        while True:
            query = sql.SQL("select {} from {}{}{} order by {} offset {} limit 1").format(
                _texts(self.key),
                sql.SQL("" if self._partitioned else "only "),
                self.sql_name,
                _conjunction([self._compared(">", after)] if after is not None else []),
                key,
                sql.Literal(every - 1),
            )
            text = query.as_string(self._link.connection).replace("%", "%%")
            found = self._link.row(text, doing=f"walking the keys of {self.relation.stream}")
            if found is None:
                return
            after = tuple(found)
            yield after

    def sampled_bounds(self, every: int, percent: float) -> list[tuple[str, ...]]:
        """Keys that are about so many apart, by a sample of the table."""
        key = self._key_columns()
        names = [f"k{number}" for number in range(len(self.key))]  # a column may have any name, `place` too
        renamed = sql.SQL(", ").join(
            sql.SQL("{} as {}").format(sql.Identifier(column), sql.Identifier(name))
            for column, name in zip(self.key, names, strict=True)
        )
        query = sql.SQL(
            "select {} from (select {}, pg_catalog.row_number() over (order by {}) as place"
            " from {}{} tablesample system ({})) as sample where place % {} = 0 order by place"
        ).format(
            _texts(names),
            renamed,
            key,
            sql.SQL("" if self._partitioned else "only "),
            self.sql_name,
            sql.Literal(percent),
            sql.Literal(max(1, int(every * percent / 100))),
        )
        text = query.as_string(self._link.connection).replace("%", "%%")
        return [tuple(row) for row in self._link.rows(text, doing=f"sampling the keys of {self.relation.stream}")]

    def _where(self, keys: KeyRange, condition: str) -> sql.Composable:
        terms: list[sql.Composable] = [sql.SQL(_PINNED)] if condition else []
        if keys.after is not None:
            terms.append(self._compared(">", keys.after))
        if keys.upto is not None:
            terms.append(self._compared("<=", keys.upto))
        terms += [_plain(term) for term in (self._filter, condition) if term]
        return _conjunction(terms)

    def _compared(self, operator: Literal[">", "<="], key: Sequence[str]) -> sql.Composable:
        """Literals without a type: the server takes them as the columns', whatever these are."""
        columns, schemas = self._key_columns(), set(self._operators)
        if len(schemas) == 1:
            values = sql.SQL(", ").join(sql.Literal(text) for text in key)
            return sql.SQL("({}) {} ({})").format(columns, _operator(schemas.pop(), operator), values)
        return self._compared_one_by_one(operator, key)

    def _compared_one_by_one(self, operator: Literal[">", "<="], key: Sequence[str]) -> sql.Composable:
        """The same where one operator does not do for all columns. The first column is bounded for the index."""
        parts = list(zip(map(sql.Identifier, self.key), self._operators, map(sql.Literal, key), strict=True))

        def one(number: int, name: str) -> sql.Composable:
            column, schema, value = parts[number]
            return sql.SQL("({} {} {})").format(column, _operator(schema, name), value)

        found = one(len(parts) - 1, operator)
        for number in reversed(range(len(parts) - 1)):
            beyond, level = one(number, operator[0]), one(number, "=")
            found = sql.SQL("({} or {} and {})").format(beyond, level, found)
        return sql.SQL("{} and {}").format(one(0, operator[0] + "="), found)

    def _key_columns(self) -> sql.Composed:
        if not self.key:
            raise SetupError(
                f"table {self.relation.stream} has no key: its rows cannot be told apart",
                hint=f"alter table {self._schema}.{self._name} add primary key (…);",
            )
        return sql.SQL(", ").join(sql.Identifier(name) for name in self.key)

    def _batch(self, rows: int, data: bytes) -> pa.RecordBatch:
        view, names = View(data), self.relation.columns
        start, length = _cells(view, rows, len(names), self.relation.stream)
        bad = np.zeros(rows, np.bool_)
        has_escapes, every = _ESCAPE in data, np.ones(rows, np.bool_)
        columns = {}
        for number, name in enumerate(names):
            cells = start[:, number], length[:, number]
            raw = _unescaped(view, *cells) if has_escapes else gather(view, *cells, every)
            text, odd = decoded(raw, self._encoding)
            bad |= odd
            made = column(text, self.table.types[number])
            columns[number] = made.hashed() if name in self.table.hashed else made
        built = {"payload": payload_of(self.table, columns, rows), "key": key_of(self.table, columns, rows)}
        return self._taken(built, bad)

    def _taken(self, built: dict[str, pa.Array], bad: Mask) -> pa.RecordBatch:
        rows = len(bad)
        ops = pa.repeat(pa.scalar(str(Op.READ), pa.string()), rows)
        if bad.any():
            ops = pc.if_else(pa.array(bad), str(Op.POISON), ops)
            reason = json.dumps({"reason": f"a value is not text in {self._encoding}"})
            built["payload"] = pc.if_else(pa.array(bad), reason, built["payload"])
        named: dict[str, object] = {
            "event_id": pa.repeat("", rows),
            "position": pa.repeat("", rows),
            "stream": pa.repeat(self.relation.stream, rows),
            "op": ops,
            "flags": pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, np.int32)), pa.array([], pa.string())),
        }
        return taken_batch(named | built, rows)


def relation_message(
    oid: int, schema: str, name: str, identity: str, columns: Sequence[Sequence[Any]], encoding: str = "utf-8"
) -> bytes:
    """What pgoutput would send of this table: columns are name, type, modifier, and whether the identity has it."""

    def text(value: object) -> bytes:
        return str(value).encode(encoding) + b"\0"

    parts = [b"R", struct.pack(">I", oid), text("" if schema == "pg_catalog" else schema), text(name)]
    parts.append(struct.pack(">cH", identity.encode(), len(columns)))
    for column_name, kind, modifier, key in columns:
        parts += [bytes([bool(key)]), text(column_name), struct.pack(">Ii", kind, modifier)]
    return b"".join(parts)


def relation_of(link: Link, target: PostgresTarget, choice: TableChoice) -> tuple[Any, ...]:
    """What the catalog says of a published table. Raises `SetupError` if it is not published."""
    query = _DESCRIBED
    if link.connection.info.server_version < 150000:
        query = query.replace(_UNFILTERED, "null::text")
    found = link.row(query, (target.publication, choice.name), doing=f"looking at {choice.name}")
    if found is None:
        raise SetupError(f"table {choice.name} is not published at {where(link.dsn)}", hint=INSTALL_HINT)
    return found


def _as_the_server_writes(link: Link) -> str:
    """Text in the server's own encoding, as a slot sends it; rows that a policy hides are an error, not left out."""
    with translated(link.dsn, "preparing a connection"):
        link.connection.execute("set row_security = off")
    return python_encoding(server_encoding(link.connection))


def _joined(messages: Iterable[list[memoryview]]) -> Iterator[tuple[int, bytes]]:
    """Rows, one to a message, joined so that decoding works on enough of them at once."""
    parts: list[bytes] = []
    rows = size = 0
    for some in messages:
        # At once: thousands of messages that are held make Python's collector of cycles look at all of them, again and
        # again, which takes longer than all else that is done with a row.
        more = b"".join(some)
        if parts and (size + len(more) > BATCH_BYTES_MAX or rows + len(some) > BATCH_ROWS_MAX):
            yield rows, b"".join(parts)
            parts, rows, size = [], 0, 0
        parts.append(more)
        rows += len(some)
        size += len(more)
    if parts:
        yield rows, b"".join(parts)


def _cells(view: View, rows: int, columns: int, stream: str) -> tuple[I64, I64]:
    """Where each value begins, and how long it is: rows by columns. Within a value there is neither tab nor newline."""
    ends = np.flatnonzero(view.u8 <= _NEWLINE)  # smaller ones than a tab are rare: one look at most bytes is enough
    if len(ends) and view.u8[ends].min() < _TAB:
        ends = ends[view.u8[ends] >= _TAB]
    if len(ends) != rows * columns or not bool(np.all(view.u8[ends[columns - 1 :: columns]] == _NEWLINE)):
        raise FormatError(f"rows of {stream} do not have {columns} columns", hint="report this, with the log")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    return starts.reshape(rows, columns), (ends - starts).reshape(rows, columns)


def _unescaped(view: View, start: I64, length: I64) -> pa.Array:
    """Values as they were before COPY wrote them, which writes a backslash for null, and before some characters."""
    null = length == 2
    maybe = np.flatnonzero(null)
    if len(maybe):
        null[maybe] = np.all(view.blocks(start[maybe], 2) == np.frombuffer(b"\\N", np.uint8), axis=1)
    raw = gather(view, start, np.where(null, 0, length), ~null)
    data = raw.buffers()[2]
    if data is not None and _ESCAPE in memoryview(data).tobytes():
        for written, plain in _ESCAPES:
            raw = pc.replace_substring(raw, written, plain)
    return raw


def _texts(columns: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(sql.SQL("pg_catalog.format('%s', {})").format(sql.Identifier(name)) for name in columns)


def _operator(schema: str, name: str) -> sql.Composable:
    return sql.SQL("operator({}.{})").format(sql.Identifier(schema), sql.SQL(name))


def _plain(text: str) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(text.replace("{", "{{").replace("}", "}}")).format())


def _conjunction(terms: Sequence[sql.Composable]) -> sql.Composable:
    return sql.SQL(" where ") + sql.SQL(" and ").join(terms) if terms else sql.SQL("")
