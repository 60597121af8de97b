"""Rows as columns: what a snapshot of a peer must be like, and what digests tell apart."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from evermark.errors import FormatError
from evermark.replicas.columns import checked, images_of, live_rows, row_digests, tombstones, value_name
from evermark.replicas.values import Kind, Table

KINDS = {"id": Kind.INTEGER, "name": Kind.TEXT, "at": Kind.REAL, "ok": Kind.BOOLEAN, "raw": Kind.BYTES}
TABLE = Table("t", {**KINDS, "price": Kind.NUMERIC}, ("id", "name"))
ORIGIN = "a.000000000001aaaaaaaa"
GOOD: dict[str, Any] = {"id": 1, "name": "x|y\\", "at": 0.5, "ok": "true", "raw": "00ff", "price": "1.5"}


def row(**changed: Any) -> tuple[Any, ...]:
    return (7, ORIGIN, 3, *(GOOD | changed).values())


def test_r11_rows_get_the_record_id_of_their_key_and_canonical_values() -> None:
    """GIVEN rows as SQL gives them WHEN they become columns THEN values have their one form, and keys are escaped."""
    rows = live_rows(TABLE, [row(), row(id=2, ok="1", raw="AB", price="2.50", at=-0.0), row(id=3, ok=None)], "here")
    assert rows["record_id"].to_pylist() == ["1|x\\|y\\\\", "2|x\\|y\\\\", "3|x\\|y\\\\"]
    image = images_of(TABLE, rows)["2|x\\|y\\\\"]
    assert image == {"id": "2", "name": "x|y\\", "at": "0.0", "ok": "true", "raw": "ab", "price": "2.5"}


@pytest.mark.parametrize("digits", ["3" * 31, f"{'1' * 30}.{'2' * 30}", f"{'4' * 50}.{'5' * 50}"])
def test_r11_a_number_of_many_digits_is_the_same_text_in_snapshots_and_events(digits: str) -> None:
    """GIVEN numbers of 31, 60 and 100 digits WHEN they come as a row and as an event's image THEN no digit is lost."""
    (image,) = images_of(TABLE, live_rows(TABLE, [row(price=digits)], "here")).values()
    assert image["price"] == digits == TABLE.checked(dict(image), TABLE.record_id(image))["price"]


@pytest.mark.parametrize(
    ("column", "value"),
    [("id", "abc"), ("id", 1.5), ("id", 2**63), ("at", math.nan), ("at", "?"), ("ok", "maybe"), ("raw", "xyz")],
)
def test_r11_a_value_that_does_not_fit_its_column_is_refused_and_named(column: str, value: Any) -> None:
    """GIVEN a value of another kind THEN the error names the column."""
    with pytest.raises(FormatError, match=f"t.{column} of row"):
        live_rows(TABLE, [row(), row(**{column: value})], "here")


def test_r11_what_a_peer_sends_is_checked() -> None:
    """GIVEN rows whose version is impossible, whose key is another row's, or that are deleted and have values THEN they
    are refused; tombstones are not."""
    good = pa.concat_tables([live_rows(TABLE, [row()], "here"), tombstones(TABLE, [("5|z", 9, ORIGIN, 4)])])
    assert checked(TABLE, good, "peer").num_rows == 2
    for name, value in (("hlc", 0), ("origin_seq", None), ("origin_node_id", "x"), ("record_id", "1|other")):
        at = good.schema.get_field_index(name)
        bad = good.set_column(at, good.schema.field(at), pa.array([value, good[name][1].as_py()], good[name].type))
        with pytest.raises(FormatError):
            checked(TABLE, bad, "peer")
    at = good.schema.get_field_index(value_name("name"))
    with pytest.raises(FormatError, match="deleted"):
        checked(TABLE, good.set_column(at, good.schema.field(at), pa.array(["x|y\\", "z"])), "peer")
    with pytest.raises(FormatError):
        checked(TABLE, tombstones(TABLE, [("no key", 9, ORIGIN, 4)]), "peer")


def test_r14_a_digest_tells_every_change_of_a_row_apart() -> None:
    """GIVEN rows that differ in one value, in null and an empty text, or in their version THEN digests differ."""
    others = [row(at=0.25), row(ok=None), row(raw=""), row(raw=None), row(price="1.50001"), (8, *row()[1:])]
    found = [row_digests(TABLE, live_rows(TABLE, [each], "here"))[0][1] for each in (row(), *others)]
    assert len(set(found)) == len(found)
    assert found[0] == row_digests(TABLE, live_rows(TABLE, [row(price="1.50")], "here"))[0][1]
