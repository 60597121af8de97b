"""JSON as Spark reads it: a payload parsed once, a path followed, a value taken as text, number or boolean.

Spark parses into a variant (`try_parse_json`) and takes paths out of it (`try_variant_get`). Here is what that gives
wherever it is beyond doubt; anything else is `DOUBT`, and Spark is asked. Payloads that Spark may refuse (broken, with
a key twice, very deep) are in doubt as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from evermark.predicate.values import EXACT_INTEGER_DIGITS, EXACT_SCALE, LONG_MAX, LONG_MIN, Form


class _Doubt:
    """Said of a value that only Spark can tell."""

    def __repr__(self) -> str:
        return "DOUBT"


DOUBT: Final = _Doubt()
Steps = tuple[str | int, ...]

PAYLOAD_CHARS_MAX = 1024 * 1024
# Spark's parser refuses names of more than 50 000 characters, a depth and numbers of more than 1 000. Well below:
_NAME_CHARS_MAX = 10_000
_DEPTH_MAX = 200
_DIGITS_MAX = 300
_NUMBER_CHARS_MAX = 38
_EXACT_LIMIT = 10**EXACT_INTEGER_DIGITS
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
# Spark writes decimals without their last zeros, and small ones with an exponent.
_PLAIN_DECIMAL = re.compile(r"-?(?:0|[1-9][0-9]{0,17})\.[0-9]{0,5}[1-9]")
_NUMBER_TEXT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?")
_NUMBER_BEGINS = frozenset("0123456789+-.iInN")
_TRUE, _FALSE = frozenset(("t", "true", "y", "yes", "1")), frozenset(("f", "false", "n", "no", "0"))
_BOOLEAN_CHARS = re.compile(r"[!-~]+")


class Fraction(str):
    """A number with a point or an exponent, as it is written: its digits decide what Spark makes of it."""

    __slots__ = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _whole(text: str) -> int:
    return int(_of_bounded_length(text))


def _fraction(text: str) -> Fraction:
    return Fraction(_of_bounded_length(text))


def _of_bounded_length(text: str) -> str:
    if len(text) > _DIGITS_MAX:
        raise ValueError("a number that Spark's parser may refuse")
    return text


def _refuse(_: str) -> None:
    raise ValueError("not JSON")


_read = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_whole, parse_float=_fraction, parse_constant=_refuse
).decode


def document(text: str | None) -> Any:
    """The parsed payload; None is null, and so is no payload."""
    if text is None:
        return None
    if len(text) > PAYLOAD_CHARS_MAX:
        return DOUBT
    try:
        found = _read(text)
    except (ValueError, RecursionError):
        return DOUBT
    odd = len(text) > _NAME_CHARS_MAX or text.count("[") + text.count("{") > _DEPTH_MAX
    if (odd or _ESCAPED_HALF.search(text)) and not _is_plain(found):
        return DOUBT
    return found


def _is_plain(found: Any) -> bool:
    """Whether nothing in it is too deep, has too long a name, or holds half a character."""
    level = [found]
    for _ in range(_DEPTH_MAX):
        if not level:
            return True
        names = [name for value in level if isinstance(value, dict) for name in value]
        texts = [value for value in level if isinstance(value, str)]
        if any(len(name) > _NAME_CHARS_MAX for name in names) or any(map(_HALF_PAIR.search, [*names, *texts])):
            return False
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return False


def followed(found: Any, steps: Steps) -> Any:
    """The value at a path; None where there is none."""
    for step in steps:
        if isinstance(step, str):
            if type(found) is not dict:
                return found if found is DOUBT else None
            found = found.get(step)
        else:
            if type(found) is not list:
                return found if found is DOUBT else None
            found = found[step] if step < len(found) else None
    return found


_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[([0-9]+)\]|\['([^']*)'\]|\[\"([^\"]*)\"\]")


def path_steps(json_path: str) -> Steps:
    """The steps of a path that `fragment.json_path` wrote."""
    steps: list[str | int] = []
    at = 1
    while at < len(json_path):
        found = _STEP.match(json_path, at)
        if found is None:
            raise ValueError(f"not a path of ours: {json_path!r}")
        name, index, *quoted = found.groups()
        steps.append(int(index) if index is not None else next(text for text in (name, *quoted) if text is not None))
        at = found.end()
    return tuple(steps)


def read_as(form: str) -> Callable[[Any], Any]:
    """How a JSON value is read as a form: the value, None for null, or `DOUBT`."""
    readers, container = _READERS[form]

    def read(value: Any) -> Any:
        if value is None or value is DOUBT:
            return value
        reader = readers.get(type(value))
        return container if reader is None else reader(value)

    return read


def _long(value: int) -> bool:
    return LONG_MIN <= value <= LONG_MAX


def _decimal_of(text: str) -> Any:
    """The decimal(38,9) of a number without exponent."""
    whole, _, fraction = text.lstrip("+-").partition(".")
    if len(whole) > EXACT_INTEGER_DIGITS or len(fraction) > EXACT_SCALE or not (whole + fraction).isdecimal():
        return DOUBT
    return Decimal(text)


def _double_of(text: str, *, signed_zero: bool) -> Any:
    if len(text) > _NUMBER_CHARS_MAX:
        return DOUBT
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return DOUBT
    if value == 0 and "-" in text:
        return DOUBT if signed_zero else 0.0
    return value


def _text_as_double(text: str) -> Any:
    if not text or _is_no_number(text):
        return None
    return _double_of(text, signed_zero=True) if _NUMBER_TEXT.fullmatch(text) else DOUBT


def _text_as_exact(text: str) -> Any:
    if not text or _is_no_number(text):
        return None
    return _decimal_of(text) if _NUMBER_TEXT.fullmatch(text) and "e" not in text.lower() else DOUBT


def _is_no_number(text: str) -> bool:
    """Certainly; what is left may still be none."""
    return "!" <= text[0] <= "~" and text[0] not in _NUMBER_BEGINS


def _text_as_boolean(text: str) -> Any:
    if text and not _BOOLEAN_CHARS.fullmatch(text):
        return DOUBT
    word = text.lower()
    return True if word in _TRUE else False if word in _FALSE else None


def _fraction_as_boolean(text: str) -> Any:
    return DOUBT if "e" in text.lower() or len(text) > _NUMBER_CHARS_MAX else Decimal(text) != 0


def _fraction_as_double(text: str) -> Any:
    return _double_of(text, signed_zero="e" in text.lower())


_Readers = Mapping[type, Callable[[Any], Any]]
# By form: the reader of each type of JSON value, and what objects and arrays are.
_READERS: dict[str, tuple[_Readers, Any]] = {
    Form.STRING: (
        {
            str: lambda value: value,
            bool: lambda value: "true" if value else "false",
            int: lambda value: str(value) if _long(value) else DOUBT,
            Fraction: lambda value: str(value) if _PLAIN_DECIMAL.fullmatch(value) else DOUBT,
        },
        DOUBT,
    ),
    Form.DOUBLE: (
        {
            str: _text_as_double,
            bool: float,
            int: lambda value: float(value) if abs(value) < 10**_NUMBER_CHARS_MAX else DOUBT,
            Fraction: _fraction_as_double,
        },
        None,
    ),
    Form.EXACT: (
        {
            str: _text_as_exact,
            bool: Decimal,
            int: lambda value: Decimal(value) if abs(value) < _EXACT_LIMIT else DOUBT,
            Fraction: _decimal_of,
        },
        None,
    ),
    Form.BOOLEAN: (
        {
            str: _text_as_boolean,
            bool: lambda value: value,
            int: lambda value: value != 0 if _long(value) else DOUBT,
            Fraction: _fraction_as_boolean,
        },
        None,
    ),
}


def size_of(value: Any) -> Any:
    """The number of elements; null for anything but an array."""
    return len(value) if type(value) is list else value if value is DOUBT else None


def array_contains(value: Any, form: str, wanted: object) -> Any:
    """As in SQL: null for anything but an array, and when it is not found among elements of which some are null."""
    if type(value) is not list:
        return value if value is DOUBT else None
    read = read_as(form)
    found: Sequence[Any] = [read(element) for element in value]
    if any(element is DOUBT for element in found):
        return DOUBT
    return True if wanted in found else None if any(element is None for element in found) else False
