"""Decoding pgoutput in chunks: nothing lost, nothing misplaced, whatever the chunks and however bad a row."""

from __future__ import annotations

import itertools
import struct
import uuid
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import EvermarkError, FormatError
from evermark.event import TAKEN
from evermark.sources.postgres.lsn import Incarnation, Position, lsn_of, lsn_text, positions
from evermark.sources.postgres.read.chunks import BUCKET, Packed, chunked, in_order, unpack
from evermark.sources.postgres.read.outbox_rows import OutboxDecoder
from evermark.sources.postgres.read.pgoutput import View, walk

HERE = Incarnation(0x6AF913B6A5BFDB28, 3)
COLUMNS = ("id", "created_at", "stream_id", "stream", "op", "key", "payload", "before", "schema_version")
ID = uuid.UUID("01a1dd04-17d5-7286-80b0-58382300cd42")
WHEN = datetime(2026, 11, 15, 2, 23, 15, 411547, UTC)
PG_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
EVENTS_OID, OTHER_OID = 16400, 16500

Cell = tuple[bytes, bytes | None]


def begin(lsn: int, xid: int = 700) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, 0, xid)


def commit(lsn: int) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, lsn, lsn + 8, 0)


def relation(oid: int = EVENTS_OID, name: str = "events", columns: tuple[str, ...] = COLUMNS) -> bytes:
    head = b"R" + struct.pack(">I", oid) + b"pgstream\0" + name.encode() + b"\0d" + struct.pack(">H", len(columns))
    return head + b"".join(b"\0" + c.encode() + b"\0" + struct.pack(">Ii", 25, -1) for c in columns)


def cell(kind: bytes, value: bytes | None) -> bytes:
    return kind if value is None else kind + struct.pack(">i", len(value)) + value


