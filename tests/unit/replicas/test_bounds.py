"""What a peer sends is bounded before it is read, and checked when it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from starlette.requests import Request

from evermark.errors import FormatError
from evermark.replicas import server, wire
from evermark.replicas.event import Event, Operation, Version
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
        asyncio.run(server._body(cast(Request, endless)))
    assert endless.left == 1000 - 11
    assert len(asyncio.run(server._body(cast(Request, _Sent(10))))) == 100


def test_r8_a_delete_of_what_is_no_key_is_refused() -> None:
    """GIVEN a delete of a record that no key of the table can be THEN it is not read."""
    gone = replace(_events(1)[0], operation=Operation.DELETE, image=None)
    assert wire.events_from_bytes(wire.events_to_bytes([gone], {}), TABLE) == [gone]
    with pytest.raises(FormatError, match="is no"):
        wire.events_from_bytes(wire.events_to_bytes([replace(gone, record_id="x")], {}), TABLE)
