"""How a Postgres value becomes JSON (docs/tables.md has the table). Pure.

A value comes as the text that its type's output function writes. A whole column is turned at once: most types need no
look at a single value. Arrays and composites are parsed value by value.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Mask = npt.NDArray[np.bool_]

SAFE_INTEGER_MAX = 2**53 - 1  # beyond it, a reader that takes numbers for doubles loses digits
HASHED = "sha256:"
_DATE = 10  # characters
_SAFE_DIGITS = 16  # fewer characters cannot be beyond it
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
_BLANK = 32  # the first byte that is no control character
_ESCAPED_CONTROLS = tuple(ord(plain) for plain, _ in _ESCAPES if ord(plain) < _BLANK)
_BOUNDS = re.compile(r"(\[[-+]?\d+:[-+]?\d+\])+=")


class Form(Enum):
    """The ways in which a value is written."""

    INTEGER = auto()  # as it is
    BIGINT = auto()  # a number, or a string when it is too large for one
    FLOAT = auto()  # a number, or a string when it is none: NaN, Infinity
    BOOLEAN = auto()
    TEXT = auto()  # a string
    TIMESTAMP = auto()  # a string, as ISO 8601 has it
    JSON = auto()  # as it is
    ARRAY = auto()
    COMPOSITE = auto()


_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
# Arrays, by the form of their elements: which cannot be written by replacing, and what is replaced in the others.
_COMMON = (("{", "["), ("}", "]"), (",", ", "))
# Without any of these they may be flat lists; elements without quotes have neither braces nor delimiters.
_NOT_FLAT = {Form.INTEGER: (b"NULL",), Form.FLOAT: (b"NULL", b"a", b"I"), Form.TEXT: (b"NULL", b'"', b"\\")}
_UNLIKE_JSON = {
    Form.INTEGER: "^[^{]|[^}]$",
    Form.BIGINT: r"^[^{]|[^}]$|\d{16}",
    Form.FLOAT: "^[^{]|[^}]$|a|I",
    Form.BOOLEAN: "^[^{]|[^}]$",
    Form.TEXT: r'^[^{]|[^}]$|["\\\x00-\x1f]',
}
_AS_JSON = {
    Form.INTEGER: _COMMON,
    Form.BIGINT: _COMMON,
    Form.FLOAT: _COMMON,
    Form.BOOLEAN: (*_COMMON, ("t", "true"), ("f", "false")),
    Form.TEXT: _COMMON,
}
# What stands in quotes; a brace or the delimiter; anything else.
_TOKENS = {
    mark: re.compile(rf'"((?:[^"\\]|\\.)*)"|([{{}}{mark}])|((?:[^"\\{{}}{mark}]|\\.)+)', re.DOTALL) for mark in ",;"
}
_INTEGER = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")
_UNESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True)
class ValueType:
    name: str  # as SQL writes it
    form: Form = Form.TEXT
    element: ValueType | None = None  # of an array
    delimiter: str = ","
    fields: tuple[tuple[str, ValueType], ...] = ()  # of a composite


# By the types' numbers, which never change. Others are strings, unless the catalog says that they are made of these;
# numeric (1700) is one on purpose: readers of JSON would round it.
BUILT_IN = {
    16: Form.BOOLEAN,
    20: Form.BIGINT,
    21: Form.INTEGER,  # smallint
    23: Form.INTEGER,
    700: Form.FLOAT,  # real
    701: Form.FLOAT,  # double precision
    114: Form.JSON,
    3802: Form.JSON,  # jsonb
    1114: Form.TIMESTAMP,
    1184: Form.TIMESTAMP,  # with a zone
}


@dataclass(frozen=True)
class Column:
    """One column of many rows: its values as text, null where there is none, and which of them JSON quotes.

    `around`: what stands before and after each of them besides, where there is a value in every row.
    """

    inner: pa.Array
    quoted: Mask | bool = field(default=True)
    around: tuple[str, str] = ("", "")

    @property
    def text(self) -> pa.Array:
        before, after = self.around
        return pc.binary_join_element_wise(before, self.inner, after, "") if before or after else self.inner

    def json(self) -> pa.Array:
        """As JSON; `null` where there is no value."""
        before, inner, after = self.json_between()
        return pc.binary_join_element_wise(before, inner, after, "") if before or after else inner

    def json_between(self) -> tuple[str, pa.Array, str]:
        """As JSON between two texts: what stands around every value is written where they are joined."""
        before, after = self.around
        if self.quoted is True and not self.inner.null_count:
            return '"' + before, escaped(self.inner), after + '"'
        if self.quoted is False or (self.quoted is not True and not self.quoted.any()):
            return before, _null_written(self.inner), after
        string = pc.binary_join_element_wise('"', escaped(self.text), '"', "")
        if self.quoted is not True:
            string = pc.if_else(pa.array(self.quoted), string, self.text)
        return "", _null_written(string), ""

    def hashed(self) -> Column:
        """Every value as the hash of its text."""
        return Column(pa.array([None if v is None else hashed(v) for v in self.text.to_pylist()], pa.string()))


def hashed(text: str) -> str:
    return HASHED + hashlib.sha256(text.encode()).hexdigest()


def column(text: pa.Array, kind: ValueType) -> Column:
    """A column of text, as the type's output function wrote it."""
    form = kind.form
    if form is Form.INTEGER:
        return Column(text, quoted=False)
    if form is Form.BIGINT:
        return Column(text, quoted=_too_large(text))
    if form is Form.FLOAT:
        every = _bytes_of(text).tobytes()
        if b"N" not in every and b"I" not in every:
            return Column(text, quoted=False)
        return Column(text, quoted=_mask(pc.is_in(text, value_set=pa.array(_NO_NUMBERS))))
    if form is Form.BOOLEAN:
        return Column(pc.if_else(pc.equal(text, "t"), "true", "false"), quoted=False)
    if form is Form.TIMESTAMP:
        return _timestamps(text)
    if form is Form.JSON:
        # A line break can only stand between two tokens: it may be a blank, and the whole stays one line.
        if (data := _bytes_of(text)).size and data.min() < _BLANK:
            text = pc.replace_substring(pc.replace_substring(text, "\n", " "), "\r", " ")
        return Column(text, quoted=False)
    if form is Form.ARRAY and kind.element is not None:
        return _flat_arrays(text, kind.element.form, kind.delimiter) or Column(_arrays(text, kind), quoted=False)
    if form is Form.COMPOSITE:
        return Column(_one_by_one(text, kind), quoted=False)
    return Column(text)


