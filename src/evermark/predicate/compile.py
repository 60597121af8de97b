"""From a vetted tree to Spark SQL of our own making.

Every part is written with its type stated, so that Spark never adds a cast of its own, and with functions that give
null where ANSI mode would raise: no predicate can make a job fail. A JSON path takes the type of what it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlglot import exp

from evermark.predicate.fragment import Fragment, Path, chars_of, filled, joined, refused, sql, string_sql
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
from evermark.predicate.pattern import like_sql, rlike_sql
from evermark.predicate.values import (
    FORM_OF,
    Form,
    Kind,
    boolean_value,
    number_value,
    string_value,
    time_sql,
    time_value,
    unparen,
)

SQL_CHARS_MAX = 16 * 1024
CONCAT_PARTS_MAX = 8
ROUND_DIGITS_MAX = 18

# What is written, and the form of its operands. Doubles do not overflow, and what could divide by zero is tried:
# arithmetic cannot raise.
_TEMPLATES: dict[type[exp.Expr], tuple[str, Form]] = {
    exp.Add: ("({} + {})", Form.DOUBLE),
    exp.Sub: ("({} - {})", Form.DOUBLE),
    exp.Mul: ("({} * {})", Form.DOUBLE),
    exp.Div: ("try_divide({}, {})", Form.DOUBLE),
    exp.Mod: ("try_mod({}, {})", Form.DOUBLE),
    exp.Neg: ("(- {})", Form.DOUBLE),
    exp.Abs: ("abs({})", Form.DOUBLE),
    exp.Lower: ("lower({})", Form.STRING),
    exp.Upper: ("upper({})", Form.STRING),
    exp.Trim: ("trim({})", Form.STRING),
    exp.StartsWith: ("startswith({}, {})", Form.STRING),
    exp.EndsWith: ("endswith({}, {})", Form.STRING),
    exp.Contains: ("contains({}, {})", Form.STRING),
    exp.Not: ("(not {})", Form.BOOLEAN),
}


def emit(node: exp.Expr, form: Form) -> Fragment:
    """The node as Spark SQL of type `form`."""
    node = unparen(node)
    fragment = _emit(node, form)
    # Some parts are written out twice; nested, that would double again and again.
    if chars_of(fragment) > SQL_CHARS_MAX:
        raise refused("it grows too large", "simplify it: fewer nested choices and comparisons")
    return fragment


def _emit(node: exp.Expr, form: Form) -> Fragment:
    if isinstance(node, exp.Null):
        return sql(f"cast(null as {form})")
    if (path := path_of(node, form)) is not None:
        return (path,)
    kind = kind_of(node)
    text = string_value(node)
    moment = text if text is not None else time_value(node)
    if moment is not None and form in (Form.TIMESTAMP, Form.DATE):
        return sql(time_sql(moment, form))
    if kind is not None and kind is not form.kind:
        raise refused(f"{kind} stands where {form.kind} is needed", "compare like with like, or use cast")
    if text is not None:
        return sql(string_sql(text))
    if (literal := number_value(node)) is not None:
        return sql(literal.sql(form))
    if (column := column_of(node)) is not None:
        return _converted(sql(column), COLUMNS[column], form, cast=column in ("partition", "schema_version"))
    if type(node) in _TEMPLATES:
        template, operand_form = _TEMPLATES[type(node)]
        operands = [emit(side, operand_form) for side in (node.this, node.expression) if side is not None]
        return _converted(filled(template, *operands), FORM_OF[form.kind], form)
    if emitter := _EMITTERS.get(type(node)):
        return emitter(node, form)
    raise refused(f"{type(node).__name__.upper()} is not allowed", "use comparisons, AND, OR, NOT, IN, BETWEEN, LIKE")


def _converted(fragment: Fragment, have: Form, want: Form, *, cast: bool = False) -> Fragment:
    return fragment if have is want and not cast else filled(f"try_cast({{}} as {want})", fragment)


def _emit_coalesce(node: exp.Expr, form: Form) -> Fragment:
    return filled("coalesce({})", joined(", ", [emit(value, form) for value in choices(node)]))


def _emit_nullif(node: exp.Expr, form: Form) -> Fragment:
    # As Spark would, but with the repetition close to the limit.
    value, other = emit(node.this, form), emit(node.expression, form)
    return filled(f"(case when {{}} = {{}} then cast(null as {form}) else {{}} end)", value, other, value)


def _emit_case(node: exp.Expr, form: Form) -> Fragment:
    branches, otherwise = branches_of(node)
    subject = node.this if isinstance(node, exp.Case) else None
    pieces: list[str | Fragment] = ["(case"]
    for branch in branches:
        condition = emit(branch.this, Form.BOOLEAN) if subject is None else compared(exp.EQ, subject, branch.this)
        pieces += [" when ", condition, " then ", emit(branch.args["true"], form)]
    return sql(*pieces, " else ", emit(exp.Null() if otherwise is None else otherwise, form), " end)")


def _emit_cast(node: exp.Cast, form: Form) -> Fragment:
    target = cast_form(node)
    inner = unparen(node.this)
    kind = kind_of(inner)
    if kind in (Kind.TIME, Kind.DATE) and kind is not target.kind:
        raise refused("a cast of a time", "compare event_time with a time, as in event_time > '2026-01-31T00:00:00Z'")
    source = natural_form(inner) if kind is not None else target
    if kind is None and target is Form.LONG:
        # Through decimal, so that "99.50" becomes 99 rather than null, and 2^53 + 1 keeps its last digit.
        source = Form.EXACT
    fragment = _converted(emit(inner, source), source, target)
    if target is Form.EXACT:
        return filled(f"try_cast(try_cast({{}} as {_decimal_type(node)}) as {form})", fragment)
    return _converted(fragment, target, form)


def _decimal_type(node: exp.Cast) -> str:
    digits = [str(parameter.this.this) for parameter in node.to.expressions]
    if len(digits) > 2 or not all(text.isascii() and text.isdigit() and len(text) <= 2 for text in digits):
        raise refused("a decimal type that is not decimal(p,s)", "write it like decimal(20,2)")
    precision, scale = [*map(int, digits), *(10, 0)[len(digits) :]]
    if not (1 <= precision <= 38 and scale <= min(precision, 9) and precision - scale <= 29):
        raise refused(f"decimal({precision},{scale})", "use at most 9 digits after the point and 29 before it")
    return f"decimal({precision},{scale})"


def _emit_substring(node: exp.Expr, form: Form) -> Fragment:
    bounds = [emit(node.args[name], Form.LONG) for name in ("start", "length") if node.args.get(name) is not None]
    # Bounds beyond an int are null, and so is the result.
    ints = [filled("try_cast({} as int)", bound) for bound in bounds]
    return filled("substring({})", joined(", ", [emit(node.this, form), *ints]))


def _emit_concat(node: exp.Expr, form: Form) -> Fragment:
    parts = node.expressions if isinstance(node, exp.Concat) else list(node.flatten())
    if not 1 <= len(parts) <= CONCAT_PARTS_MAX or any(part.find(exp.Concat, exp.DPipe) for part in parts):
        raise refused("a large or nested concat", f"join at most {CONCAT_PARTS_MAX} parts, in one concat")
    return filled("concat({})", joined(", ", [emit(part, form) for part in parts]))


def _emit_size(node: exp.Expr, form: Form) -> Fragment:
    if isinstance(node, exp.Length):
        size = filled("length({})", emit(node.this, Form.STRING))
    else:
        size = filled("array_size({})", (_array(node, "variant"),))
    return _converted(size, Form.LONG, form, cast=True)


def _emit_round(node: exp.Expr, form: Form) -> Fragment:
    digits = number_value(node.args.get("decimals") or exp.Literal.number(0))
    if digits is None or not digits.whole or abs(digits.value) > ROUND_DIGITS_MAX:
        raise refused("round with an odd number of digits", f"use a literal from 0 to {ROUND_DIGITS_MAX}")
    rounded = filled(f"round({{}}, {int(digits.value)})", emit(node.this, Form.DOUBLE))
    return _converted(rounded, Form.DOUBLE, form)


def _emit_floor(node: exp.Expr, form: Form) -> Fragment:
    # floor(double) overflows its bigint; a double too large for this decimal is whole anyway.
    value = emit(node.this, Form.DOUBLE)
    floor = "floor" if isinstance(node, exp.Floor) else "ceil"
    rounded = filled(f"coalesce(cast({floor}(try_cast({{}} as decimal(38,18))) as double), {{}})", value, value)
    return _converted(rounded, Form.DOUBLE, form)


def _emit_all_or_any(node: exp.Expr, form: Form) -> Fragment:
    word = " and " if isinstance(node, exp.And) else " or "
    return filled("({})", joined(word, [emit(part, form) for part in node.flatten()]))


def _emit_compared(node: exp.Expr, _: Form) -> Fragment:
    return compared(type(node), node.this, node.expression)


def _emit_is(node: exp.Expr, _: Form) -> Fragment:
    right = node.expression
    if isinstance(right, exp.Null):
        return filled("({} is null)", emit(node.this, natural_form(node.this)))
    if (value := boolean_value(right)) is None:
        raise refused("IS with something else than NULL, TRUE or FALSE", "use =")
    return filled("({} is true)" if value else "({} is false)", emit(node.this, Form.BOOLEAN))


def _emit_between(node: exp.Expr, _: Form) -> Fragment:
    low, high = node.args["low"], node.args["high"]
    return filled("({} and {})", compared(exp.GTE, node.this, low), compared(exp.LTE, node.this, high))


def _emit_in(node: exp.Expr, _: Form) -> Fragment:
    values: list[exp.Expr] = node.expressions
    if not values or any(not _is_literal(value) for value in values):
        raise refused("IN with something else than literals", "use IN ('a', 'b'), or OR")
    kind = shared_kind([node.this, *values]) or Kind.TEXT
    form: Form = FORM_OF[kind]
    if kind is Kind.NUMBER:
        if is_whole(node.this) and all(is_whole(value) for value in values):
            form = Form.LONG
        elif not all(is_approximate(value) for value in values):
            return filled("({})", joined(" or ", [compared(exp.EQ, node.this, value) for value in values]))
    return filled("({} in ({}))", emit(node.this, form), joined(", ", [emit(value, form) for value in values]))


def _is_literal(node: exp.Expr) -> bool:
    values = (string_value(node), number_value(node), boolean_value(node), time_value(node))
    return any(value is not None for value in values)


def _emit_like(node: exp.Expr, _: Form) -> Fragment:
    pattern = string_value(node.expression)
    if pattern is None:
        raise refused("LIKE with something else than a literal pattern", "use contains(…), or a pattern in quotes")
    fragment = like_sql(emit(node.this, Form.STRING), pattern, fold=isinstance(node, exp.ILike))
    return filled("(not {})", fragment) if node.args.get("negate") else fragment


def _emit_rlike(node: exp.Expr, _: Form) -> Fragment:
    pattern = string_value(node.expression)
    if pattern is None:
        raise refused("RLIKE with something else than a literal pattern", "write the pattern in quotes")
    return rlike_sql(emit(node.this, Form.STRING), pattern)


def _emit_array_contains(node: exp.Expr, _: Form) -> Fragment:
    if not _is_literal(node.expression):
        raise refused("array_contains with something else than a literal", "use array_contains(data.list, 'value')")
    literal = number_value(node.expression)
    form = natural_form(node.expression)
    if literal is not None:
        form = Form.DOUBLE if literal.approximate else Form.EXACT
    return filled("array_contains({}, {})", (_array(node, form),), emit(node.expression, form))


def _array(node: exp.Expr, element: str) -> Path:
    path = path_of(node.this, f"array<{element}>")
    if path is None:
        raise refused("an array function over something else than a path", "use it as in size(data.items)")
    return path


_EMITTERS: dict[type[exp.Expr], Callable[[Any, Form], Fragment]] = {
    **dict.fromkeys(SIGNS, _emit_compared),
    **dict.fromkeys((exp.And, exp.Or), _emit_all_or_any),
    **dict.fromkeys((exp.If, exp.Case), _emit_case),
    **dict.fromkeys((exp.Cast, exp.TryCast), _emit_cast),
    **dict.fromkeys((exp.Concat, exp.DPipe), _emit_concat),
    **dict.fromkeys((exp.Length, exp.ArraySize), _emit_size),
    **dict.fromkeys((exp.Floor, exp.Ceil), _emit_floor),
    **dict.fromkeys((exp.Like, exp.ILike), _emit_like),
    exp.Coalesce: _emit_coalesce,
    exp.Nullif: _emit_nullif,
    exp.Substring: _emit_substring,
    exp.Round: _emit_round,
    exp.Boolean: lambda node, _: sql("true" if node.this else "false"),
    exp.Is: _emit_is,
    exp.In: _emit_in,
    exp.Between: _emit_between,
    exp.RegexpLike: _emit_rlike,
    exp.ArrayContains: _emit_array_contains,
}


def compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Fragment:
    """`left comparison right`, both read as the kind they share."""
    if any(isinstance(unparen(side), exp.Null) for side in (left, right)):
        raise refused("a comparison with NULL, which is never true", "use IS NULL or IS NOT NULL")
    kind = shared_kind([left, right])
    if kind is Kind.NUMBER:
        fragment = _numbers_compared(comparison, left, right)
    elif kind is None and comparison in ORDERED:
        # Two paths: as numbers where both are, else as text.
        texts = _plain(comparison, left, right, Form.STRING)
        fragment = filled("coalesce({}, {})", _exactly_compared(comparison, left, right), texts)
    else:
        fragment = _plain(comparison, left, right, FORM_OF[kind or Kind.TEXT])
    return filled("(not {})", fragment) if comparison is exp.NullSafeNEQ else fragment


def _plain(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr, form: Form) -> Fragment:
    return filled(f"({{}} {SIGNS[comparison]} {{}})", emit(left, form), emit(right, form))


def _numbers_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Fragment:
    form = number_form(left, right)
    return _exactly_compared(comparison, left, right) if form is Form.EXACT else _plain(comparison, left, right, form)


def _exactly_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Fragment:
    """By double, which has the range; and where doubles are equal by decimal, which has the digits."""
    doubles = emit(left, Form.DOUBLE), emit(right, Form.DOUBLE)
    decimals = emit(left, Form.EXACT), emit(right, Form.EXACT)
    sign = SIGNS[comparison]
    if comparison in ORDERED:
        default = "true" if sign.endswith("=") else "false"
        written = f"({{}} {sign[0]} {{}} or ({{}} = {{}} and coalesce({{}} {sign} {{}}, {default})))"
        return filled(written, *doubles, *doubles, *decimals)
    same = "<=>" if sign == "<=>" else "="
    equal = filled(f"({{}} {same} {{}} and coalesce({{}} = {{}}, true))", *doubles, *decimals)
    return filled("(not {})", equal) if comparison is exp.NEQ else equal
