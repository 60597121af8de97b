"""What a peer says of a snapshot: refused unless it is whole, and of a table as it is here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evermark.errors import FormatError
from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.ranges import Ranges
from evermark.replicas.snapshots import CHUNK_BYTES_MAX, verified, whole_digest
from evermark.replicas.values import Kind, Table

TABLE = Table("orders", {"id": Kind.INTEGER, "what": Kind.TEXT}, ("id",))
CHUNK = Chunk(1, 10, "00")
_HELD = {"a.000000000001aaaaaaaa": Ranges.through(3)}
MANIFEST = Manifest("orders-1", "orders", TABLE.as_json(), _HELD, 7, 1, (CHUNK, CHUNK))


def _signed(**changed: Any) -> Manifest:
    made = replace(MANIFEST, **changed)
    return replace(made, digest=whole_digest(made))


@pytest.mark.parametrize(
    "changed",
    [
        {"held": {}},
        {"clock": 8},
        {"chunks": (CHUNK,)},
        {"chunks": (CHUNK, replace(CHUNK, digest="01"))},
        {"files": (1, 1)},
        {"digest": ""},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_r11_a_manifest_of_which_anything_was_changed_is_damaged(changed: dict[str, Any]) -> None:
    """GIVEN a manifest with the digest of the whole WHEN its cut or one of its chunks is another THEN it is refused."""
    assert verified(_signed(), TABLE) == _signed()
    with pytest.raises(FormatError, match="damaged"):
        verified(replace(_signed(), **changed), TABLE)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"table": "users"}, "other columns"),
        ({"form": TABLE.as_json() | {"columns": {"id": "integer", "what": "bytes"}}}, "other columns"),
        ({"files": (1, 2)}, "other files"),
        ({"files": (2,)}, "other files"),
        ({"files": (1, 1, 0)}, "other files"),
        ({"chunks": (CHUNK, replace(CHUNK, size=CHUNK_BYTES_MAX + 1))}, "too large"),
        ({"clock": 2**62}, "impossible clock"),
        ({"clock": -1}, "impossible clock"),
    ],
    ids=[
        "another table",
        "another kind",
        "a piece more",
        "one file",
        "three files",
        "a large piece",
        "a clock beyond all",
        "no clock",
    ],
)
def test_r8_a_manifest_of_something_else_than_was_asked_for_is_refused(changed: dict[str, Any], why: str) -> None:
    """GIVEN a manifest that is whole, and of another table, of other files or too large THEN nothing is fetched."""
    assert verified(_signed(files=(1, 1)), TABLE).files == (1, 1)
    with pytest.raises(FormatError, match=why):
        verified(_signed(**changed), TABLE)