def _timestamps(text: pa.Array) -> Column:
    """`2024-01-02 03:04:05+00 BC`: the first blank, and the zone, which is always UTC's."""
    ends = _ends_of(text)
    data = _bytes_of(text)
    plain = text.null_count == 0 and len(text) and int(np.diff(ends).min()) > _DATE
    blanks = ends[:-1] - ends[0] + _DATE
    if not plain or not bool((data[blanks] == _BLANK).all()):
        text = pc.replace_substring(text, " ", "T", max_replacements=1)
        return Column(pc.replace_substring(text, "+00", "+00:00", max_replacements=1))
    # Years of four digits, and no `infinity`: the blank stands in the same place everywhere.
    data = data.copy()
    data[blanks] = ord("T")
    text = pa.Array.from_buffers(pa.string(), len(text), [None, pa.py_buffer(ends - ends[0]), pa.py_buffer(data)])
    if not (data == ord("+")).any():  # of a type without a zone
        return Column(text)
    if pc.all(pc.ends_with(text, "+00")).as_py():
        return Column(text, around=("", ":00"))
    return Column(pc.replace_substring(text, "+00", "+00:00", max_replacements=1))


def _one_by_one(text: pa.Array, kind: ValueType) -> pa.Array:
    return pa.array([None if value is None else as_json(value, kind) for value in text.to_pylist()], pa.string())


def _flat_arrays(text: pa.Array, element: Form, delimiter: str) -> Column | None:
    """Where it is seen at once, in the bytes of all of them, that they are lists of plain elements: `{1,2}`."""
    odd = _NOT_FLAT.get(element)
    data, ends = _bytes_of(text), _ends_of(text)
    if odd is None or delimiter != "," or text.null_count or not len(data):
        return None
    first, last, written = data[ends[:-1] - ends[0]], data[ends[1:] - ends[0] - 1], data.tobytes()
    if (
        int(np.diff(ends).min()) <= len("{}")
        or not ((first == ord("{")) & (last == ord("}"))).all()
        or not written.count(b"{") == written.count(b"}") == len(text)
        or int(data.min()) < _BLANK
        or any(part in written for part in odd)
    ):
        return None
    ends = ends - ends[0] - len("{}") * np.arange(len(ends), dtype=np.int32)
    inner = pa.py_buffer(written.translate(None, b"{}"))
    elements = pa.Array.from_buffers(pa.string(), len(text), [None, pa.py_buffer(ends), inner])
    if element is Form.TEXT:
        return Column(pc.replace_substring(elements, ",", '", "'), quoted=False, around=('["', '"]'))
    return Column(pc.replace_substring(elements, ",", ", "), quoted=False, around=("[", "]"))


