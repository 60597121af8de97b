"""The event: the one record everything in Evermark is about (version 1, see docs/formats.md).

New columns come at the end and may be null: files and sources from before a column was added do not have it.

`EVENT` is the Arrow schema of a log row. `TAKEN` is what a source returns from `read`: the same columns
without the four that ingest fills in.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")


class Op(StrEnum):
    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    TRUNCATE = "truncate"
    READ = "read"
    MESSAGE = "message"
    SCHEMA = "schema"
    POISON = "poison"
    CONTROL = "control"  # asks Evermark for something (a replay); logged, never delivered


# Kept in the log, never sent to a receiver.
UNDELIVERED_OPS = frozenset({Op.CONTROL, Op.SCHEMA, Op.POISON})

EVENT = pa.schema(
    [
        pa.field("event_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("batch", pa.int64(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("op", pa.string(), nullable=False),
        pa.field("tx", pa.string()),
        pa.field("origin", pa.string()),
        pa.field("origin_seq", pa.int64()),
        pa.field("event_time", TIMESTAMP),
        pa.field("ingested_at", TIMESTAMP, nullable=False),
        pa.field("payload", pa.string()),
        pa.field("before", pa.string()),
        pa.field("schema_version", pa.int32()),
        pa.field("flags", pa.list_(pa.string())),
        pa.field("bytes", pa.binary()),
        pa.field("previous_key", pa.string()),  # the key that this change took away from the record; null: none
    ]
)

# Not in logs of the first programs, nor in the batches of a source that wrote TAKEN's columns down for itself.
ADDED_SINCE = ("previous_key",)
FILLED_BY_INGEST = ("source", "partition", "batch", "ingested_at")
TAKEN = pa.schema([f for f in EVENT if f.name not in FILLED_BY_INGEST])


@dataclass(frozen=True)
class Seen:
    """An event that the log holds."""

    event_id: str
    event_time: datetime | None
    at: datetime  # when ingest took it


UNKNOWN = "unknown:"  # a flag, with the name of a column whose value the source did not send


def taken_batch(columns: dict[str, object], rows: int) -> pa.RecordBatch:
    """A TAKEN record batch from the columns a source knows; the rest are null."""
    arrays: list[pa.Array] = []
    for field in TAKEN:
        given = columns.get(field.name)
        if given is None:
            arrays.append(pa.nulls(rows, field.type))
        elif isinstance(given, (pa.Array, pa.ChunkedArray)):
            column = given.combine_chunks() if isinstance(given, pa.ChunkedArray) else given
            arrays.append(column if column.type == field.type else column.cast(field.type))
        else:
            arrays.append(pa.array(given, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=TAKEN)


def with_all_columns(rows: pa.Table | pa.RecordBatch, schema: pa.Schema) -> pa.Table | pa.RecordBatch:
    """The columns of `schema`, in its order: one that was added since these rows were written is null, one that this
    program does not know is left out."""
    if rows.schema.names == schema.names:
        return rows
    arrays = []
    for field in schema:
        if field.name in rows.schema.names:
            arrays.append(rows.column(field.name))
        elif field.nullable:
            arrays.append(pa.nulls(rows.num_rows, field.type))
        else:
            raise KeyError(f"the rows have no column {field.name}")
    return type(rows).from_arrays(arrays, names=schema.names)
