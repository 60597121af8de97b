"""Rows of `<schema>.events` as events: pgoutput inserts in, TAKEN batches out, column by column."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import TAKEN, TIMESTAMP, Op, taken_batch
from evermark.sources.postgres.lsn import HEX_PAIRS, U8, Incarnation, Position, fixed_strings, positions
from evermark.sources.postgres.read.columns import decoded, gather
from evermark.sources.postgres.read.pgoutput import (
    BINARY,
    I64,
    INSERT,
    NULL,
    TEXT,
    Cells,
    Changes,
    Mask,
    PgoutputReader,
    Relation,
    View,
    new_tuples,
    walk,
)

EVENTS = "events"
_NEEDED = ("id", "created_at", "op")
_PG_EPOCH_US = 946_684_800_000_000
# The years 1 to 9999, counted from 2000.
_US_MIN = -63_082_281_600_000_000
_US_MAX = 252_455_615_999_999_999
_UUID_GROUPS = ((0, 8), (9, 13), (14, 18), (19, 23), (24, 36))
_KNOWN_KINDS = np.zeros(256, dtype=np.bool_)
_KNOWN_KINDS[list(b"IUDT")] = True


@cache
def _ops() -> pa.Array:
    """Made when it is needed: the first array loads pandas, and processes that only plan need none."""
    return pa.array([str(op) for op in Op if op != Op.POISON])


class OutboxDecoder:
    """Turns chunks into TAKEN batches. What cannot be decoded becomes `op = poison`, with its bytes and the reason.

    `stream_name` answers for rows that carry only a stream's number.
    """

    def __init__(
        self,
        schema: str,
        start: Position,
        end: Position,
        *,
        stream_name: Callable[[int], str | None],
        encoding: str = "utf-8",
    ) -> None:
        self._schema = schema
        self._incarnation: Incarnation = end.incarnation
        self._stream_name = stream_name
        self._encoding = encoding
        self._reader = PgoutputReader(start, end)

    def batches(self, lengths: I64, data: bytes, skip: int = 0) -> Iterator[pa.RecordBatch]:
        batch = self.decode(lengths, data, skip)
        if batch is not None:
            yield batch

    def decode(self, lengths: I64, data: bytes, skip: int = 0) -> pa.RecordBatch | None:
        changes = self._reader.feed(lengths, data, skip)
        parts: list[tuple[I64, pa.RecordBatch]] = []
        for rows, relation in self._groups(changes):
            parts += self._rows(changes, rows, relation)
        strange = np.flatnonzero(~_KNOWN_KINDS[changes.kind] | ((changes.kind == INSERT) & (changes.relation < 0)))
        if len(strange):
            parts.append((strange, self._poison(changes, strange, ["a message of an unknown kind"] * len(strange))))
        return _in_order(parts)

    def _groups(self, changes: Changes) -> list[tuple[I64, Relation]]:
        found = []
        for number, relation in enumerate(changes.relations):
            if relation.schema == self._schema and relation.name == EVENTS:
                rows = np.flatnonzero((changes.relation == number) & (changes.kind == INSERT))
                if len(rows):
                    found.append((rows, relation))
        return found

    def _rows(self, changes: Changes, rows: I64, relation: Relation) -> list[tuple[I64, pa.RecordBatch]]:
        """The good rows of one version of the table as one batch, the bad ones as another."""
        missing = [name for name in _NEEDED if name not in relation.columns]
        if missing or not {"stream", "stream_id"} & set(relation.columns):
            reason = f"the table has no column {', '.join(missing) or 'stream or stream_id'}"
            return [(rows, self._poison(changes, rows, [reason] * len(rows)))]
        at, counts, shaped = new_tuples(changes, rows)
        cells: dict[str, Cells] = {}
        intact = shaped
        for name, (column, readable) in zip(
            relation.columns, walk(changes.view, at, changes.end[rows], len(relation.columns)), strict=True
        ):
            cells[name], intact = column, shaped & readable
        last = cells[relation.columns[-1]]
        intact = intact & (counts == len(relation.columns)) & (last.start + last.length == changes.end[rows])
        built, reasons = _Columns(changes.view, cells, intact, self._encoding, self._stream_name).build()
        good = reasons == ""
        parts = []
        if not good.all():
            bad = rows[~good]
            ids = built["event_id"].filter(pa.array(~good)).to_pylist()
            parts.append((bad, self._poison(changes, bad, reasons[~good].tolist(), ids)))
            rows, built = rows[good], {name: column.filter(pa.array(good)) for name, column in built.items()}
        if len(rows):
            columns = built | self._position_and_tx(changes, rows) | {"flags": _no_flags(len(rows))}
            parts.append((rows, taken_batch(dict(columns), len(rows))))
        return parts

    def _position_and_tx(self, changes: Changes, rows: I64) -> dict[str, pa.Array]:
        return {
            "position": positions(self._incarnation, changes.lsn[rows], changes.ordinal[rows].astype(np.uint32)),
            "tx": pa.array(changes.xid[rows]).cast(pa.string()),
        }

    def _poison(
        self, changes: Changes, rows: I64, reasons: list[str], ids: list[str | None] | None = None
    ) -> pa.RecordBatch:
        stands = self._position_and_tx(changes, rows)
        where = stands["position"].to_pylist()
        named = ids or [None] * len(rows)
        raw = [changes.view.data[changes.start[i] : changes.end[i]] for i in rows.tolist()]
        columns: dict[str, object] = {
            **stands,
            # The row's own id where it can be read: a later reading of the table must find it in the log.
            "event_id": [found or f"poison:{position}" for found, position in zip(named, where, strict=True)],
            "stream": [f"{self._schema}.{EVENTS}"] * len(rows),
            "op": [str(Op.POISON)] * len(rows),
            "payload": [json.dumps({"reason": reason}) for reason in reasons],
            "flags": _no_flags(len(rows)),
            "bytes": raw,
        }
        return taken_batch(columns, len(rows))


class _Columns:
    """The event's columns from the cells of intact rows, with a reason for each row that has to be poison."""

    def __init__(
        self, view: View, cells: dict[str, Cells], intact: Mask, encoding: str, stream_name: Callable[[int], str | None]
    ) -> None:
        self._view, self._cells, self._encoding, self._stream_name = view, cells, encoding, stream_name
        self._rows = len(intact)
        self._good = intact.copy()
        self._reasons = np.full(self._rows, "", dtype=object)
        self._reasons[~intact] = "the row does not have the shape of its table"

    def build(self) -> tuple[dict[str, pa.Array], npt.NDArray[np.object_]]:
        built = {
            "event_id": self._uuids("id"),
            "event_time": self._times("created_at"),
            "op": self._texts("op", required=True),
            "key": self._texts("key"),
            "payload": self._texts("payload", versioned=True),
            "before": self._texts("before", versioned=True),
            "schema_version": self._numbers("schema_version", ">i4", pa.int32()),
            "stream": self._streams(),
            "previous_key": self._texts("previous_key"),
        }
        known = pc.fill_null(pc.is_in(built["op"], value_set=_ops()), False).to_numpy(zero_copy_only=False)
        self._refuse(~known, "op is none of those an event may have")
        return built, self._reasons

    def _refuse(self, bad: Mask, reason: str) -> None:
        fresh = bad & self._good
        self._reasons[fresh] = reason
        self._good &= ~bad

    def _cell(self, name: str) -> Cells:
        found = self._cells.get(name)
        if found is None:
            nothing = np.zeros(self._rows, dtype=np.int64)
            return Cells(np.full(self._rows, NULL, dtype=np.uint8), nothing, nothing)
        return found

    def _present(self, name: str, cells: Cells) -> Mask:
        """Which rows have a value; an unchanged large value cannot be in an insert, so it is refused."""
        present: Mask = self._good & ((cells.kind == TEXT) | (cells.kind == BINARY))
        self._refuse(~present & (cells.kind != NULL), f"column {name} was sent without its value")
        return present

    def _texts(self, name: str, *, required: bool = False, versioned: bool = False) -> pa.Array:
        cells = self._cell(name)
        present = self._present(name, cells)
        if required:
            self._refuse(~present, f"column {name} is null")
        start, length = cells.start, np.where(present, cells.length, 0)
        if versioned:  # a jsonb sent in binary begins with its version
            binary = present & (cells.kind == BINARY)
            first = self._view.u8[np.where(binary & (length > 0), start, 0)]
            odd = binary & ((length < 1) | (first != 1))
            self._refuse(odd, f"column {name} is jsonb of an unknown version")
            skip = (binary & ~odd).astype(np.int64)
            start, length = start + skip, length - skip
            length = np.where(odd, 0, length)
        return self._decoded(name, gather(self._view, start, length, present))

    def _decoded(self, name: str, raw: pa.Array) -> pa.Array:
        text, bad = decoded(raw, self._encoding)
        self._refuse(bad, f"column {name} is not text in {self._encoding}")
        return text

    def _uuids(self, name: str) -> pa.Array:
        cells = self._cell(name)
        present = self._present(name, cells)
        binary = present & (cells.kind == BINARY) & (cells.length == 16)
        written = present & (cells.kind == TEXT) & (cells.length == 36)
        self._refuse(~(binary | written), f"column {name} is not a uuid")
        text = np.full((self._rows, 36), ord("-"), dtype=np.uint8)
        if binary.all():
            _write_uuids(text, self._view.blocks(cells.start, 16))
        else:
            for rows, size in ((binary, 16), (written, 36)):
                found = self._view.blocks(cells.start[rows], size)
                text[rows] = _write_uuids(np.full((len(found), 36), ord("-"), np.uint8), found) if size == 16 else found
        ids = fixed_strings(text)
        readable = binary | written
        return ids if readable.all() else pc.if_else(pa.array(readable), ids, pa.scalar(None, pa.string()))

    def _times(self, name: str) -> pa.Array:
        cells = self._cell(name)
        present = self._present(name, cells)
        binary = present & (cells.kind == BINARY) & (cells.length == 8)
        micros = self._view.numbers(np.where(binary, cells.start, 0), ">i8").astype(np.int64)
        # Infinity and the year 20000 are times to Postgres, not to us.
        extreme = (micros < _US_MIN) | (micros > _US_MAX)
        valid = binary & ~extreme
        micros = np.where(valid, micros, 0) + _PG_EPOCH_US
        for i in np.flatnonzero(present & (cells.kind == TEXT)).tolist():
            moment = _moment(self._view.data[cells.start[i] : cells.start[i] + cells.length[i]])
            if moment is not None:
                micros[i], valid[i], binary[i] = moment, True, True
        self._refuse(~binary, f"column {name} is not a time")
        return pa.array(micros, mask=~valid).cast(TIMESTAMP)

    def _numbers(self, name: str, dtype: str, kind: pa.DataType) -> pa.Array:
        cells = self._cell(name)
        present = self._present(name, cells)
        valid = present & (cells.kind == BINARY) & (cells.length == np.dtype(dtype).itemsize)
        numbers = self._view.numbers(np.where(valid, cells.start, 0), dtype).astype(np.int64)
        for i in np.flatnonzero(present & (cells.kind == TEXT)).tolist():
            digits = self._view.data[cells.start[i] : cells.start[i] + cells.length[i]]
            if digits.lstrip(b"-").isdigit() and len(digits) < 19:
                numbers[i], valid[i] = int(digits), True
        self._refuse(present & ~valid, f"column {name} is not a number")
        return pa.array(numbers, mask=~valid).cast(kind)

    def _streams(self) -> pa.Array:
        names = self._texts("stream")
        unnamed = pc.is_null(names).to_numpy(zero_copy_only=False)
        if not unnamed.any():
            return names
        filled = names.to_pylist()
        for i, number in enumerate(self._numbers("stream_id", ">i8", pa.int64()).to_pylist()):
            if unnamed[i] and number is not None:
                filled[i] = self._stream_name(number)
        self._refuse(np.array([name is None for name in filled]), "no stream has this stream_id")
        return pa.array(filled, pa.string())


def _write_uuids(text: U8, raw: U8) -> U8:
    digits = HEX_PAIRS[raw].view(np.uint8).reshape(len(raw), 32)
    at = 0
    for begin, end in _UUID_GROUPS:
        text[:, begin:end] = digits[:, at : at + end - begin]
        at += end - begin
    return text


def _moment(text: bytes) -> int | None:
    """A timestamp with time zone as Postgres writes it in ISO style, in microseconds since 1970."""
    try:
        moment = datetime.fromisoformat(text.decode("ascii"))
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _no_flags(rows: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.zeros(rows + 1, dtype=np.int32)), pa.array([], pa.string()))


def _in_order(parts: list[tuple[I64, pa.RecordBatch]]) -> pa.RecordBatch | None:
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")
    table = pa.Table.from_batches([batch for _, batch in parts], TAKEN).take(pa.array(order))
    return table.combine_chunks().to_batches()[0]