def _arrays(text: pa.Array, kind: ValueType) -> pa.Array:
    """Most arrays have neither quotes nor bounds: replacing a few characters in all of them makes them JSON."""
    element = kind.element.form if kind.element is not None else Form.TEXT
    unlike = _UNLIKE_JSON.get(element)
    if unlike is None or kind.delimiter != ",":
        return _one_by_one(text, kind)
    slow = _mask(pc.match_substring_regex(text, unlike))
    if slow.all():
        return _one_by_one(text, kind)
    data = _bytes_of(text).tobytes()
    made = text
    if element is Form.TEXT:
        made = pc.replace_substring_regex(made, r"([^{},]+)", r'"\1"')
    for plain, written in _AS_JSON[element]:
        made = pc.replace_substring(made, plain, written)
    if b"NULL" in data:
        made = pc.replace_substring(made, *(('"NULL"', "null") if element is Form.TEXT else ("NULL", "null")))
    if slow.any():
        rest = _one_by_one(text.filter(pa.array(slow)), kind)
        made = pc.replace_with_mask(made, pa.array(slow), rest)
    return made


def as_json(text: str, kind: ValueType) -> str:
    """One value; the same as `column` gives for it. What stands in an array or composite may be of another type than
    the catalog told: ValueError then, and what it stands in is given as its text."""
    form = kind.form
    if form is Form.ARRAY and kind.element is not None:
        try:
            return _array(text, kind.element, kind.delimiter)
        except (ValueError, KeyError):
            return json.dumps(text, ensure_ascii=False)  # no array after all: a type of an extension's own
    if form is Form.COMPOSITE:
        try:
            return _composite(text, kind)
        except ValueError:
            return json.dumps(text, ensure_ascii=False)  # the type was altered: not the fields that the catalog told
    if not _is_of(text, form):
        raise ValueError(f"not of type {kind.name}")
    if form is Form.INTEGER or (form is Form.BIGINT and abs(int(text)) <= SAFE_INTEGER_MAX):
        return text
    if form is Form.FLOAT and text not in _NO_NUMBERS:
        return text
    if form is Form.BOOLEAN:
        return "true" if text == "t" else "false"
    if form is Form.TIMESTAMP:
        text = text.replace(" ", "T", 1).replace("+00", "+00:00", 1)
    if form is Form.JSON:
        return text.replace("\n", " ").replace("\r", " ")
    return json.dumps(text, ensure_ascii=False)


def _is_of(text: str, form: Form) -> bool:
    """Whether JSON can have it as the form says: a composite's fields may have been altered since we asked."""
    if form in (Form.INTEGER, Form.BIGINT):
        return _INTEGER.fullmatch(text) is not None
    if form is Form.FLOAT:
        return text in _NO_NUMBERS or _FLOAT.fullmatch(text) is not None
    if form is Form.BOOLEAN:
        return text in ("t", "f")
    if form is Form.JSON:
        try:
            # Numbers stay text: Python refuses to read very long ones.
            json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _composite(text: str, kind: ValueType) -> str:
    """By the names of its fields; there must be as many as the type has, or a value would have another one's name."""
    pairs = zip(kind.fields, _fields(text), strict=True)
    inner = (
        f"{json.dumps(name, ensure_ascii=False)}: {'null' if value is None else as_json(value, of)}"
        for (name, of), value in pairs
    )
    return "{" + ", ".join(inner) + "}"