def values(number: int, **changed: Cell) -> dict[str, Cell]:
    made: dict[str, Cell] = {
        "id": (b"b", uuid.UUID(int=ID.int + number).bytes),
        "created_at": (b"b", struct.pack(">q", (WHEN - PG_EPOCH) // (WHEN.resolution))),
        "stream_id": (b"b", struct.pack(">q", 1)),
        "stream": (b"b", b"public.orders"),
        "op": (b"b", b"insert"),
        "key": (b"b", str(number).encode()),
        "payload": (b"b", b'\1{"n": %d}' % number),
        "before": (b"n", None),
        "schema_version": (b"b", struct.pack(">i", 2)),
    }
    return made | changed


def insert(cells: dict[str, Cell], columns: tuple[str, ...] = COLUMNS, oid: int = EVENTS_OID) -> bytes:
    body = b"".join(cell(*cells.get(name, (b"n", None))) for name in columns)
    return b"I" + struct.pack(">I", oid) + b"N" + struct.pack(">H", len(columns)) + body


def event(number: int, **changed: Cell) -> bytes:
    return insert(values(number, **changed))


def decoder(start: int = 0, end: int = 2**63, encoding: str = "utf-8") -> OutboxDecoder:
    names = {1: "public.orders", 7: "seven"}
    return OutboxDecoder(
        "pgstream", Position(HERE, start), Position(HERE, end), stream_name=names.get, encoding=encoding
    )


def chunk(messages: list[bytes]) -> tuple[np.ndarray, bytes]:
    return np.array([len(m) for m in messages], dtype=np.int64), b"".join(messages)


def decode(*chunks: list[bytes], by: OutboxDecoder | None = None) -> list[dict[str, object]]:
    one = by or decoder()
    found: list[dict[str, object]] = []
    for messages in chunks:
        batch = one.decode(*chunk(messages))
        if batch is not None:
            assert batch.schema == TAKEN
            batch.validate(full=True)
            found += batch.to_pylist()
    return found


def keys(rows: list[dict[str, object]]) -> list[object]:
    return [row["key"] for row in rows]


def test_insert_becomes_an_event_with_every_column() -> None:
    """Binary values, as the server sends them to us."""
    [row] = decode([begin(0x10, 731), relation(), event(5), commit(0x10)])
    assert row == {
        "event_id": str(uuid.UUID(int=ID.int + 5)),
        "position": HERE.at(0x10, 0),
        "stream": "public.orders",
        "key": "5",
        "op": "insert",
        "tx": "731",
        "origin": None,
        "origin_seq": None,
        "event_time": WHEN,
        "payload": '{"n": 5}',
        "before": None,
        "schema_version": 2,
        "flags": [],
        "bytes": None,
        "previous_key": None,
    }


def test_a_chunk_over_the_upgrade_gives_each_event_the_columns_its_table_had() -> None:
    """GIVEN rows from before and after a column was added WHEN decoded together THEN columns are taken by name."""
    wider = (*COLUMNS[:3], "previous_key", *COLUMNS[3:])
    moved = insert(values(6, previous_key=(b"b", b"5")), wider)
    stayed = insert(values(7), wider)
    rows = decode(
        [begin(0x10), relation(), event(5), commit(0x10)],
        [begin(0x20), relation(columns=wider), moved, stayed, relation(), event(8), commit(0x20)],
    )
    assert [(row["key"], row["previous_key"]) for row in rows] == [("5", None), ("6", "5"), ("7", None), ("8", None)]


def test_text_values_decode_like_binary_ones() -> None:
    """A type without binary output, or an older server, sends text: the event is the same."""
    text = {
        "id": (b"t", str(uuid.UUID(int=ID.int + 5)).encode()),
        "created_at": (b"t", b"2026-11-15 02:23:15.411547+00"),
        "stream_id": (b"t", b"1"),
        "payload": (b"t", b'{"n": 5}'),
        "schema_version": (b"t", b"2"),
        "stream": (b"t", b"public.orders"),
    }
    mixed = decode([begin(16), relation(), event(5), event(5, **text), commit(16)])
    first, second = ({k: v for k, v in row.items() if k != "position"} for row in mixed)
    assert first == second


def test_relation_sent_again_with_other_columns_applies_from_there_on() -> None:
    """A column added and the order changed in mid-stream: rows before and after are read as they were written."""
    wider = ("op", "extra", *[c for c in COLUMNS if c != "op"])
    after = insert(values(2) | {"extra": (b"t", b"new")}, wider)
    rows = decode(
        [begin(16), relation(), event(1), relation(columns=wider), after, commit(16)], [begin(32), after, commit(32)]
    )
    assert keys(rows) == ["1", "2", "2"]
    assert [row["op"] for row in rows] == ["insert"] * 3


def test_other_tables_and_other_kinds_of_change_are_passed_over() -> None:
    """They count as changes of the transaction, but are no events."""
    other = insert({"a": (b"t", b"1")}, ("a",), OTHER_OID)
    update = b"U" + event(9)[1:]
    rows = decode(
        [begin(16), relation(OTHER_OID, "orders", ("a",)), relation(), other, event(1), update, event(2), commit(16)]
    )
    assert keys(rows) == ["1", "2"]
    assert [row["position"] for row in rows] == [HERE.at(16, 1), HERE.at(16, 3)]


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 80), max_size=10),
    start=st.integers(0, 100),
    end=st.integers(0, 100),
)
def test_any_chunking_gives_the_transactions_of_the_range(
    sizes: list[int], cuts: list[int], start: int, end: int
) -> None:
    """Transactions cut across chunks at any message: those with start <= final LSN < end, whole, in order."""
    messages = [begin(0), relation(), commit(0)]
    expected = []
    for t, size in enumerate(sizes):
        lsn = (t + 1) * 10
        messages += [begin(lsn, t), *[event(t * 10 + i) for i in range(size)], commit(lsn)]
        expected += [(str(t * 10 + i), HERE.at(lsn, i), str(t)) for i in range(size) if start <= lsn < end]
    at = sorted({min(c, len(messages)) for c in cuts} | {0, len(messages)})
    rows = decode(*[messages[a:b] for a, b in itertools.pairwise(at)], by=decoder(start, end))
    assert [(row["key"], row["position"], row["tx"]) for row in rows] == expected


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"id": (b"b", b"short")}, "id is not a uuid"),
        ({"id": (b"n", None)}, "id is not a uuid"),
        ({"created_at": (b"t", b"yesterday")}, "created_at is not a time"),
        ({"op": (b"b", b"explode")}, "op is none"),
        ({"op": (b"n", None)}, "op is null"),
        ({"payload": (b"b", b"\2{}")}, "unknown version"),
        ({"payload": (b"u", None)}, "without its value"),
        ({"key": (b"b", b"\xff\xfe")}, "not text"),
        ({"schema_version": (b"b", b"\0")}, "not a number"),
        ({"stream": (b"n", None), "stream_id": (b"b", struct.pack(">q", 99))}, "no stream"),
        ({"stream": (b"n", None), "stream_id": (b"n", None)}, "no stream"),
    ],
)
def test_bad_value_becomes_poison_and_its_neighbours_events(changed: dict[str, Cell], reason: str) -> None:
    """What cannot be decoded is kept raw, in its place, with the reason."""
    bad = event(2, **changed)
    rows = decode([begin(16), relation(), event(1), bad, event(3), commit(16)])
    assert [row["op"] for row in rows] == ["insert", "poison", "insert"]
    assert rows[1]["bytes"] == bad
    assert reason in str(rows[1]["payload"])
    assert rows[1]["position"] == HERE.at(16, 1)
    if "id" not in changed:
        assert rows[1]["event_id"] == str(uuid.UUID(int=ID.int + 2))


