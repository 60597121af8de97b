"""What a peer sends is bounded before it is read, and checked when it is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.requests import Request

from evermark.errors import BusyError, FormatError
from evermark.replicas import server, snapshots, wire
from evermark.replicas.event import Event, Operation, Version
from evermark.replicas.exchange import Chunk
from evermark.replicas.snapshots import decoded_chunk, encoded
from evermark.replicas.values import Kind, Table

TABLE = Table("orders", {"id": Kind.INTEGER, "what": Kind.TEXT}, ("id",))


def _events(count: int) -> list[Event]:
    return [
        Event(
            f"{number:08x}-0000-4000-8000-000000000000",
            "orders",
            Operation.UPDATE,
            str(number),
            {"id": str(number), "what": "x" * 100},
            1,
            Version(number, "a.000000000001aaaaaaaa", number),
        )
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("bound", "value"), [("EVENTS_MAX", 2), ("BODY_BYTES_MAX", 500)], ids=["events", "bytes when unpacked"]
)
def test_r8_a_body_with_too_much_in_it_is_refused(monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    """GIVEN more events than a page may have, or so many bytes compressed to few THEN none is read; two are."""
    monkeypatch.setattr(wire, bound, value)
    with pytest.raises(FormatError, match="too many events"):
        wire.events_from_bytes(wire.events_to_bytes(_events(3), {}), TABLE)
    assert len(wire.events_from_bytes(wire.events_to_bytes(_events(2), {}), TABLE)) == 2


def test_r8_a_large_text_of_few_bytes_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a body of some kilobytes that says of itself that it becomes megabytes THEN nothing of it is unpacked."""
    event = replace(_events(1)[0], image={"id": "1", "what": "x" * 4_000_000})
    body = wire.events_to_bytes([event], {})
    assert len(body) < 10_000 and wire.unpacked_bytes(body) > 4_000_000
    assert len(wire.events_from_bytes(body, TABLE)) == 1
    monkeypatch.setattr(wire, "BODY_BYTES_MAX", 3_999_999)
    monkeypatch.setattr(pa.ipc, "open_stream", lambda _: pytest.fail("it was unpacked"))
    with pytest.raises(FormatError, match="too many events"):
        wire.events_from_bytes(body, TABLE)


def test_r8_a_text_that_is_said_once_for_many_rows_counts_as_often() -> None:
    """GIVEN events whose texts are numbers of a dictionary's THEN they are refused: each row might be of megabytes."""
    schema = pa.schema(
        [
            field.with_type(pa.dictionary(pa.int32(), pa.string())) if field.name == "data" else field
            for field in wire._SCHEMA
        ]
    )
    arrays = [
        pa.array(["x"] if pa.types.is_string(f.type) else [1]).cast(f.type)
        if f.name != "data"
        else pa.array(["x"]).dictionary_encode()
        for f in schema
    ]
    with pytest.raises(FormatError, match="dictionary"):
        wire.events_from_bytes(_as_stream(pa.record_batch(arrays, schema)), TABLE)