def _array(text: str, element: ValueType, delimiter: str) -> str:
    """`{1,NULL,"a b"}`, nested; bounds that do not begin at 1 (`[0:1]={1,2}`) are left out."""
    bounds = _BOUNDS.match(text)
    at = bounds.end() if bounds else 0
    out: list[str] = []
    depth = 0
    for token in _TOKENS[delimiter].finditer(text, at):
        if token.start() != at or (at and depth == 0 and out):
            break
        at = token.end()
        quoted, mark, plain = token.groups()
        if mark is None:
            value = _UNESCAPED.sub(r"\1", plain if quoted is None else quoted)
            out.append("null" if plain == "NULL" else as_json(value, element))
        elif mark == delimiter:
            out.append(", ")
        else:
            depth += 1 if mark == "{" else -1
            out.append("[" if mark == "{" else "]")
    if depth or at != len(text) or not out:
        raise ValueError(f"not an array: {text[:50]}")
    return "".join(out)


def _fields(text: str) -> list[str | None]:
    """`(1,"a b",)`: a field without anything is null."""
    if len(text) < 2 or text[0] != "(" or text[-1] != ")":
        raise ValueError(f"not a composite: {text[:50]}")
    values: list[str | None] = []
    token: list[str] = []
    present = False
    at, last = 1, len(text) - 1
    while at < last:
        char = text[at]
        if char == ",":
            values.append("".join(token) if present else None)
            token, present = [], False
        elif char == '"':
            present = True
            at, part = _quoted(text, at + 1)
            token.append(part)
            while text[at : at + 1] == '"':  # doubled: one quote in the value
                token.append('"')
                at, part = _quoted(text, at + 1)
                token.append(part)
            continue
        else:
            present = True
            at += char == "\\"
            token.append(text[at : at + 1])
        at += 1
    values.append("".join(token) if present else None)
    return values


def _quoted(text: str, at: int) -> tuple[int, str]:
    """What stands in quotes, from behind the first one; and where the text goes on behind the second."""
    parts: list[str] = []
    while at < len(text):
        char = text[at]
        if char == '"':
            return at + 1, "".join(parts)
        at += char == "\\"
        parts.append(text[at : at + 1])
        at += 1
    raise ValueError("a quote is not closed")


def escaped(text: pa.Array) -> pa.Array:
    """What stands between the quotes of a JSON string."""
    data = _bytes_of(text)
    if not len(data):
        return text
    controls = np.unique(data[data < _BLANK]).tolist() if data.min() < _BLANK else []
    if not set(controls).issubset(_ESCAPED_CONTROLS):
        values = [None if v is None else json.dumps(v, ensure_ascii=False)[1:-1] for v in text.to_pylist()]
        return pa.array(values, pa.string())
    everything = data.tobytes()
    for plain, written in _ESCAPES:
        if plain.encode() in everything:
            text = pc.replace_substring(text, plain, written)
    return text


def objects(names: list[str], columns: list[Column], rows: int, *, colon: str = ":", comma: str = ",") -> pa.Array:
    """JSON objects, one for each row."""
    if not names:
        return pa.array(["{}"] * rows, pa.string())
    parts: list[object] = []
    before = "{"
    for name, column in zip(names, columns, strict=True):
        opening, values, closing = column.json_between()
        parts += [before + json.dumps(name, ensure_ascii=False) + colon + opening, values]
        before = closing + comma
    return pc.binary_join_element_wise(*parts, before.removesuffix(comma) + "}", "")


def _too_large(text: pa.Array) -> Mask:
    long = _mask(pc.greater_equal(pc.binary_length(text), _SAFE_DIGITS))
    for row in np.flatnonzero(long).tolist():
        long[row] = abs(int(text[row].as_py())) > SAFE_INTEGER_MAX
    return long


def _null_written(text: pa.Array) -> pa.Array:
    return text.fill_null("null") if text.null_count else text


def _mask(values: pa.Array) -> Mask:
    found: Mask = values.fill_null(False).to_numpy(zero_copy_only=False).copy()
    return found


def _bytes_of(text: pa.Array) -> npt.NDArray[np.uint8]:
    """The bytes of all values, in a row."""
    data = text.buffers()[2]
    if data is None or not len(text):
        return np.zeros(0, np.uint8)
    ends = _ends_of(text)
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _ends_of(text: pa.Array) -> npt.NDArray[np.int32]:
    """Where each value ends, and before them where the first begins."""
    ends = text.buffers()[1]
    if ends is None or not len(text):
        return np.zeros(1, np.int32)
    return np.frombuffer(ends, np.int32)[text.offset : text.offset + len(text) + 1]