def test_row_with_only_a_stream_number_gets_its_name() -> None:
    """A direct insert may name the stream by number."""
    [row] = decode(
        [begin(16), relation(), event(1, stream=(b"n", None), stream_id=(b"b", struct.pack(">q", 7))), commit(16)]
    )
    assert row["stream"] == "seven"


def test_table_without_a_needed_column_gives_poison() -> None:
    """Somebody dropped a column: its rows are kept raw, and the stream goes on."""
    columns = tuple(c for c in COLUMNS if c != "op")
    [row] = decode([begin(16), relation(columns=columns), insert(values(1), columns), commit(16)])
    assert (row["op"], row["payload"]) == ("poison", '{"reason": "the table has no column op"}')


def test_message_of_an_unknown_kind_is_kept_as_poison() -> None:
    """A protocol newer than us."""
    rows = decode([begin(16), relation(), event(1), b"?what", commit(16)])
    assert [(row["op"], row["bytes"]) for row in rows] == [("insert", None), ("poison", b"?what")]


def test_infinite_time_is_no_time() -> None:
    """Postgres has one; the log's timestamps do not."""
    [row] = decode([begin(16), relation(), event(1, created_at=(b"b", struct.pack(">q", 2**63 - 1))), commit(16)])
    assert (row["op"], row["event_time"]) == ("insert", None)


def test_text_of_another_encoding_is_decoded() -> None:
    """Logical decoding sends the database's encoding, whatever the client's."""
    [row] = decode(
        [begin(16), relation(), event(1, key=(b"b", b"caf\xe9")), commit(16)], by=decoder(encoding="latin-1")
    )
    assert row["key"] == "café"


@given(row=st.integers(0, 4), at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 60))
def test_damaged_row_never_reaches_into_its_neighbours(row: int, at: int, byte: int, cut: int) -> None:
    """Any byte changed, any end cut off: the other rows are read as ever, and the damaged one is not lost."""
    events = [event(i) for i in range(5)]
    damaged = bytearray(events[row])
    damaged[1 + at % (len(damaged) - 1)] = byte  # the kind byte stays: it decides whose message it is
    events[row] = bytes(damaged[: max(1, len(damaged) - cut)])
    rows = decode([begin(16), relation(), *events, commit(16)])
    ordinals = [Position.parse(str(r["position"])).ordinal for r in rows]
    good = [r["key"] for r, n in zip(rows, ordinals, strict=True) if n != row]
    assert good == [str(i) for i in range(5) if i != row]
    relation_changed = events[row][1:5] != struct.pack(">I", EVENTS_OID)[: len(events[row][1:5])]
    assert relation_changed or row in ordinals


@pytest.mark.parametrize("messages", [[b"B123"], [relation(), event(1)]])
def test_stream_without_its_frame_is_refused(messages: list[bytes]) -> None:
    """A change outside a transaction has no position: stop, do not guess."""
    with pytest.raises(FormatError):
        decode(messages)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_position_survives_its_text(lsn: int, ordinal: int) -> None:
    """Fixed width, and built alike one by one and in columns."""
    text = HERE.at(lsn, ordinal)
    assert (len(text), Position.parse(text)) == (50, Position(HERE, lsn, ordinal))
    assert positions(HERE, np.array([lsn], np.uint64), np.array([ordinal], np.uint32)).to_pylist() == [text]
    assert lsn_of(lsn_text(lsn)) == lsn