@pytest.mark.parametrize("bound", [1_000_000, 100_000_000])
def test_r8_a_chunk_is_not_unpacked_beyond_its_bound(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    """GIVEN a chunk of some kilobytes in which one text stands for a thousand rows' THEN it is refused if the rows
    would be more than they may; and so it is if it has more rows than its manifest says."""
    rows = 1000
    columns = {"record_id": [str(at) for at in range(rows)], "hlc": [1] * rows, "origin_seq": [1] * rows}
    chunk = pa.table(
        {
            **columns,
            "origin_node_id": ["a.000000000001aaaaaaaa"] * rows,
            "is_deleted": [False] * rows,
            "value id": range(rows),
            "value what": ["x" * 10_000] * rows,
        }
    )
    data = encoded(chunk)
    said = Chunk(rows, len(data), hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(snapshots, "UNPACKED_BYTES_MAX", bound)
    if bound > rows * 10_000:
        assert decoded_chunk(TABLE, "s", 0, said, data).num_rows == rows
        with pytest.raises(FormatError, match="1000 rows"):
            decoded_chunk(TABLE, "s", 0, replace(said, rows=1), data)
    else:
        assert len(data) < 100_000
        with pytest.raises(FormatError, match="more than 1000000 bytes"):
            decoded_chunk(TABLE, "s", 0, said, data)
        monkeypatch.setattr(snapshots, "UNPACKED_BYTES_MAX", 10_000)
        monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("it was unpacked"))
        with pytest.raises(FormatError, match="when it is unpacked"):
            decoded_chunk(TABLE, "s", 0, said, data)


class _Sent:
    """A request whose body comes in pieces of ten bytes, for ever if nobody ends it."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        while self.left:
            self.left -= 1
            yield b"0123456789"


def test_r8_a_request_is_read_as_far_as_it_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a body without an end THEN it is refused at the bound, and nothing after that is read."""
    monkeypatch.setattr(server, "BODY_BYTES_MAX", 100)
    endless: Any = _Sent(1000)
    with pytest.raises(FormatError, match="larger than 100 bytes"):
        asyncio.run(server._body(cast(Request, endless), lambda _: None))
    assert endless.left == 1000 - 11
    assert len(asyncio.run(server._body(cast(Request, _Sent(10)), lambda _: None))) == 100


def test_r8_bodies_that_are_under_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN requests under way that have together as much as there may be THEN another is told to come later, and may
    when one of them is done."""
    monkeypatch.setattr(server, "BODIES_BYTES_MAX", 200)
    bodies = server.Bodies()

    def read(take: Callable[[int], None]) -> int:
        return len(asyncio.run(server._body(cast(Request, _Sent(10)), take)))

    with bodies.one() as first:
        assert read(first) == 100
        with bodies.one() as second:
            assert read(second) == 100
            with pytest.raises(BusyError, match="under way"), bodies.one() as third:
                read(third)
        with bodies.one() as fourth:
            assert read(fourth) == 100


def test_r8_a_body_that_does_not_end_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a body whose rest does not come THEN it is waited for no longer than a request may be old."""

    class Slow(_Sent):
        async def stream(self) -> AsyncIterator[bytes]:
            await asyncio.sleep(60)
            yield b""

    monkeypatch.setattr(server, "BODY_S_MAX", 0.01)
    with pytest.raises(FormatError, match="takes longer"):
        asyncio.run(server._body(cast(Request, Slow(1)), lambda _: None))


def test_r8_a_delete_of_what_is_no_key_is_refused() -> None:
    """GIVEN a delete of a record that no key of the table can be THEN it is not read."""
    gone = replace(_events(1)[0], operation=Operation.DELETE, image=None)
    assert wire.events_from_bytes(wire.events_to_bytes([gone], {}), TABLE) == [gone]
    with pytest.raises(FormatError, match="is no"):
        wire.events_from_bytes(wire.events_to_bytes([replace(gone, record_id="x")], {}), TABLE)


def test_r8_half_a_character_is_refused() -> None:
    """GIVEN an image whose JSON writes half of a character, which no database takes, among its values or in its key
    THEN the event is refused; with both halves it is taken."""
    by_text = Table("orders", {"id": Kind.TEXT, "what": Kind.TEXT}, ("id",))
    event = _events(1)[0]
    for half in ({"id": "1", "what": "\ud83d"}, {"id": "\ud83d", "what": "x"}):
        with pytest.raises(FormatError, match="UTF-8"):
            by_text.checked(half, half["id"])
    for text, is_taken in (('"\\ud83d"', False), ('"\\ud83d\\ude00"', True), ('"ü"', True)):
        columns: list[list[Any]] = [[event.id], ["update"], ["1"], [f'{{"id":"1","what":{text}}}'], [1]]
        columns += [[each] for each in (event.version.origin, event.version.seq, event.version.hlc)]
        arrays = [pa.array(each, field.type) for each, field in zip(columns, wire._SCHEMA, strict=True)]
        body = _as_stream(pa.record_batch(arrays, wire._SCHEMA))
        if is_taken:
            assert len(wire.events_from_bytes(body, TABLE)) == 1
        else:
            with pytest.raises(FormatError, match="UTF-8"):
                wire.events_from_bytes(body, TABLE)


def test_r8_bytes_that_are_no_text_are_refused() -> None:
    """GIVEN a column of texts with bytes in it that are none, in events or in a chunk of a snapshot THEN it is refused
    as what a damaged peer sends."""
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    arrays = [bad if field.type == pa.string() else pa.array([1], field.type) for field in wire._SCHEMA]
    with pytest.raises(FormatError, match="cannot be read"):
        wire.events_from_bytes(_as_stream(pa.record_batch(arrays, wire._SCHEMA)), TABLE)
    row = {"record_id": ["1"], "hlc": [1], "origin_node_id": ["a.000000000001aaaaaaaa"], "origin_seq": [1]}
    chunk = pa.table({**row, "is_deleted": [False], "value id": [1], "value what": bad})
    data = encoded(chunk)
    with pytest.raises(FormatError, match="cannot be read"):
        decoded_chunk(TABLE, "s", 0, Chunk(1, len(data), hashlib.sha256(data).hexdigest()), data)


def _as_stream(batch: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    made: bytes = out.getvalue().to_pybytes()
    return made
