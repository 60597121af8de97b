"""From a vetted tree to steps over the columns of a batch: the same meaning as the SQL of `compile.py`, without Spark.

Only parts whose steps give exactly what Spark gives are written here; a predicate with any other part has no steps, and
Spark matches it. This module mirrors `compile.py` part by part, and `tests/spark/delivery/test_exact_steps.py` holds
the two together. Steps are plain values; `vectors.py` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from sqlglot import exp

from evermark.predicate.fragment import Path
from evermark.predicate.kinds import (
    COLUMNS,
    ORDERED,
    SIGNS,
    branches_of,
    cast_form,
    choices,
    column_of,
    is_approximate,
    is_whole,
    kind_of,
    natural_form,
    number_form,
    path_of,
    shared_kind,
)
from evermark.predicate.pattern import like_pieces
from evermark.predicate.values import (
    EXACT_INTEGER_DIGITS,
    EXACT_SCALE,
    FORM_OF,
    Form,
    Kind,
    Number,
    boolean_value,
    moment_of,
    number_value,
    string_value,
    time_value,
    unparen,
)

_EXACT_UNIT = Decimal(1).scaleb(-EXACT_SCALE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Paths are read as these forms alone: what Spark makes of a time or a whole number in a text is its own affair.
_READ = (Form.STRING, Form.DOUBLE, Form.EXACT, Form.BOOLEAN)


class NoExactStepsError(Exception):
    """A part of a predicate means something that steps do not give exactly."""


@dataclass(frozen=True)
class Step:
    """What is done with the results of other steps."""

    does: str
    inputs: tuple[Step, ...] = ()
    given: Any = None  # a literal's form and value, a path, the name of a column: what `does` needs beside its inputs


def steps_of(node: exp.Expr) -> Step | None:
    """The steps of a condition, or None where they would not be exact."""
    try:
        return _step(node, Form.BOOLEAN)
    except NoExactStepsError:
        return None


def every(steps: list[Step]) -> Step:
    return steps[0] if len(steps) == 1 else Step("and", tuple(steps))


def _step(node: exp.Expr, form: Form) -> Step:
    """The node as a step that results in `form`."""
    node = unparen(node)
    if isinstance(node, exp.Null):
        return Step("null", given=form)
    if (path := path_of(node, form)) is not None:
        return _path(path, form)
    text = string_value(node)
    moment = text if text is not None else time_value(node)
    if moment is not None and form in (Form.TIMESTAMP, Form.DATE):
        return _moment(moment, form)
    if text is not None:
        return _literal(Form.STRING, text)
    if (literal := number_value(node)) is not None:
        return _number(literal, form)
    if (column := column_of(node)) is not None:
        return _converted(Step("column", given=column), COLUMNS[column], form)
    if type(node) in _PLAIN:
        does, operand_form = _PLAIN[type(node)]
        sides = [side for side in (node.this, node.expression) if side is not None]
        return _converted(Step(does, tuple(_step(side, operand_form) for side in sides)), FORM_OF[form.kind], form)
    if maker := _MAKERS.get(type(node)):
        return maker(node, form)
    raise NoExactStepsError


def _path(path: Path, form: Form) -> Step:
    if form not in _READ:
        raise NoExactStepsError
    return Step("path", given=path)


def _literal(form: Form, value: object) -> Step:
    # With its form: 1, 1.0 and true are equal for Python, and equal steps are taken once.
    return Step("literal", given=(form, value))


def _moment(text: str, form: Form) -> Step:
    if form is Form.DATE:
        raise NoExactStepsError
    return _literal(form, (moment_of(text) - _EPOCH) // _EPOCH.resolution)


def _number(literal: Number, form: Form) -> Step:
    if form is Form.LONG:
        return _literal(form, int(literal.value))
    if form is Form.DOUBLE:
        return _literal(form, float(literal.value))
    value = Decimal(repr(float(literal.value))) if literal.approximate else literal.value
    if value.adjusted() >= EXACT_INTEGER_DIGITS:
        raise NoExactStepsError
    try:
        same = value.quantize(_EXACT_UNIT) == value
    except InvalidOperation:  # more digits than Python's own limit
        same = False
    if not same:
        raise NoExactStepsError
    return _literal(form, value)


def _converted(step: Step, have: Form, want: Form) -> Step:
    if have is want:
        return step
    if have is Form.LONG and want in (Form.DOUBLE, Form.EXACT):
        return Step("from_long", (step,), want)
    raise NoExactStepsError


_PLAIN: dict[type[exp.Expr], tuple[str, Form]] = {
    exp.Add: ("+", Form.DOUBLE),
    exp.Sub: ("-", Form.DOUBLE),
    exp.Mul: ("*", Form.DOUBLE),
    exp.Div: ("/", Form.DOUBLE),
    exp.Neg: ("negative", Form.DOUBLE),
    exp.Abs: ("abs", Form.DOUBLE),
    exp.Lower: ("lower", Form.STRING),
    exp.Upper: ("upper", Form.STRING),
    exp.Trim: ("trim", Form.STRING),
    exp.Not: ("not", Form.BOOLEAN),
}
_SEARCHES: dict[type[exp.Expr], str] = {
    exp.StartsWith: "startswith",
    exp.EndsWith: "endswith",
    exp.Contains: "contains",
}


def _of_coalesce(node: exp.Expr, form: Form) -> Step:
    return Step("coalesce", tuple(_step(value, form) for value in choices(node)))


def _of_nullif(node: exp.Expr, form: Form) -> Step:
    value = _step(node.this, form)
    return Step("case", (_compared("=", value, _step(node.expression, form)), Step("null", given=form), value))


def _of_case(node: exp.Expr, form: Form) -> Step:
    """Inputs: a condition and its result by turns, and what it results in when none holds."""
    branches, otherwise = branches_of(node)
    subject = node.this if isinstance(node, exp.Case) else None
    inputs: list[Step] = []
    for branch in branches:
        condition = _step(branch.this, Form.BOOLEAN) if subject is None else _relation(exp.EQ, subject, branch.this)
        inputs += [condition, _step(branch.args["true"], form)]
    return Step("case", (*inputs, _step(exp.Null() if otherwise is None else otherwise, form)))


def _of_cast(node: exp.Cast, form: Form) -> Step:
    target = cast_form(node)
    inner = unparen(node.this)
    kind = kind_of(inner)
    if target in (Form.LONG, Form.EXACT) or (kind is not None and natural_form(inner) is not target):
        raise NoExactStepsError
    return _converted(_step(inner, target), target, form)


def _of_substring(node: exp.Expr, form: Form) -> Step:
    start = node.args.get("start")
    first = -1 if start is None else _bound(start) - 1
    if first < 0:
        raise NoExactStepsError
    length = node.args.get("length")
    return Step("slice", (_step(node.this, form),), (first, None if length is None else first + _bound(length)))


def _bound(node: exp.Expr) -> int:
    literal = number_value(node)
    if literal is None or not literal.whole or not 0 <= literal.value < 2**31:
        raise NoExactStepsError
    return int(literal.value)


def _of_length(node: exp.Expr, form: Form) -> Step:
    return _converted(Step("length", (_step(node.this, Form.STRING),)), Form.LONG, form)


def _of_size(node: exp.Expr, form: Form) -> Step:
    return _converted(Step("size", given=_array(node, "variant")), Form.LONG, form)


def _of_all_or_any(node: exp.Expr, form: Form) -> Step:
    return Step("and" if isinstance(node, exp.And) else "or", tuple(_step(part, form) for part in node.flatten()))


def _of_is(node: exp.Expr, _: Form) -> Step:
    right = node.expression
    if isinstance(right, exp.Null):
        form = natural_form(node.this)
        # A text can be made of any value, so whether there is one says it all; the text itself may be hard to tell.
        path = path_of(node.this, form)
        return Step("absent", given=path) if path is not None else Step("is_null", (_step(node.this, form),))
    return Step("is_true" if boolean_value(right) else "is_false", (_step(node.this, Form.BOOLEAN),))


def _of_between(node: exp.Expr, _: Form) -> Step:
    low, high = node.args["low"], node.args["high"]
    return Step("and", (_relation(exp.GTE, node.this, low), _relation(exp.LTE, node.this, high)))


def _of_in(node: exp.Expr, _: Form) -> Step:
    values: list[exp.Expr] = node.expressions
    kind = shared_kind([node.this, *values]) or Kind.TEXT
    form: Form = FORM_OF[kind]
    if kind is Kind.NUMBER:
        if is_whole(node.this) and all(is_whole(value) for value in values):
            form = Form.LONG
        elif not all(is_approximate(value) for value in values):
            return Step("or", tuple(_relation(exp.EQ, node.this, value) for value in values))
        elif is_approximate(node.this):
            raise NoExactStepsError  # arithmetic makes -0.0, which Spark's IN may or may not take for 0.0
    literals = tuple(_step(value, form) for value in values)
    if form not in (Form.STRING, Form.DOUBLE, Form.LONG) or any(literal.does != "literal" for literal in literals):
        raise NoExactStepsError
    return Step("in", (_step(node.this, form),), tuple(literal.given[1] for literal in literals))


def _of_like(node: exp.Expr, _: Form) -> Step:
    pieces = like_pieces(str(string_value(node.expression)))
    if any(None in piece for piece in pieces):
        raise NoExactStepsError
    texts = ["".join(char for char in piece if char is not None) for piece in pieces]
    value = _step(node.this, Form.STRING)
    if isinstance(node, exp.ILike):
        value, texts = Step("lower", (value,)), [text.lower() for text in texts]
    if len(texts) == 1:
        found = _compared("=", value, _literal(Form.STRING, texts[0]))
    else:
        found = Step("like", (value,), tuple(texts))
    return Step("not", (found,)) if node.args.get("negate") else found


def _of_search(node: exp.Expr, _: Form) -> Step:
    wanted = string_value(node.expression)
    if wanted is None:
        raise NoExactStepsError
    return Step(_SEARCHES[type(node)], (_step(node.this, Form.STRING),), wanted)


def _of_array_contains(node: exp.Expr, _: Form) -> Step:
    literal = number_value(node.expression)
    form = natural_form(node.expression)
    if literal is not None:
        form = Form.DOUBLE if literal.approximate else Form.EXACT
    if form not in _READ:
        raise NoExactStepsError
    wanted = _step(node.expression, form)
    if wanted.does != "literal":
        raise NoExactStepsError
    return Step("array_contains", given=(_array(node, form), wanted.given))


def _array(node: exp.Expr, element: str) -> Path:
    path = path_of(node.this, f"array<{element}>")
    if path is None:
        raise NoExactStepsError
    return path


_MAKERS: dict[type[exp.Expr], Callable[[Any, Form], Step]] = {
    **dict.fromkeys(SIGNS, lambda node, _: _relation(type(node), node.this, node.expression)),
    **dict.fromkeys((exp.And, exp.Or), _of_all_or_any),
    **dict.fromkeys((exp.If, exp.Case), _of_case),
    **dict.fromkeys((exp.Cast, exp.TryCast), _of_cast),
    **dict.fromkeys((exp.Like, exp.ILike), _of_like),
    **dict.fromkeys(_SEARCHES, _of_search),
    exp.Boolean: lambda node, _: _literal(Form.BOOLEAN, bool(node.this)),
    exp.Coalesce: _of_coalesce,
    exp.Nullif: _of_nullif,
    exp.Substring: _of_substring,
    exp.Length: _of_length,
    exp.ArraySize: _of_size,
    exp.Is: _of_is,
    exp.In: _of_in,
    exp.Between: _of_between,
    exp.ArrayContains: _of_array_contains,
}


def _relation(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Step:
    """`left comparison right`, both read as the kind they share: see `compile.compared`."""
    kind = shared_kind([left, right])
    if kind is Kind.NUMBER:
        step = _numbers_compared(comparison, left, right)
    elif kind is None and comparison in ORDERED:
        texts = _plain(comparison, left, right, Form.STRING)
        step = Step("coalesce", (_exactly_compared(comparison, left, right), texts))
    else:
        step = _plain(comparison, left, right, FORM_OF[kind or Kind.TEXT])
    return Step("not", (step,)) if comparison is exp.NullSafeNEQ else step


def _plain(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr, form: Form) -> Step:
    if form is Form.BOOLEAN and comparison in ORDERED:
        raise NoExactStepsError
    return _compared(SIGNS[comparison], _step(left, form), _step(right, form))


def _compared(sign: str, left: Step, right: Step) -> Step:
    return Step("compare", (left, right), sign)


def _numbers_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Step:
    form = number_form(left, right)
    return _exactly_compared(comparison, left, right) if form is Form.EXACT else _plain(comparison, left, right, form)


def _exactly_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Step:
    doubles = _step(left, Form.DOUBLE), _step(right, Form.DOUBLE)
    decimals = _step(left, Form.EXACT), _step(right, Form.EXACT)
    sign = SIGNS[comparison]
    if comparison in ORDERED:
        default = _literal(Form.BOOLEAN, sign.endswith("="))
        digits = Step("coalesce", (_compared(sign, *decimals), default))
        return Step("or", (_compared(sign[0], *doubles), Step("and", (_compared("=", *doubles), digits))))
    digits = Step("coalesce", (_compared("=", *decimals), _literal(Form.BOOLEAN, True)))
    equal = Step("and", (_compared("<=>" if sign == "<=>" else "=", *doubles), digits))
    return Step("not", (equal,)) if comparison is exp.NEQ else equal