@given(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
)
def test_order_of_position_texts_is_the_order_of_positions(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Everything downstream compares them as plain strings."""
    assert (HERE.at(*a) < HERE.at(*b)) == (a < b)


@pytest.mark.parametrize("text", ["", "0/1", "g" * 50, HERE.at(1) + "0"])
def test_damaged_position_is_refused(text: str) -> None:
    """A checkpoint of another source must not be read as one of ours."""
    with pytest.raises(FormatError):
        Position.parse(text)


def packed_rows(sizes: list[int], big: int) -> list[Packed]:
    """What the server makes of messages of these sizes: buckets of small ones, then their big ones."""
    rows: list[Packed] = []
    numbered = list(enumerate(sizes, 1))
    for bucket in sorted({o // BUCKET for o, _ in numbered}):
        small = [(o, s) for o, s in numbered if o // BUCKET == bucket and s <= big]
        groups = [small] if small else []
        groups += [[(o, s)] for o, s in numbered if o // BUCKET == bucket and s > big]
        for group in groups:
            data = memoryview(b"".join(_body(o, s) for o, s in group))
            ordinals, lengths = (np.array(column, dtype=np.int64) for column in zip(*group, strict=True))
            rows.append(Packed(bucket, group is not small, ordinals, lengths, data))
    return rows


def _body(ordinal: int, size: int) -> bytes:
    return (struct.pack(">I", ordinal) * (size // 4 + 1))[:size]


def copied(rows: list[Packed]) -> bytes:
    """These rows as a binary COPY."""
    out = b"PGCOPY\n\xff\r\n\0" + bytes(8)
    for row in rows:
        elements = b"".join(
            struct.pack(">iq", 8, int(o % BUCKET) << 32 | int(n))
            for o, n in zip(row.ordinals, row.lengths, strict=True)
        )
        sizes = struct.pack(">iiiii", 1, 0, 20, len(row.ordinals), 1) + elements
        big = struct.pack(">iq", 8, int(row.ordinals[0])) if row.big else struct.pack(">i", -1)
        out += struct.pack(">hiq", 4, 8, row.bucket) + big
        out += struct.pack(">i", len(sizes)) + sizes + struct.pack(">i", len(row.data)) + bytes(row.data)
    return out + b"\xff\xff"


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    repeat=st.sampled_from([1, 60]),
    pieces=st.lists(st.integers(1, 5000), max_size=8),
)
def test_big_messages_return_to_their_places_however_the_copy_is_cut(
    sizes: list[int], repeat: int, pieces: list[int]
) -> None:
    """Buckets, big messages apart, arbitrary network pieces: the messages come out as they were."""
    sizes = sizes * repeat
    wire = copied(packed_rows(sizes, big=40))
    cut, at = [], 0
    for size in pieces:
        cut.append(wire[at : at + size])
        at += size
    cut.append(wire[at:])
    found = list(chunked(in_order(unpack(cut))))
    assert np.concatenate([lengths for lengths, _ in found]).tolist() == sizes
    assert b"".join(data for _, data in found) == b"".join(_body(o, s) for o, s in enumerate(sizes, 1))


@pytest.mark.parametrize("fault", ["missing", "swapped"])
def test_message_missing_or_misplaced_in_a_bucket_is_noticed(fault: str) -> None:
    """Whatever plan the server chose: a bucket that is not whole and in order is refused."""
    [row] = packed_rows([5] * 10, big=40)
    order = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9] if fault == "missing" else [1, 0, *range(2, 10)])
    damaged = Packed(row.bucket, row.big, row.ordinals[order], row.lengths[order], row.data[: 5 * len(order)])
    with pytest.raises(FormatError, match="out of order"):
        list(in_order([damaged]))


def test_copy_cut_off_is_refused() -> None:
    """A COPY without its end may lack rows."""
    wire = copied(packed_rows([5] * 10, big=40))
    with pytest.raises(EvermarkError, match="ended in the middle"):
        list(unpack([wire[:-10]]))


def test_batches_hold_strings_of_their_own() -> None:
    """A batch must not keep the whole chunk alive."""
    batch = decoder().decode(*chunk([begin(16), relation(), *[event(i) for i in range(100)], commit(16)]))
    assert batch is not None
    assert pa.Table.from_batches([batch]).get_total_buffer_size() < 60_000


def test_a_value_that_says_it_is_longer_than_its_message_is_marked_at_once() -> None:
    """GIVEN three rows of text, the second with a length that reaches into the third WHEN they are walked THEN it alone
    is not intact, and nothing of it lies behind its end."""
    rows = [b"t\0\0\0\1a" + b"t\0\0\0\2bc", b"t\0\0\0\x09a" + b"t\0\0\0\2bc", b"t\0\0\0\1a" + b"t\0\0\0\2bc"]
    ends = np.cumsum([len(row) for row in rows])
    view = View(b"".join(rows) + b"C1234567")
    for number, (cells, intact) in enumerate(walk(view, ends - [len(row) for row in rows], ends, 2), start=1):
        assert intact.tolist() == [True, False, True]
        assert (cells.start + cells.length <= ends).all() and cells.length[intact].tolist() == [number, number]
