"""BSON as JSON: relaxed Extended JSON, version 2 (docs/mongo.md lists the types).

Numbers that JSON readers would round keep their digits as text: 64-bit integers beyond 2⁵³ are `{"$numberLong": "…"}`,
decimals `{"$numberDecimal": "…"}`, NaN and the infinities `{"$numberDouble": "…"}`.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import bson
from bson import Binary, Code, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion, TypeDecoder, TypeRegistry
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.raw_bson import RawBSONDocument

UNDECODED = (BSONError, TypeError, UnicodeError, RecursionError)
_TOKEN_FIRST = b"\x03_id\x00"
_SAFE = 2**53
_INT64 = 2**63
_DATE_MS_MAX = 253_402_300_799_999  # the end of the year 9999
_REGEX_OPTIONS = ((re.IGNORECASE, "i"), (re.LOCALE, "l"), (re.MULTILINE, "m"), (re.DOTALL, "s"), (re.UNICODE, "u"),
                  (re.VERBOSE, "x"))  # fmt: skip
# Texts that could be taken for another type's key: texts that begin as JSON does, and texts that look like an ObjectId.
_AMBIGUOUS = re.compile(r'(?:["\[{0-9-].*|true|false|null|[0-9a-f]{24}|)', re.DOTALL)


class _LongDecoder(TypeDecoder):
    bson_type = Int64

    def transform_bson(self, value: Any) -> Any:
        return int(value) if -_SAFE < value < _SAFE else {"$numberLong": str(int(value))}


class _CodeDecoder(TypeDecoder):
    """To Python, code is a text, and JSON would show it as one."""

    bson_type = Code

    def transform_bson(self, value: Any) -> Any:
        scope = value.scope
        return {"$code": str(value)} if scope is None else {"$code": str(value), "$scope": scope}


OPTIONS: CodecOptions[dict[str, Any]] = CodecOptions(
    document_class=dict,
    datetime_conversion=DatetimeConversion.DATETIME_MS,  # BSON knows years that Python does not
    type_registry=TypeRegistry([_LongDecoder(), _CodeDecoder()]),
)


def decoded(raw: bytes) -> dict[str, Any]:
    """Raises `bson.errors.InvalidBSON` for what is none."""
    return bson.decode(raw, OPTIONS)


class Document(RawBSONDocument):
    """A document as it was sent. Most events are decoded once, by `decoded`, when they are first looked at. Any other
    document, and an event that cannot be decoded, shows its own fields, with the documents in them undecoded."""

    @property
    def sent(self) -> bytes:
        return bytes(self.raw)

    @staticmethod
    def _inflate_bson(bson_bytes: bytes | memoryview, codec_options: CodecOptions[Any]) -> Mapping[str, Any]:
        if bson_bytes[4:9] == _TOKEN_FIRST:  # no answer of the server begins so, which has events in it
            try:
                return decoded(bytes(bson_bytes))
            except UNDECODED:
                pass
        return RawBSONDocument._inflate_bson(bson_bytes, codec_options)  # noqa: SLF001 - there is no other way to it


def as_json(value: Any) -> str:
    """A value that `decoded` gave, as JSON text."""
    try:
        return _encoded(value)
    except ValueError:  # a number that JSON does not have
        return _encoded(_without_odd_floats(value))


def key_text(value: Any) -> str:
    """A document's `_id`, as text that no other `_id` has.

    Numbers that are equal to MongoDB have one text, whatever their type: a document that was inserted with `1` and
    again with `1.0` has one key.
    """
    if type(value) is int or isinstance(value, ObjectId):
        return str(value)
    if isinstance(value, str):
        return as_json(value) if _AMBIGUOUS.fullmatch(value) else value
    if isinstance(value, bool):
        return as_json(value)
    if isinstance(value, Decimal128):
        number = value.to_decimal()
        whole = number.is_finite() and number == number.to_integral_value() and abs(number) < _INT64
        return str(int(number)) if whole else as_json(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _INT64:
        return str(int(value))
    if isinstance(value, dict) and list(value) == ["$numberLong"]:
        return str(value["$numberLong"])
    return as_json(value)


def _shown(value: Any) -> Any:
    """What JSON has no form for, in Extended JSON."""
    shown: Any
    if isinstance(value, ObjectId):
        shown = {"$oid": str(value)}
    elif isinstance(value, DatetimeMS):
        shown = {"$date": _date(int(value))}
    elif isinstance(value, Decimal128):
        shown = {"$numberDecimal": str(value)}
    elif isinstance(value, bytes):
        kind = value.subtype if isinstance(value, Binary) else 0
        shown = {"$binary": {"base64": base64.b64encode(value).decode(), "subType": f"{kind:02x}"}}
    elif isinstance(value, Timestamp):
        shown = {"$timestamp": {"t": value.time, "i": value.inc}}
    elif isinstance(value, Regex):
        options = "".join(letter for flag, letter in _REGEX_OPTIONS if value.flags & flag)
        pattern = value.pattern.decode() if isinstance(value.pattern, bytes) else value.pattern
        shown = {"$regularExpression": {"pattern": pattern, "options": options}}
    elif isinstance(value, DBRef):
        shown = dict(value.as_doc())
    elif isinstance(value, MinKey):
        shown = {"$minKey": 1}
    elif isinstance(value, MaxKey):
        shown = {"$maxKey": 1}
    else:
        raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")
    return shown


def _date(ms: int) -> Any:
    if not 0 <= ms <= _DATE_MS_MAX:
        return {"$numberLong": str(ms)}
    text = datetime.fromtimestamp(ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{ms % 1000:03d}Z" if ms % 1000 else f"{text}Z"


def _without_odd_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$numberDouble": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {name: _without_odd_floats(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_odd_floats(each) for each in value]
    if isinstance(value, DBRef):
        return _without_odd_floats(dict(value.as_doc()))
    return value


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_shown)
_make_encoder = getattr(json.encoder, "c_make_encoder", None)
# Made once: `encode` makes the encoder behind it anew for every document, which takes as long as a small one.
_WRITE = (
    _make_encoder(None, _shown, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    if _make_encoder is not None
    else None
)


def _encoded(value: Any) -> str:
    if _WRITE is None or isinstance(value, str):
        return _ENCODER.encode(value)
    return "".join(_WRITE(value, 0))
