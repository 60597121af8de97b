"""Changes of the user's tables as events: pgoutput in, TAKEN batches out, table by table and column by column.

An event stands at its transaction's commit, with an odd ordinal: the one before it is for the event of op `schema` that
tells how the table looks from there on. So the positions and ids of changes do not depend on which versions of a table
were told before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import SetupError
from evermark.event import TAKEN, TIMESTAMP, UNKNOWN, Op, taken_batch
from evermark.event_file import Fill, Rows, WrittenEvents
from evermark.sources.copies import Mark
from evermark.sources.postgres.failures import INSTALL_HINT
from evermark.sources.postgres.lsn import U8, Incarnation, Position, WalPages, fixed_strings, hex_columns, positions
from evermark.sources.postgres.read.columns import decoded, gather
from evermark.sources.postgres.read.pgoutput import (
    DELETE,
    I64,
    INSERT,
    MESSAGE,
    NO_TIME,
    NULL,
    TEXT,
    TRUNCATE,
    UNCHANGED,
    UPDATE,
    Cells,
    Changes,
    Mask,
    PgoutputReader,
    Relation,
    View,
    parse_relation,
    tuples,
    walk,
)
from evermark.sources.postgres.tables.catalog import Catalog
from evermark.sources.postgres.tables.table import Table, columns_to_hash, key_of, known_table, payload_of
from evermark.sources.postgres.tables.values import Column, column
from evermark.sources.postgres.tables.versions import TableVersion, TableVersions

STRIDE = 2  # of ordinals: one in front of every change is for the table's description
OWN_PREFIX = "evermark"  # logical messages of our own
BINARY_FLAG = "binary"
_PG_EPOCH_US = 946_684_800_000_000
_FLAGS = TAKEN.field("flags").type
_OPS = {INSERT: Op.INSERT, UPDATE: Op.UPDATE, DELETE: Op.DELETE}
_IDENTITIES = {"d": "default", "f": "full", "i": "index", "n": "nothing"}
_KNOWN_KINDS = np.zeros(256, dtype=np.bool_)
_KNOWN_KINDS[list(b"IUDTM")] = True

# Events: the places they belong in, and what they have besides where they stand; a scalar is of each of them. The place
# of a change is twice its number; the one before it is for what is told in front of it.
Part = tuple[I64, Mapping[str, object]]


@dataclass(frozen=True)
class Image:
    """Rows of a table, column by column."""

    view: View
    cells: list[Cells]
    end: I64
    intact: Mask


@dataclass(frozen=True)
class CopiedRows:
    """Rows that a copy puts where its mark stands: as `TableScan.rows` gives them, with their ids."""

    relation: bytes  # the description of their table, as pgoutput writes it
    hashed: frozenset[str]  # the columns whose values are
    batches: Callable[[], Iterator[pa.RecordBatch]]
    ready: ReadyFile | None = None  # the same rows


@dataclass(frozen=True)
class ReadyFile:
    """All rows of a chunk in a file with blanks (`evermark.event_file`), the first of them with the ordinal 1."""

    open: Callable[[], pa.NativeFile]
    source: str
    rows: int
    nbytes: int
    position: str  # that its rows have for now, but for the ordinal


class CopyMarks(Protocol):
    def rows_at(self, mark: Mark, lsn: int) -> CopiedRows | None:
        """What stands at a mark, whose transaction commits at `lsn`. The same at every reading; may wait for it."""


class NoMarks(CopyMarks):
    def rows_at(self, mark: Mark, lsn: int) -> None:
        return None


class TablesDecoder:
    """Turns chunks into TAKEN batches. What cannot be decoded becomes `op = poison`, with its bytes and the reason.

    `hashed` are the columns to be hashed, by stream, of all tables that the file names.

    Where the mark of a copy stands, its rows come: all at the mark's commit, with the ordinals from the mark's on.
    """

    def __init__(
        self,
        start: Position,
        end: Position,
        *,
        catalog: Catalog,
        versions: TableVersions,
        hashed: Mapping[str, Collection[str]],
        pages: WalPages,
        encoding: str = "utf-8",
        marks: CopyMarks | None = None,
    ) -> None:
        self._marks = marks or NoMarks()
        self._incarnation: Incarnation = end.incarnation
        self._catalog, self._versions, self._hashed, self._encoding = catalog, versions, hashed, encoding
        self._reader = PgoutputReader(start, end, stride=STRIDE, pages=pages, encoding=encoding)
        self._latest = versions.before(start)
        self._tables: dict[tuple[int, bytes], Table] = {}
        self._id_prefix = np.frombuffer(
            hashlib.sha256(str(self._incarnation).encode()).hexdigest()[:16].encode(), np.uint8
        )

    def latest(self, stream: str) -> TableVersion | None:
        """The last version of a table that this decoder knows."""
        return self._latest.get(stream)

    def batches(self, lengths: I64, data: bytes, skip: int = 0) -> Iterator[Rows]:
        changes = self._reader.feed(lengths, data, skip)
        begin = 0
        for row, mark in self._marked(changes):
            if (batch := self._events(changes.between(begin, row))) is not None:
                yield batch
            yield from self._copied(changes.between(row, row + 1), mark)
            begin = row + 1
        if (batch := self._events(changes.between(begin, len(changes.kind)))) is not None:
            yield batch

    def _events(self, changes: Changes) -> pa.RecordBatch | None:
        parts: list[Part] = []
        told: list[TableVersion] = []
        for rows, relation in _by_first_use(changes):
            table = self._table(changes, relation, int(rows[0]), parts, told)
            if table is not None:
                parts += self._changes(changes, rows, table)
        messages = np.flatnonzero((changes.kind == MESSAGE) & self._reader.in_range(changes.lsn, changes.ordinal))
        if len(messages):
            parts += self._messages(changes, messages)
        strange = np.flatnonzero(~_KNOWN_KINDS[changes.kind] | ((changes.kind != MESSAGE) & (changes.relation < 0)))
        if len(strange):
            parts.append((2 * strange, self._poison(changes, strange, "a message of an unknown kind", "poison")))
        if told:
            self._versions.keep(told)
        return self._in_order(changes, parts)

    # rows of a copy

    def _marked(self, changes: Changes) -> list[tuple[int, Mark]]:
        found = []
        for row in np.flatnonzero(changes.kind == MESSAGE).tolist():
            prefix, content = _message(changes, row)
            mark = Mark.parse(content.decode("ascii", "replace")) if prefix == OWN_PREFIX.encode() else None
            if mark is not None:
                found.append((row, mark))
        return found

    def _copied(self, at: Changes, mark: Mark) -> Iterator[Rows]:
        """`at`: the mark alone."""
        found = self._marks.rows_at(mark, int(at.lsn[0]))
        if found is None:
            return
        parts: list[Part] = []
        told: list[TableVersion] = []
        table = self._table(at, parse_relation(found.relation, self._encoding), 0, parts, told)
        if table is None:
            return  # taken out of the file since
        if shown := sorted(table.hashed & set(table.relation.columns) - found.hashed):
            raise SetupError(
                f"rows of {table.relation.stream} that were copied, and wait to be taken, show the column {shown[0]},"
                " which is to be hashed since",
                hint="take it out of `hash` until `evermark status` shows no copy of the table",
            )
        if told:
            self._versions.keep(told)
        if (batch := self._in_order(at, parts)) is not None:
            yield batch
        ready = found.ready
        if (
            ready is None
            or int(at.ordinal[0]) != 1
            or not self._reader.in_range(np.repeat(at.lsn, 2), np.array([1, ready.rows])).all()
        ):
            yield from self._row_by_row(found, at, table)
            return
        lsn = int(at.lsn[0])
        blank, prefix = (text.removesuffix(f"{0:08x}") for text in (ready.position, self._incarnation.at(lsn)))
        yield WrittenEvents(
            ready.open,
            ready.source,
            ready.rows,
            ready.nbytes,
            Fill({"event_time": _micros(at), "schema_version": table.version}, (blank, prefix)),
            (self._incarnation.at(lsn, 1), self._incarnation.at(lsn, ready.rows)),
            lambda: self._row_by_row(found, at, table),
        )

    def _row_by_row(self, found: CopiedRows, at: Changes, table: Table) -> Iterator[pa.RecordBatch]:
        ordinal = int(at.ordinal[0])
        for batch in found.batches():
            rows = batch.num_rows
            lsns, ordinals = np.repeat(at.lsn, rows), np.arange(ordinal, ordinal + rows, dtype=np.int64)
            ordinal += rows
            filled = {
                "position": positions(self._incarnation, lsns, ordinals.astype(np.uint32)),
                "event_time": pa.repeat(pa.scalar(_micros(at), pa.int64()).cast(TIMESTAMP), rows),
                "schema_version": pa.repeat(pa.scalar(table.version, pa.int32()), rows),
            }
            whole = taken_batch({name: batch.column(name) for name in batch.schema.names} | filled, rows)
            inside = self._reader.in_range(lsns, ordinals)
            yield whole if inside.all() else whole.filter(pa.array(inside))

    # which table, and which version of it

    def _table(
        self, changes: Changes, relation: Relation, row: int, parts: list[Part], told: list[TableVersion]
    ) -> Table | None:
        """The table behind a description; where it is news, an event that tells it, in front of its first change."""
        latest = self._latest.get(relation.stream)
        shape = hashlib.sha256(relation.shape).hexdigest()[:32]
        remembered = (relation.oid, relation.shape)
        if remembered in self._tables and latest is not None and latest.shape == shape:
            return self._tables[remembered]
        facts = self._catalog.table(relation)
        if relation.stream not in self._hashed:
            if facts.published:
                raise SetupError(
                    f"table {relation.stream} is published, and the file does not name it",
                    hint="if it was renamed, or added by hand: name it under `tables`, too, beside the old name until"
                    f" all is taken; if it is not wanted, {INSTALL_HINT}",
                )
            # Taken out of the file and the publication: a person's own choice. They may put it back, so this is asked
            # again for every chunk.
            return None
        hidden = columns_to_hash(relation.columns, self._hashed[relation.stream], latest)
        version = (latest.version if latest is not None else 0) + (latest is None or latest.shape != shape)
        table = known_table(relation, facts, hidden, version, latest.key if latest is not None else ())
        self._tables[remembered] = table
        hides, wanted = tuple(sorted(hidden & set(relation.columns))), tuple(sorted(self._hashed[relation.stream]))
        key = tuple(relation.columns[number] for number in table.keys)
        if latest is None or latest.shape != shape:
            lsn, ordinal = changes.lsn[[row]], changes.ordinal[[row]] - 1
            position = self._incarnation.at(int(lsn[0]), int(ordinal[0]))
            known = TableVersion(relation.stream, version, position, shape, relation.columns, hides, wanted, key)
            if self._reader.in_range(lsn, ordinal)[0]:
                parts.append((np.array([2 * row - 1]), self._schema_event(table)))
        elif (latest.wanted, latest.key) != (wanted, key):
            # The same version, with the file's new word, or another primary key of a table whose identity is the row.
            known = replace(latest, hashed=hides, wanted=wanted, key=key)
        else:
            return table
        self._latest[relation.stream] = known
        told.append(known)
        return table

    def _schema_event(self, table: Table) -> Mapping[str, object]:
        relation = table.relation
        names = self._catalog.type_names(relation)
        columns = [
            {"name": name, "type": kind, "key": number in table.keys}
            for number, (name, kind) in enumerate(zip(relation.columns, names, strict=True))
        ]
        told = {"columns": columns, "identity": _IDENTITIES.get(relation.identity, relation.identity)}
        return _named(table, Op.SCHEMA) | {"payload": [json.dumps(told, ensure_ascii=False)]}

    # changes of one table

    def _changes(self, changes: Changes, rows: I64, table: Table) -> Iterator[Part]:
        kind = changes.kind[rows]
        truncates = rows[kind == TRUNCATE]
        if len(truncates):
            yield 2 * truncates, _named(table, Op.TRUNCATE)
        marks = changes.view.u8[np.minimum(changes.start[rows] + 5, changes.end[rows] - 1)]
        for chosen, is_delete in ((kind == DELETE, True), ((kind == INSERT) | (kind == UPDATE), False)):
            for mark in np.unique(marks[chosen]).tolist():
                yield from self._alike(changes, rows[chosen & (marks == mark)], table, mark, is_delete=is_delete)

    def _alike(self, changes: Changes, rows: I64, table: Table, mark: int, *, is_delete: bool) -> Iterator[Part]:
        """Changes that all have, or have not, an old row of the same completeness, and a new one."""
        at, end = changes.start[rows] + 5, changes.end[rows]
        old = new = None
        if mark in b"KO":
            old = _image(changes.view, at, end, table, bytes([mark]))
            at = old.end
        if not is_delete:
            new = _image(changes.view, at, end, table, b"N")
        last = new if new is not None else old
        intact = (last.end == end) if last is not None else np.zeros(len(rows), np.bool_)
        for image in (old, new):
            if image is not None:
                intact = intact & image.intact
        if not intact.all():
            bad = rows[~intact]
            yield 2 * bad, self._poison(changes, bad, "the row does not have the shape of its table", table)
            rows = rows[intact]
            old, new = _rows_of(old, intact), _rows_of(new, intact)
        if not len(rows):
            return
        if old is not None and new is not None:
            new = _with_known(new, old)
        whole = mark == ord("O")
        for chosen, unknown in _patterns(new, len(rows)):
            some, images = rows, (old, new)
            if len(chosen) < len(rows):
                some, images = rows[chosen], (_rows_of(old, chosen), _rows_of(new, chosen))
            built, bad = self._built(table, *images, unknown, whole=whole)
            if bad.any():
                reason = f"a value is not text in {self._encoding}"
                yield 2 * some[bad], self._poison(changes, some[bad], reason, table)
                if bad.all():
                    continue
                keep = pa.array(~bad)
                some, built = some[~bad], {k: v.filter(keep) for k, v in built.items()}
            flags = [UNKNOWN + table.relation.columns[n] for n in unknown]
            yield 2 * some, _named(table, _ops(changes.kind[some]), flags) | built

    def _built(
        self, table: Table, old: Image | None, new: Image | None, unknown: tuple[int, ...], *, whole: bool
    ) -> tuple[dict[str, pa.Array], Mask]:
        """The columns of an event that come from its rows, and which of them cannot be read."""
        built: dict[str, pa.Array] = {}
        rows = next(len(image.end) for image in (new, old) if image is not None)
        bad = np.zeros(rows, np.bool_)
        every = range(len(table.relation.columns))
        if new is not None:
            columns = self._columns(table, new, [n for n in every if n not in unknown], bad)
            built["payload"] = payload_of(table, columns, rows)
            built["key"] = key_of(table, columns, rows)
        if old is not None:
            columns = self._columns(table, old, list(every) if whole else list(table.identity), bad)
            built["before"] = payload_of(table, columns, rows)
            earlier = key_of(table, columns, rows)
            if new is None:
                built["key"] = earlier
            else:
                same = pc.equal(built["key"], earlier).fill_null(True)
                built["previous_key"] = pc.if_else(same, pa.scalar(None, pa.string()), earlier)
        return built, bad

    def _columns(self, table: Table, image: Image, wanted: list[int], bad: Mask) -> dict[int, Column]:
        found = {}
        for number in wanted:
            cells = image.cells[number]
            text = _text(image.view, cells, self._encoding, bad)
            made = column(text, table.types[number])
            found[number] = made.hashed() if table.relation.columns[number] in table.hashed else made
        return found

    # logical messages

    def _messages(self, changes: Changes, rows: I64) -> Iterator[Part]:
        kept: list[int] = []
        streams: list[str] = []
        payloads: list[str] = []
        flags: list[list[str]] = []
        for row in rows.tolist():
            prefix, content = _message(changes, row)
            name = prefix.decode(self._encoding, "replace")
            if name == OWN_PREFIX:
                continue
            payload, binary = _message_payload(content, self._encoding)
            kept.append(row)
            streams.append(name or "message")
            payloads.append(payload)
            flags.append([BINARY_FLAG] if binary else [])
        if kept:
            some = np.array(kept)
            told = {"stream": streams, "op": _text_scalar(Op.MESSAGE), "payload": payloads, "flags": flags}
            yield 2 * some, told

    # what all events have

    def _in_order(self, changes: Changes, parts: list[Part]) -> pa.RecordBatch | None:
        """All parts as one batch, with where each event stands."""
        if not parts:
            return None
        sizes = [len(places) for places, _ in parts]
        places, order = np.concatenate([places for places, _ in parts]), None
        if len(parts) > 1:
            order = np.argsort(places, kind="stable")
            places = places[order]
        built = self._standing(changes, (places + 1) // 2, places % 2)
        for field in TAKEN:
            if any(field.name in columns for _, columns in parts):
                given = [columns.get(field.name, pa.scalar(None, field.type)) for _, columns in parts]
                built[field.name] = _one_column(given, sizes, order, field.type)
        return taken_batch(built, len(places))

    def _standing(self, changes: Changes, rows: I64, before: I64) -> dict[str, object]:
        """Where the events stand; `before`: 1 for those in front of their change."""
        lsn, ordinal = changes.lsn[rows], changes.ordinal[rows] - before
        text = np.empty((len(rows), 40), np.uint8)
        text[:, :16] = self._id_prefix
        text[:, 16:32] = hex_columns(lsn, 16)
        text[:, 32:] = hex_columns(ordinal.astype(np.uint32), 8)
        inside = changes.time[rows] != NO_TIME
        micros = np.where(inside, changes.time[rows], 0) + _PG_EPOCH_US
        return {
            "event_id": fixed_strings(text),
            "position": positions(self._incarnation, lsn, ordinal.astype(np.uint32)),
            "tx": pa.array(changes.xid[rows], mask=~inside).cast(pa.string()),
            "event_time": pa.array(micros, mask=~inside).cast(TIMESTAMP),
        }

    def _poison(self, changes: Changes, rows: I64, reason: str, table: Table | str) -> Mapping[str, object]:
        """Without its bytes where the table has something to hide."""
        hides = isinstance(table, Table) and bool(table.hashed)
        raw = [None if hides else changes.view.data[changes.start[i] : changes.end[i]] for i in rows.tolist()]
        stream = table.relation.stream if isinstance(table, Table) else table
        return {
            "stream": _text_scalar(stream),
            "op": _text_scalar(Op.POISON),
            "payload": _text_scalar(json.dumps({"reason": reason})),
            "flags": pa.scalar([], _FLAGS),
            "bytes": raw,
        }


def _micros(at: Changes) -> int:
    """When the first of these transactions was committed."""
    return int(at.time[0]) + _PG_EPOCH_US


def _by_first_use(changes: Changes) -> list[tuple[I64, Relation]]:
    """Changes by the description of their table, in the order in which these were first used."""
    found = []
    for number, relation in enumerate(changes.relations):
        rows = np.flatnonzero(changes.relation == number)
        if len(rows):
            found.append((rows, relation))
    return sorted(found, key=lambda each: int(each[0][0]))


def _image(view: View, at: I64, end: I64, table: Table, mark: bytes) -> Image:
    columns = len(table.relation.columns)
    begin, counts, intact = tuples(view, at, end, mark)
    cells = []
    finish = begin
    for found, readable in walk(view, begin, end, columns):
        cells.append(found)
        intact = intact & readable
        finish = found.start + found.length
    return Image(view, cells, finish, intact & (counts == columns))


def _rows_of(image: Image | None, chosen: Mask | I64) -> Image | None:
    if image is None:
        return None
    cells = [Cells(each.kind[chosen], each.start[chosen], each.length[chosen], each.whole) for each in image.cells]
    return Image(image.view, cells, image.end[chosen], image.intact[chosen])


def _with_known(new: Image, old: Image) -> Image:
    """A large value that did not change is not sent again; a whole old row has it."""
    cells = []
    for mine, theirs in zip(new.cells, old.cells, strict=True):
        missing = (mine.kind == UNCHANGED) & (theirs.kind == TEXT)
        if missing.any():
            mine = Cells(  # noqa: PLW2901
                np.where(missing, theirs.kind, mine.kind),
                np.where(missing, theirs.start, mine.start),
                np.where(missing, theirs.length, mine.length),
            )
        cells.append(mine)
    return Image(new.view, cells, new.end, new.intact)


def _patterns(new: Image | None, rows: int) -> Iterator[tuple[I64, tuple[int, ...]]]:
    """The rows by which of their columns were not sent; nearly always it is none."""
    cells = [] if new is None else new.cells
    absent = [n for n, each in enumerate(cells) if not each.whole and (each.kind == UNCHANGED).any()]
    if new is None or not absent:
        yield np.arange(rows), ()
        return
    bits: U8 = np.stack([new.cells[n].kind == UNCHANGED for n in absent], axis=1)
    patterns, which = np.unique(bits, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        yield np.flatnonzero(which.reshape(-1) == number), tuple(np.array(absent)[pattern].tolist())


def _text(view: View, cells: Cells, encoding: str, bad: Mask) -> pa.Array:
    """The values as text; rows whose value is none in this encoding are noted in `bad`."""
    if cells.whole and (cells.kind[:1] == TEXT).all():
        raw = gather(view, cells.start, cells.length)
    else:
        present = cells.kind == TEXT
        bad |= ~(present | (cells.kind == NULL))
        raw = gather(view, cells.start, np.where(present, cells.length, 0), present)
    text, odd = decoded(raw, encoding)
    bad |= odd
    return text


def _message(changes: Changes, row: int) -> tuple[bytes, bytes]:
    """Prefix and content of a logical message."""
    message = changes.view.data[changes.start[row] : changes.end[row]]
    prefix, _, rest = message[10:].partition(b"\0")
    return prefix, rest[4:]


def _message_payload(content: bytes, encoding: str) -> tuple[str, bool]:
    """JSON as it is, other text as a JSON string, and bytes that are no text as bytea is written."""
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        return json.dumps("\\x" + content.hex()), True
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False), False
    return text.replace("\n", " ").replace("\r", " "), False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _text_scalar(text: str) -> pa.Scalar:
    return pa.scalar(str(text), pa.string())


def _ops(kind: U8) -> object:
    """Of inserts and updates, or of deletes alone."""
    if (kind == kind[0]).all():
        return _text_scalar(_OPS[int(kind[0])])
    return pa.array([str(Op.INSERT), str(Op.UPDATE)]).take(pa.array((kind == UPDATE).astype(np.int8)))


def _named(table: Table, op: object, flags: Sequence[str] = ()) -> dict[str, object]:
    return {
        "stream": _text_scalar(table.relation.stream),
        "op": _text_scalar(op) if isinstance(op, Op) else op,
        "schema_version": pa.scalar(table.version, pa.int32()),
        "flags": pa.scalar(list(flags), _FLAGS),
    }


def _one_column(given: Sequence[object], sizes: Sequence[int], order: I64 | None, kind: pa.DataType) -> pa.Array:
    """One column of several parts, in this order."""
    if all(isinstance(each, pa.Scalar) for each in given):
        known: list[object] = []
        for each in given:
            if each not in known:
                known.append(each)
        codes = np.repeat(np.array([known.index(each) for each in given], np.int32), sizes)
        values = pa.array([each.as_py() for each in known], kind)  # type: ignore[attr-defined]
        return values.take(pa.array(codes if order is None else codes[order]))
    arrays = [_as_array(each, size, kind) for each, size in zip(given, sizes, strict=True)]
    return arrays[0] if order is None else pa.concat_arrays(arrays).take(pa.array(order))


def _as_array(given: object, size: int, kind: pa.DataType) -> pa.Array:
    if isinstance(given, pa.Scalar):
        return pa.array([given.as_py()], kind).take(pa.array(np.zeros(size, np.int32)))
    return given if isinstance(given, pa.Array) else pa.array(given, kind)
