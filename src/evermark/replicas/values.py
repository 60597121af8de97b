"""Tables as replicas see them, and values as texts that are the same in every database."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any

from evermark.errors import FormatError, SetupError
from evermark.replicas.event import Image

TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,50}", re.ASCII)
COLUMN = re.compile(r"[^\x00-\x1f\"\\?%{}]{1,63}")
COLUMNS_MAX = 500
VALUE_CHARS_MAX = 4 * 1024 * 1024
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1


class Kind(StrEnum):
    """What a column holds; peers agree on kinds, not on the types of their databases."""

    INTEGER = "integer"
    REAL = "real"  # a double
    BOOLEAN = "boolean"
    BYTES = "bytes"
    NUMERIC = "numeric"
    TEXT = "text"  # and all else, as its database writes it


OURS = "correct that row here, and sync again; other tables go on meanwhile"
_PEER = "the peer is damaged"
KEY_KINDS = (Kind.INTEGER, Kind.TEXT)


@dataclass(frozen=True)
class Table:
    """A table and the columns of it that are replicated: nothing else of a peer's is ever read or written."""

    name: str
    columns: Mapping[str, Kind]
    key: tuple[str, ...]

    def __post_init__(self) -> None:
        if not TABLE.fullmatch(self.name):
            raise SetupError(
                f"{self.name[:60]!r} cannot be replicated", hint="tables of letters, digits and _, 51 at most"
            )
        if not self.key:
            raise SetupError(f"{self.name}: the table has no primary key", hint="give it one: rows are known by it")
        if not set(self.key) <= set(self.columns):
            raise SetupError(f"{self.name}: columns of the primary key are left out", hint="replicate them as well")
        for column in self.key:
            if self.columns[column] not in KEY_KINDS:
                raise SetupError(
                    f"{self.name}.{column}: a key of kind {self.columns[column]} is not the same text everywhere",
                    hint="primary keys may be integers, texts and uuids",
                )
        if len(self.columns) > COLUMNS_MAX or not all(COLUMN.fullmatch(column) for column in self.columns):
            raise SetupError(
                f"{self.name}: too many columns, or odd names", hint=f'{COLUMNS_MAX} at most, none of "\\?%{{}} in them'
            )

    def as_json(self) -> dict[str, Any]:
        return {"columns": {name: str(kind) for name, kind in self.columns.items()}, "key": list(self.key)}

    @classmethod
    def from_json(cls, name: str, value: Any) -> Table:
        try:
            columns = {str(column): Kind(kind) for column, kind in value["columns"].items()}
            return cls(name, columns, tuple(map(str, value["key"])))
        except (KeyError, TypeError, ValueError, AttributeError):
            said = f"{name[:60]}: a table's form cannot be read"
            raise FormatError(said, hint="the peer is of another version") from None

    def record_id(self, image: Image) -> str:
        return record_id([str(image[column]) for column in self.key])

    def key_texts(self, record: str) -> list[str]:
        found = split_record_id(record) if len(self.key) > 1 else [record]
        if len(found) != len(self.key):
            raise FormatError(f"{self.name}: {record[:80]!r} is no key of the table", hint="the peer is damaged")
        return found

    def checked_record(self, record: str) -> str:
        """A record as a peer sent it; refused unless it is a key of this table."""
        for column, text in zip(self.key, self.key_texts(record), strict=True):
            if is_canonical(self.columns[column], text):
                continue
            if self.canonical_value(column, text, record, _PEER) != text:
                raise FormatError(f"{self.name}: {record[:80]!r} is no key of the table", hint=_PEER)
        return record

    def checked(self, image: Any, record: str, hint: str = _PEER) -> dict[str, str | None]:
        """An image as a peer sent it, in canonical form; refused unless it has just the columns of this table."""
        if not isinstance(image, dict) or image.keys() != self.columns.keys():
            said = f"{self.name}: an image of row {record[:80]!r} has other columns than the table"
            raise FormatError(said, hint="compare the tables")
        columns = self.columns
        made = {
            column: value
            if value is None or (type(value) is str and is_canonical(columns[column], value))
            else self.canonical_value(column, value, record, hint)
            for column, value in image.items()
        }
        if any(made[column] is None for column in self.key) or self.record_id(made) != record:
            raise FormatError(f"{self.name}: an image is of another row than {record[:80]!r}, its event's", hint=hint)
        return made

    def canonical_value(self, column: str, value: Any, record: str, hint: str) -> str | None:
        where = f"{self.name}.{column} of row {record[:80]!r}"
        if value is not None and not isinstance(value, str):
            raise FormatError(f"{where}: a value is no text", hint=hint)
        if value is not None and len(value) > VALUE_CHARS_MAX:
            raise FormatError(
                f"{where}: a value of {len(value)} characters is too long, {VALUE_CHARS_MAX} are the most "
                "(a byte takes two)",
                hint=hint,
            )
        try:
            return canonical(self.columns[column], value)
        except ValueError as error:
            raise FormatError(f"{where}: {error}", hint=hint) from None


