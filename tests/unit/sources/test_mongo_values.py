"""BSON as relaxed Extended JSON, and `_id`s as keys: no number is rounded, no two documents share a key."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

bson = pytest.importorskip("bson", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")

from bson import Binary, Code, DatetimeMS, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp  # noqa: E402
from bson.dbref import DBRef  # noqa: E402

from evermark.sources.mongo.values import as_json, decoded, key_text  # noqa: E402

OID = ObjectId("6553f1000000000000000001")


def stored(value: Any) -> Any:
    """The value as it comes from a server."""
    return decoded(bson.encode({"v": value}))["v"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (Int64(2**53 - 1), "9007199254740991"),
        (Int64(2**53), '{"$numberLong":"9007199254740992"}'),
        (Int64(-(2**63)), '{"$numberLong":"-9223372036854775808"}'),
        (0.1, "0.1"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (float("nan"), '{"$numberDouble":"NaN"}'),
        (float("-inf"), '{"$numberDouble":"-Infinity"}'),
        (Decimal128("0.10"), '{"$numberDecimal":"0.10"}'),
        (Decimal128("NaN"), '{"$numberDecimal":"NaN"}'),
        ("ümlaut \x00 \U0001f600", '"ümlaut \\u0000 \U0001f600"'),
        (True, "true"),
        (None, "null"),
        (OID, '{"$oid":"6553f1000000000000000001"}'),
        (datetime(2026, 11, 16, 1, 2, 3, tzinfo=UTC), '{"$date":"2026-11-16T01:02:03Z"}'),
        (datetime(2026, 11, 16, 1, 2, 3, 4000, tzinfo=UTC), '{"$date":"2026-11-16T01:02:03.004Z"}'),
        (DatetimeMS(-1), '{"$date":{"$numberLong":"-1"}}'),
        (DatetimeMS(2**60), '{"$date":{"$numberLong":"1152921504606846976"}}'),
        (b"\x00\xff", '{"$binary":{"base64":"AP8=","subType":"00"}}'),
        (Binary(uuid.UUID(int=1).bytes, 4), '{"$binary":{"base64":"AAAAAAAAAAAAAAAAAAAAAQ==","subType":"04"}}'),
        (Regex("^a", "im"), '{"$regularExpression":{"pattern":"^a","options":"im"}}'),
        (Code("f()"), '{"$code":"f()"}'),
        (Code("f()", {"x": Int64(2**60)}), '{"$code":"f()","$scope":{"x":{"$numberLong":"1152921504606846976"}}}'),
        (Timestamp(5, 6), '{"$timestamp":{"t":5,"i":6}}'),
        (MinKey(), '{"$minKey":1}'),
        (MaxKey(), '{"$maxKey":1}'),
        (DBRef("orders", 7), '{"$ref":"orders","$id":7}'),
        ({"a": [1, {"b": float("inf")}]}, '{"a":[1,{"b":{"$numberDouble":"Infinity"}}]}'),
        ([Int64(2**62), OID], '[{"$numberLong":"4611686018427387904"},{"$oid":"6553f1000000000000000001"}]'),
    ],
)
def test_a_value_keeps_its_type_and_its_digits(value: Any, text: str) -> None:
    """Every type of BSON, as documented."""
    assert as_json(stored(value)) == text
    json.loads(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (OID, "6553f1000000000000000001"),
        ("6553f1000000000000000001", '"6553f1000000000000000001"'),
        ("abc", "abc"),
        ("a b: c", "a b: c"),
        ("", '""'),
        ("1", '"1"'),
        ("-", '"-"'),
        ("null", '"null"'),
        ('"x"', '"\\"x\\""'),
        ("{", '"{"'),
        (1, "1"),
        (1.5, "1.5"),
        (True, "true"),
        (None, "null"),
        (Int64(2**60), "1152921504606846976"),
        (1e300, "1e+300"),
        (Decimal128("1.5"), '{"$numberDecimal":"1.5"}'),
        (Decimal128("Infinity"), '{"$numberDecimal":"Infinity"}'),
        ({"b": 1, "a": "x"}, '{"b":1,"a":"x"}'),
    ],
)
def test_a_key_is_the_id_as_text_that_no_other_id_has(value: Any, text: str) -> None:
    """Texts that look like another type's key are quoted."""
    assert key_text(stored(value)) == text


@pytest.mark.parametrize("value", [1, Int64(1), 1.0, Decimal128("1"), Decimal128("1.00")])
def test_numbers_that_are_one_id_to_the_server_are_one_key(value: Any) -> None:
    """MongoDB compares numbers across types: 1 and 1.0 cannot both be an `_id`."""
    assert key_text(stored(value)) == "1"
