"""Messages out of a slot, many at a time.

One row per message is most of the cost of reading a slot through SQL. So the server packs 1024 messages into one row,
with their lengths; a message larger than `BIG_BYTES` stays alone, so that neither an aggregate's limit of 1 GB nor our
memory is ever in question. Big ones come after the rest of their bucket and are put back where they belong here.
Every message carries its ordinal: whatever plan the server chose, a lost or misplaced message is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from psycopg import sql

from evermark.errors import FormatError
from evermark.sources.postgres.lsn import lsn_text
from evermark.sources.postgres.read.pgoutput import I64

BUCKET = 1024
BIG_BYTES = 16 * 1024
CHUNK_ROWS_MAX = 32 * 1024
CHUNK_BYTES_MAX = 8 * 1024 * 1024
_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = 19
_ARRAY_HEADER_BYTES = 20
_ELEMENT = np.dtype([("size", ">i4"), ("value", ">i8")])


@dataclass(frozen=True)
class Packed:
    """One row of the COPY: the small messages of a bucket, or one big message."""

    bucket: int
    big: bool
    ordinals: I64
    lengths: I64
    data: memoryview


def peek_query(
    slot: str,
    publication: str,
    upto_lsn: int,
    options: Mapping[str, str],
    *,
    big_bytes: int = BIG_BYTES,
    consumes: bool = False,
) -> sql.Composed:
    """COPY of everything that commits before `upto_lsn`, as the slot gives it, without moving the slot, unless it
    `consumes` what is read.

    `options` are pgoutput's, besides protocol and publication.
    """
    return sql.SQL(
        "copy (select o / {bucket}, case when octet_length(d) > {big} then o end,"
        " array_agg(((o % {bucket}) << 32) | octet_length(d)), string_agg(d, ''::bytea)"
        " from pg_catalog.{function}({slot}, {upto}, null,"
        " 'proto_version', '1', 'publication_names', {publication}, {options})"
        " with ordinality as t(l, x, d, o) group by 1, 2 order by 1, 2 nulls first) to stdout (format binary)"
    ).format(
        bucket=sql.Literal(BUCKET),
        function=sql.SQL("pg_logical_slot_get_binary_changes" if consumes else "pg_logical_slot_peek_binary_changes"),
        big=sql.Literal(big_bytes),
        slot=sql.Literal(slot),
        upto=sql.Literal(lsn_text(upto_lsn)),
        publication=sql.Literal(f'"{publication}"'),
        options=sql.SQL(", ").join(sql.Literal(text) for option in options.items() for text in option),
    )


def unpack(messages: Iterable[bytes | bytearray | memoryview]) -> Iterator[Packed]:
    """The rows of a binary COPY. A row usually comes in one message of its own, but need not."""
    pending = b""
    at_header = True
    for message in messages:
        buffer = memoryview(pending + bytes(message)) if pending else memoryview(message)
        at = 0
        if at_header:
            if len(buffer) < _HEADER_BYTES:
                pending = bytes(buffer)
                continue
            if bytes(buffer[:11]) != _SIGNATURE:
                raise FormatError("the server's COPY does not begin like one", hint="is a proxy in between?")
            at, at_header = _HEADER_BYTES + struct.unpack_from(">i", buffer, 15)[0], False
        while (found := _row(buffer, at)) is not None:
            row, at = found
            yield row
        pending = bytes(buffer[at:])
    if at_header or pending != b"\xff\xff":
        raise FormatError("the server's COPY ended in the middle", hint="report this, with the log")


def _row(buffer: memoryview, at: int) -> tuple[Packed, int] | None:
    """The row at `at`, and where the next begins; nothing when it is not all here, or at the end."""
    size = len(buffer)
    if at + 2 > size or (count := struct.unpack_from(">h", buffer, at)[0]) == -1:
        return None
    if count != 4:
        raise FormatError(f"a row of the server's COPY has {count} fields", hint="report this, with the log")
    fields: list[memoryview | None] = []
    at += 2
    for _ in range(count):
        if at + 4 > size:
            return None
        length = struct.unpack_from(">i", buffer, at)[0]
        at += 4
        if at + length > size:
            return None
        fields.append(buffer[at : at + length] if length >= 0 else None)
        at += max(length, 0)
    bucket, big, sizes, data = fields
    if bucket is None or sizes is None or data is None:
        raise FormatError("a row of the server's COPY lacks a field", hint="report this, with the log")
    packed = np.frombuffer(sizes, dtype=_ELEMENT, offset=_ARRAY_HEADER_BYTES)["value"].astype(np.int64)
    number = struct.unpack(">q", bucket)[0]
    return Packed(number, big is not None, (packed >> 32) + number * BUCKET, packed & 0xFFFFFFFF, data), at


def in_order(rows: Iterable[Packed]) -> Iterator[tuple[I64, memoryview]]:
    """Put big messages back between the small ones of their bucket, and see that none is missing."""
    expected = 1

    def checked(ordinals: I64, lengths: I64, data: memoryview) -> tuple[I64, memoryview]:
        nonlocal expected
        if not np.array_equal(ordinals, np.arange(expected, expected + len(ordinals))):
            raise FormatError("the server's messages are out of order", hint="report this, with the log")
        expected += len(ordinals)
        return lengths, data

    small: Packed | None = None
    used = used_bytes = 0
    for row in rows:
        if small is not None and row.bucket == small.bucket:
            before = int(np.searchsorted(small.ordinals, row.ordinals[0]))
        else:
            before = len(small.ordinals) if small is not None else 0
        if small is not None and before > used:
            upto = used_bytes + int(small.lengths[used:before].sum())
            yield checked(small.ordinals[used:before], small.lengths[used:before], small.data[used_bytes:upto])
            used, used_bytes = before, upto
        if row.big:
            yield checked(row.ordinals, row.lengths, row.data)
        else:
            small, used, used_bytes = row, 0, 0
    if small is not None and used < len(small.ordinals):
        yield checked(small.ordinals[used:], small.lengths[used:], small.data[used_bytes:])


def chunked(pieces: Iterable[tuple[I64, memoryview]]) -> Iterator[tuple[I64, bytes]]:
    """Join small pieces, so that decoding works on enough rows at once; bounded in rows and bytes."""
    lengths: list[I64] = []
    parts: list[memoryview] = []
    rows = size = 0
    for numbers, data in pieces:
        if parts and (rows + len(numbers) > CHUNK_ROWS_MAX or size + len(data) > CHUNK_BYTES_MAX):
            yield np.concatenate(lengths), b"".join(parts)
            lengths, parts, rows, size = [], [], 0, 0
        lengths.append(numbers)
        parts.append(data)
        rows += len(numbers)
        size += len(data)
    if parts:
        yield np.concatenate(lengths), b"".join(parts)
