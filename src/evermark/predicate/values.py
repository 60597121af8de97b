"""The types of a predicate, and its literals."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from enum import StrEnum

from sqlglot import exp

from evermark.predicate.fragment import refused

# Doubles hold 15 decimal digits exactly, so a comparison with such a literal is right for every payload.
_DOUBLE_DIGITS = 15
EXACT_SCALE = 9
EXACT_INTEGER_DIGITS = 38 - EXACT_SCALE
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1


class Kind(StrEnum):
    """What a part of a predicate is about. A path has no kind of its own: it takes its neighbour's."""

    TEXT = "text"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    TIME = "a time"
    DATE = "a date"


class Form(StrEnum):
    """The Spark type a part is written in. Numbers have three: whole, approximate and exact."""

    STRING = "string"
    LONG = "bigint"
    DOUBLE = "double"
    EXACT = f"decimal(38,{EXACT_SCALE})"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    DATE = "date"

    @property
    def kind(self) -> Kind:
        return _KIND_OF[self]


_KIND_OF = {
    Form.STRING: Kind.TEXT,
    Form.LONG: Kind.NUMBER,
    Form.DOUBLE: Kind.NUMBER,
    Form.EXACT: Kind.NUMBER,
    Form.BOOLEAN: Kind.BOOLEAN,
    Form.TIMESTAMP: Kind.TIME,
    Form.DATE: Kind.DATE,
}
FORM_OF = {kind: form for form, kind in _KIND_OF.items() if form not in (Form.LONG, Form.EXACT)}


@dataclass(frozen=True)
class Number:
    """A numeric literal."""

    value: Decimal
    approximate: bool  # written with an exponent, or few enough digits that a double holds it

    @property
    def whole(self) -> bool:
        return self.value == self.value.to_integral_value() and LONG_MIN <= self.value <= LONG_MAX

    def sql(self, form: Form) -> str:
        if form is Form.LONG:
            if not self.whole:
                raise refused(f"{str(self.value)[:40]} is not a whole number here", "use a whole number")
            return f"{int(self.value)}L"
        double = f"{float(self.value)!r}D"
        if form is Form.EXACT:
            return f"try_cast({double} as {form})" if self.approximate else f"cast({self.value:f}BD as {form})"
        return double


def number(text: str, *, negative: bool) -> Number:
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise refused(f"{text[:40]!r} is not a number", "write it like 100, 99.5 or 1e6") from None
    if value and not -300 <= value.adjusted() <= 300:
        raise refused(f"the number {text[:40]} is out of range", "compare with something between 1e-300 and 1e300")
    # Decimal's own minus and normalize round to the context's precision.
    value = value.copy_negate() if negative else value
    if "e" in text.lower():
        return Number(value, approximate=True)
    whole, _, fraction = f"{value.copy_abs():f}".partition(".")
    whole_digits, scale = len(whole.lstrip("0")), len(fraction.rstrip("0"))
    if whole_digits + scale <= _DOUBLE_DIGITS:
        return Number(value, approximate=True)
    if whole_digits > EXACT_INTEGER_DIGITS or scale > EXACT_SCALE:
        raise refused(
            f"the number {text[:40]} has too many digits", "quote it to compare it as text, or use fewer digits"
        )
    return Number(value, approximate=False)


def moment_of(text: str) -> datetime:
    """The moment of a time or date literal; without an offset it is UTC, whatever the session says."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise refused(f"{text[:40]!r} is not a time", "write it like 2026-01-31 or 2026-01-31T12:00:00Z") from None


def time_sql(text: str, form: Form) -> str:
    """A time or date literal."""
    moment = moment_of(text)
    if form is Form.DATE:
        return f"date '{moment.date().isoformat()}'"
    return f"timestamp '{moment.replace(tzinfo=None).isoformat(sep=' ', timespec='microseconds')}+00:00'"


def unparen(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def string_value(node: exp.Expr) -> str | None:
    """The text of a string literal."""
    node = unparen(node)
    if isinstance(node, exp.RawString) or (isinstance(node, exp.Literal) and node.is_string):
        return str(node.this)
    return None


def number_value(node: exp.Expr) -> Number | None:
    """A numeric literal, with its signs and its suffix (5L is parsed as a cast)."""
    negative = False
    node = unparen(node)
    while isinstance(node, exp.Neg):
        negative = not negative
        node = unparen(node.this)
    if isinstance(node, exp.Cast) and node.to.this in (exp.DType.BIGINT, exp.DType.DOUBLE):
        node = unparen(node.this)
    if isinstance(node, exp.Literal) and not node.is_string:
        return number(str(node.this), negative=negative)
    return None


def boolean_value(node: exp.Expr) -> bool | None:
    node = unparen(node)
    return bool(node.this) if isinstance(node, exp.Boolean) else None


def time_value(node: exp.Expr) -> str | None:
    """The text of `timestamp '…'` or `date '…'`, which are parsed as casts of a string."""
    node = unparen(node)
    times = (exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ, exp.DType.DATE)
    return string_value(node.this) if isinstance(node, exp.Cast) and node.to.this in times else None