def record_id(texts: Sequence[str]) -> str:
    """One column: its text. Several: joined with |, with \\ before every | and \\ in them."""
    if len(texts) == 1:
        return texts[0]
    return "|".join(text.replace("\\", "\\\\").replace("|", "\\|") for text in texts)


def split_record_id(record: str) -> list[str]:
    found, escaped = [""], False
    for char in record:
        if escaped:
            found[-1] += char
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "|":
            found.append("")
        else:
            found[-1] += char
    return found


def canonical(kind: Kind, text: str | None) -> str | None:
    """The one text of a value. `ValueError` when it is none of that kind."""
    return None if text is None else _CANONICAL[kind](text)


def is_canonical(kind: Kind, text: str) -> bool:
    """Whether this is at a glance the one text of a value; most are, and are spared the rest."""
    if kind is Kind.TEXT:
        return len(text) <= VALUE_CHARS_MAX and (text.isascii() or _is_utf8(text))
    if kind is Kind.INTEGER:
        return text.isascii() and text.isdigit() and len(text) < 19 and (text[0] != "0" or text == "0")
    return False


def _text(text: str) -> str:
    if not _is_utf8(text):
        raise ValueError("a text is not UTF-8")
    return text


def _is_utf8(text: str) -> bool:
    """JSON can write half of a character, which no database takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(text: str) -> str:
    number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text, re.ASCII) else None
    if number is None or not INTEGER_MIN <= number <= INTEGER_MAX:
        raise ValueError("a value is no integer of 64 bits")
    return str(number)


def _real(text: str) -> str:
    if len(text) > 400:
        raise ValueError("a value is no number")
    number = float(text)
    if math.isnan(number):
        raise ValueError("NaN cannot be kept in every database")
    return repr(number)


def _boolean(text: str) -> str:
    found = {"0": "false", "1": "true", "f": "false", "t": "true"}.get(text, text)
    if found not in ("true", "false"):
        raise ValueError("a value is neither true nor false")
    return found


def _bytes(text: str) -> str:
    return bytes.fromhex(text).hex()


def _numeric(text: str) -> str:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError("a value is no number") from None
    if not number.is_finite():
        raise ValueError("a number is not finite")
    if abs(number.adjusted()) > 1000:
        raise ValueError("a number is too large, or too small")
    if not number:
        return "0"
    written = format(number, "f")  # every digit: arithmetic, as `normalize` does it, would round to 28
    return written.rstrip("0").rstrip(".") if "." in written else written


_CANONICAL: Mapping[Kind, Callable[[str], str]] = {
    Kind.INTEGER: _integer,
    Kind.REAL: _real,
    Kind.BOOLEAN: _boolean,
    Kind.BYTES: _bytes,
    Kind.NUMERIC: _numeric,
    Kind.TEXT: _text,
}
