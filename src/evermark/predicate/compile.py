"""From a vetted tree to Spark SQL of our own making.

Every part is written with its type stated, so that Spark never adds a cast of its own, and with functions that give
null where ANSI mode would raise: no predicate can make a job fail. A JSON path takes the type of what it meets.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from evermark.predicate.fragment import Fragment, Path, chars_of, joined, refused, sql, string_sql
from evermark.predicate.kinds import (
    COLUMNS,
    cast_form,
    choices,
    column_of,
    is_approximate,
    is_whole,
    kind_of,
    natural_form,
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

_COMPARED: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.NullSafeEQ: "<=>",
    exp.NullSafeNEQ: "<=>",
}
_ORDERED = (exp.GT, exp.GTE, exp.LT, exp.LTE)
# Doubles do not overflow, and what could divide by zero is tried: arithmetic cannot raise.
_ARITHMETIC: dict[type[exp.Expr], str] = {
    exp.Add: "({} + {})",
    exp.Sub: "({} - {})",
    exp.Mul: "({} * {})",
    exp.Div: "try_divide({}, {})",
    exp.Mod: "try_mod({}, {})",
}
_TEXT: dict[type[exp.Expr], str] = {exp.Lower: "lower", exp.Upper: "upper", exp.Trim: "trim"}
_SEARCH: dict[type[exp.Expr], str] = {exp.StartsWith: "startswith", exp.EndsWith: "endswith", exp.Contains: "contains"}
_ROUNDED: dict[type[exp.Expr], str] = {exp.Floor: "floor", exp.Ceil: "ceil"}


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
    if text is not None and form in (Form.TIMESTAMP, Form.DATE):
        return sql(time_sql(text, form))
    if (moment := time_value(node)) is not None and form in (Form.TIMESTAMP, Form.DATE):
        return sql(time_sql(moment[0], form))
    if kind is not None and kind is not form.kind:
        raise refused(f"{kind} stands where {form.kind} is needed", "compare like with like, or use cast")
    if text is not None:
        return sql(string_sql(text))
    if (literal := number_value(node)) is not None:
        return sql(literal.sql(form))
    if (column := column_of(node)) is not None:
        return _converted(sql(column), COLUMNS[column], form, cast=column in ("partition", "schema_version"))
    if isinstance(node, exp.Coalesce | exp.Nullif | exp.If | exp.Case):
        return _emit_choice(node, form)
    if isinstance(node, exp.Cast):
        return _emit_cast(node, form)
    emitter = {Kind.TEXT: _emit_text, Kind.NUMBER: _emit_number, Kind.BOOLEAN: _emit_boolean}[form.kind]
    return emitter(node, form)


def _converted(fragment: Fragment, have: Form, want: Form, *, cast: bool = False) -> Fragment:
    return fragment if have is want and not cast else sql("try_cast(", fragment, f" as {want})")


def _filled(template: str, *fragments: Fragment) -> Fragment:
    pieces: list[str | Fragment] = []
    for index, text in enumerate(template.split("{}")):
        pieces += [fragments[index - 1], text] if index else [text]
    return sql(*pieces)


def _emit_choice(node: exp.Expr, form: Form) -> Fragment:
    if isinstance(node, exp.Coalesce):
        return sql("coalesce(", joined(", ", [emit(value, form) for value in choices(node)]), ")")
    if isinstance(node, exp.Nullif):
        # As Spark would, but with the repetition close to the limit.
        value = emit(node.this, form)
        return _filled(
            f"(case when {{}} = {{}} then cast(null as {form}) else {{}} end)",
            value,
            emit(node.expression, form),
            value,
        )
    if isinstance(node, exp.If):
        branches, default, subject = [node], node.args.get("false"), None
    else:
        branches, default, subject = node.args["ifs"], node.args.get("default"), node.this
    pieces: list[str | Fragment] = ["(case"]
    for branch in branches:
        condition = emit(branch.this, Form.BOOLEAN) if subject is None else compared(exp.EQ, subject, branch.this)
        pieces += [" when ", condition, " then ", emit(branch.args["true"], form)]
    pieces += [" else ", emit(default if default is not None else exp.Null(), form), " end)"]
    return sql(*pieces)


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
        fragment = sql("try_cast(", fragment, f" as {_decimal_type(node)})")
        return sql("try_cast(", fragment, f" as {form})")
    return _converted(fragment, target, form)


def _decimal_type(node: exp.Cast) -> str:
    digits = [str(parameter.this.this) for parameter in node.to.expressions]
    if len(digits) > 2 or not all(text.isascii() and text.isdigit() and len(text) <= 2 for text in digits):
        raise refused("a decimal type that is not decimal(p,s)", "write it like decimal(20,2)")
    precision, scale = [*map(int, digits), *(10, 0)[len(digits) :]]
    if not (1 <= precision <= 38 and scale <= min(precision, 9) and precision - scale <= 29):
        raise refused(f"decimal({precision},{scale})", "use at most 9 digits after the point and 29 before it")
    return f"decimal({precision},{scale})"


def _emit_text(node: exp.Expr, form: Form) -> Fragment:
    if type(node) in _TEXT:
        return sql(f"{_TEXT[type(node)]}(", emit(node.this, form), ")")
    if isinstance(node, exp.Substring):
        bounds = [node.args.get("start"), node.args.get("length")]
        # Bounds beyond an int are null, and so is the result.
        ints = [sql("try_cast(", emit(bound, Form.LONG), " as int)") for bound in bounds if bound is not None]
        return sql("substring(", joined(", ", [emit(node.this, form), *ints]), ")")
    parts = node.expressions if isinstance(node, exp.Concat) else list(node.flatten())
    if not 1 <= len(parts) <= CONCAT_PARTS_MAX or any(part.find(exp.Concat, exp.DPipe) for part in parts):
        raise refused("a large or nested concat", f"join at most {CONCAT_PARTS_MAX} parts, in one concat")
    return sql("concat(", joined(", ", [emit(part, form) for part in parts]), ")")


def _emit_number(node: exp.Expr, form: Form) -> Fragment:
    if isinstance(node, exp.Length):
        return _converted(sql("length(", emit(node.this, Form.STRING), ")"), Form.LONG, form, cast=True)
    if isinstance(node, exp.ArraySize):
        return _converted(sql("array_size(", (_array(node, "variant"),), ")"), Form.LONG, form, cast=True)
    if type(node) in _ARITHMETIC:
        sides = emit(node.this, Form.DOUBLE), emit(node.expression, Form.DOUBLE)
        fragment = _filled(_ARITHMETIC[type(node)], *sides)
    elif isinstance(node, exp.Neg):
        fragment = sql("(- ", emit(node.this, Form.DOUBLE), ")")
    elif isinstance(node, exp.Round):
        digits = number_value(node.args.get("decimals") or exp.Literal.number(0))
        if digits is None or not digits.whole or abs(digits.value) > ROUND_DIGITS_MAX:
            raise refused("round with an odd number of digits", f"use a literal from 0 to {ROUND_DIGITS_MAX}")
        fragment = sql("round(", emit(node.this, Form.DOUBLE), f", {int(digits.value)})")
    elif type(node) in _ROUNDED:
        # floor(double) overflows its bigint; a double too large for this decimal is whole anyway.
        value = emit(node.this, Form.DOUBLE)
        small = sql(f"{_ROUNDED[type(node)]}(try_cast(", value, " as decimal(38,18)))")
        fragment = sql("coalesce(cast(", small, " as double), ", value, ")")
    else:
        fragment = sql("abs(", emit(node.this, Form.DOUBLE), ")")
    return _converted(fragment, Form.DOUBLE, form)


def _emit_boolean(node: exp.Expr, form: Form) -> Fragment:
    if isinstance(node, exp.And | exp.Or):
        word = " and " if isinstance(node, exp.And) else " or "
        return sql("(", joined(word, [emit(part, form) for part in node.flatten()]), ")")
    if isinstance(node, exp.Not):
        return sql("(not ", emit(node.this, form), ")")
    if isinstance(node, exp.Boolean):
        return sql("true" if node.this else "false")
    if type(node) in _COMPARED:
        return compared(type(node), node.this, node.expression)
    if type(node) in _SEARCH:
        sides = emit(node.this, Form.STRING), emit(node.expression, Form.STRING)
        return _filled(f"{_SEARCH[type(node)]}({{}}, {{}})", *sides)
    if emitter := _CONDITIONS.get(type(node)):
        return emitter(node)
    raise refused(f"{type(node).__name__.upper()} is not allowed", "use comparisons, AND, OR, NOT, IN, BETWEEN, LIKE")


def _emit_is(node: exp.Expr) -> Fragment:
    right = node.expression
    if isinstance(right, exp.Null):
        return sql("(", emit(node.this, natural_form(node.this)), " is null)")
    if (value := boolean_value(right)) is None:
        raise refused("IS with something else than NULL, TRUE or FALSE", "use =")
    return sql("(", emit(node.this, Form.BOOLEAN), " is true)" if value else " is false)")


def _emit_between(node: exp.Expr) -> Fragment:
    low, high = node.args["low"], node.args["high"]
    return sql("(", compared(exp.GTE, node.this, low), " and ", compared(exp.LTE, node.this, high), ")")


def _emit_in(node: exp.Expr) -> Fragment:
    values: list[exp.Expr] = node.expressions
    if not values or any(not _is_literal(value) for value in values):
        raise refused("IN with something else than literals", "use IN ('a', 'b'), or OR")
    kind = shared_kind([node.this, *values]) or Kind.TEXT
    form: Form = FORM_OF[kind]
    if kind is Kind.NUMBER:
        if is_whole(node.this) and all(is_whole(value) for value in values):
            form = Form.LONG
        elif not all(is_approximate(value) for value in values):
            return sql("(", joined(" or ", [compared(exp.EQ, node.this, value) for value in values]), ")")
    return sql("(", emit(node.this, form), " in (", joined(", ", [emit(value, form) for value in values]), "))")


def _is_literal(node: exp.Expr) -> bool:
    readers: tuple[Callable[[exp.Expr], object], ...] = (string_value, number_value, boolean_value, time_value)
    return any(read(node) is not None for read in readers)


def _emit_like(node: exp.Expr) -> Fragment:
    pattern = string_value(node.expression)
    if pattern is None:
        raise refused("LIKE with something else than a literal pattern", "use contains(…), or a pattern in quotes")
    fragment = like_sql(emit(node.this, Form.STRING), pattern, fold=isinstance(node, exp.ILike))
    return sql("(not ", fragment, ")") if node.args.get("negate") else fragment


def _emit_rlike(node: exp.Expr) -> Fragment:
    pattern = string_value(node.expression)
    if pattern is None:
        raise refused("RLIKE with something else than a literal pattern", "write the pattern in quotes")
    return rlike_sql(emit(node.this, Form.STRING), pattern)


def _emit_array_contains(node: exp.Expr) -> Fragment:
    if not _is_literal(node.expression):
        raise refused("array_contains with something else than a literal", "use array_contains(data.list, 'value')")
    literal = number_value(node.expression)
    form = natural_form(node.expression)
    if literal is not None:
        form = Form.DOUBLE if literal.approximate else Form.EXACT
    return sql("array_contains(", (_array(node, form),), ", ", emit(node.expression, form), ")")


def _array(node: exp.Expr, element: str) -> Path:
    path = path_of(node.this, f"array<{element}>")
    if path is None:
        raise refused("an array function over something else than a path", "use it as in size(data.items)")
    return path


_CONDITIONS: dict[type[exp.Expr], Callable[[exp.Expr], Fragment]] = {
    exp.Is: _emit_is,
    exp.In: _emit_in,
    exp.Between: _emit_between,
    exp.Like: _emit_like,
    exp.ILike: _emit_like,
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
    elif kind is None and comparison in _ORDERED:
        # Two paths: as numbers where both are, else as text.
        texts = _plain(comparison, left, right, Form.STRING)
        fragment = sql("coalesce(", _exactly_compared(comparison, left, right), ", ", texts, ")")
    else:
        fragment = _plain(comparison, left, right, FORM_OF[kind or Kind.TEXT])
    return sql("(not ", fragment, ")") if comparison is exp.NullSafeNEQ else fragment


def _plain(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr, form: Form) -> Fragment:
    return _filled(f"({{}} {_COMPARED[comparison]} {{}})", emit(left, form), emit(right, form))


def _numbers_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Fragment:
    if is_whole(left) and is_whole(right):
        return _plain(comparison, left, right, Form.LONG)
    if is_approximate(left) or is_approximate(right):
        return _plain(comparison, left, right, Form.DOUBLE)
    return _exactly_compared(comparison, left, right)


def _exactly_compared(comparison: type[exp.Expr], left: exp.Expr, right: exp.Expr) -> Fragment:
    """By double, which has the range; and where doubles are equal by decimal, which has the digits."""
    doubles = emit(left, Form.DOUBLE), emit(right, Form.DOUBLE)
    decimals = emit(left, Form.EXACT), emit(right, Form.EXACT)
    sign = _COMPARED[comparison]
    if comparison in _ORDERED:
        default = "true" if sign.endswith("=") else "false"
        tie = _filled(f"({{}} = {{}} and coalesce({{}} {sign} {{}}, {default}))", *doubles, *decimals)
        return sql("(", _filled(f"{{}} {sign[0]} {{}}", *doubles), " or ", tie, ")")
    same = "<=>" if sign == "<=>" else "="
    equal = _filled(f"({{}} {same} {{}} and coalesce({{}} = {{}}, true))", *doubles, *decimals)
    return sql("(not ", equal, ")") if comparison is exp.NEQ else equal
