"""What the parts of a predicate are about: names, paths, kinds and forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sqlglot import exp

from evermark.predicate.fragment import Path, json_path, refused
from evermark.predicate.values import FORM_OF, Form, Kind, number_value, string_value, time_value, unparen

# Comparisons, as both compilations write them.
SIGNS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.NullSafeEQ: "<=>",
    exp.NullSafeNEQ: "<=>",
}
ORDERED = (exp.GT, exp.GTE, exp.LT, exp.LTE)

COLUMNS = {
    **dict.fromkeys(("event_id", "source", "stream", "key", "previous_key", "op", "tx", "origin"), Form.STRING),
    **dict.fromkeys(("partition", "origin_seq", "schema_version"), Form.LONG),
    "event_time": Form.TIMESTAMP,
}
_ROOTS: dict[str, Literal["payload", "before"]] = {"data": "payload", "before": "before"}
_TEXTS = (exp.Lower, exp.Upper, exp.Trim, exp.Substring, exp.Concat, exp.DPipe)
# Worked out in doubles, whatever goes in.
_COMPUTED = (
    *(exp.Neg, exp.Abs, exp.Round, exp.Floor, exp.Ceil),
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod),
)
_NUMBERS = (exp.Literal, exp.Length, exp.ArraySize, *_COMPUTED)
_CASTS = {
    exp.DType.TEXT: Form.STRING,
    exp.DType.INT: Form.LONG,
    exp.DType.BIGINT: Form.LONG,
    exp.DType.DOUBLE: Form.DOUBLE,
    exp.DType.DECIMAL: Form.EXACT,
    exp.DType.BOOLEAN: Form.BOOLEAN,
    exp.DType.DATE: Form.DATE,
    exp.DType.TIMESTAMP: Form.TIMESTAMP,
    exp.DType.TIMESTAMPTZ: Form.TIMESTAMP,
}


def path_steps(node: exp.Expr) -> tuple[str | int, ...] | None:
    """The steps of a column or path (`data.a[0]` is data, a, 0), or None for anything else."""
    if isinstance(node, exp.Column):
        names = [node.args.get(part) for part in ("catalog", "db", "table", "this")]
        return tuple(_step(name, first=index == 0) for index, name in enumerate(n for n in names if n is not None))
    if not isinstance(node, exp.Dot | exp.Bracket) or (before := path_steps(node.this)) is None:
        return None
    if isinstance(node, exp.Dot):
        return (*before, _step(node.expression, first=False))
    if len(node.expressions) != 1:
        raise refused("[ ] holds more than one index", "use data.items[0]")
    index = node.expressions[0]
    if (text := string_value(index)) is not None:
        return (*before, text)
    if isinstance(index, exp.Literal) and str(index.this).isascii() and str(index.this).isdigit():
        return (*before, int(str(index.this)[:12]))
    raise refused("[ ] holds something else than an index or a name", "use data.items[0] or data['name']")


def _step(name: exp.Expr, *, first: bool) -> str:
    if not isinstance(name, exp.Identifier):
        raise refused("a path holds something else than names", "use data.a.b, data.`odd name` or data.items[0]")
    if first and name.args.get("quoted"):
        raise refused(
            f"the quoted column {str(name.this)[:40]!r} is not allowed", "write column names without backticks"
        )
    return str(name.this).lower() if first else str(name.this)


def column_of(node: exp.Expr) -> str | None:
    """The name of an event column, if the node is one."""
    steps = path_steps(unparen(node))
    return str(steps[0]) if steps and len(steps) == 1 and steps[0] in COLUMNS else None


def path_of(node: exp.Expr, cast: str) -> Path | None:
    """The JSON path the node names, read as `cast`; None when it names an event column or is no name at all."""
    steps = path_steps(unparen(node))
    if steps is None or (len(steps) == 1 and steps[0] in COLUMNS):
        return None
    if (column := _ROOTS.get(str(steps[0]))) is not None:
        return Path(column, json_path(steps[1:]), cast)
    name = ".".join(str(step) for step in steps)[:60]
    raise refused(f"unknown column {name!r}", f"columns: {', '.join(COLUMNS)}; paths: data.… and before.…")


def kind_of(node: exp.Expr) -> Kind | None:
    """What the node is about; None when that is open (a path, NULL, or a choice among such)."""
    node = unparen(node)
    if (column := column_of(node)) is not None:
        return COLUMNS[column].kind
    if isinstance(node, exp.Coalesce | exp.Nullif | exp.If | exp.Case):
        return shared_kind(choices(node))
    if isinstance(node, exp.Column | exp.Dot | exp.Bracket | exp.Null):
        return None
    if string_value(node) is not None:
        return Kind.TEXT
    if isinstance(node, exp.Cast):
        return cast_form(node).kind
    if isinstance(node, _TEXTS):
        return Kind.TEXT
    return Kind.NUMBER if isinstance(node, _NUMBERS) else Kind.BOOLEAN


def require_conditions(tree: exp.Expr) -> None:
    """Refuse NULL, and `data` or `before` as a whole, where a condition stands: they are never true."""
    tree = unparen(tree)
    if isinstance(tree, exp.And | exp.Or):
        for part in tree.flatten():
            require_conditions(part)
    elif isinstance(tree, exp.Not):
        require_conditions(tree.this)
    elif isinstance(tree, exp.Null):
        raise refused("NULL is not a condition: it is never true", "leave it out, or compare: data.total IS NOT NULL")
    elif path_steps(tree) in (("data",), ("before",)):
        name = tree.sql()
        raise refused(f"{name} is not a condition: it is the whole record", f"name a path, as in {name}.paid")


def shared_kind(nodes: Sequence[exp.Expr]) -> Kind | None:
    """The one kind of nodes that meet; a string literal may stand for a time."""
    kinds: dict[Kind, exp.Expr] = {}
    for node in nodes:
        kind = kind_of(node)
        if kind is not None and not (kind in kinds and string_value(kinds[kind]) is None):
            kinds[kind] = node
    if Kind.TEXT in kinds and string_value(kinds[Kind.TEXT]) is not None and kinds.keys() & {Kind.TIME, Kind.DATE}:
        del kinds[Kind.TEXT]
    if kinds.keys() == {Kind.TIME, Kind.DATE} and time_value(kinds[Kind.DATE]) is not None:
        return Kind.TIME
    if len(kinds) > 1:
        one, two = list(kinds)[:2]
        raise refused(f"{one} meets {two}", "compare like with like: quote text, leave numbers bare, or use cast")
    return next(iter(kinds), None)


def choices(node: exp.Expr) -> list[exp.Expr]:
    """The values a choice may result in."""
    if isinstance(node, exp.Coalesce):
        return [node.this, *node.expressions]
    if isinstance(node, exp.Nullif):
        return [node.this, node.expression]
    branches, otherwise = branches_of(node)
    return [*(branch.args["true"] for branch in branches), *([otherwise] if otherwise else [])]


def branches_of(node: exp.Expr) -> tuple[list[exp.Expr], exp.Expr | None]:
    """The branches of an IF or a CASE, and what it results in when none is taken."""
    if isinstance(node, exp.If):
        return [node], node.args.get("false")
    return node.args["ifs"], node.args.get("default")


def cast_form(node: exp.Cast) -> Form:
    form = _CASTS.get(node.to.this)
    if form is None or (node.to.expressions and form is not Form.EXACT):
        allowed = "string, bigint, double, decimal(p,s), boolean, date, timestamp"
        raise refused(f"a cast to {str(node.to.this.value).lower()} is not allowed", f"cast to one of: {allowed}")
    return form


def is_whole(node: exp.Expr) -> bool:
    """Whether a number is a whole one by nature, so that it can be compared as one."""
    node = unparen(node)
    if (literal := number_value(node)) is not None:
        return literal.whole
    if isinstance(node, exp.Cast):
        return cast_form(node) is Form.LONG
    return column_of(node) is not None or isinstance(node, exp.Length | exp.ArraySize)


def is_approximate(node: exp.Expr) -> bool:
    node = unparen(node)
    if (literal := number_value(node)) is not None:
        return literal.approximate
    if isinstance(node, exp.Cast):
        return cast_form(node) is Form.DOUBLE
    return isinstance(node, _COMPUTED)


def number_form(left: exp.Expr, right: exp.Expr) -> Form:
    """As what two numbers are compared. EXACT: by double, and where doubles are equal by decimal."""
    if is_whole(left) and is_whole(right):
        return Form.LONG
    return Form.DOUBLE if is_approximate(left) or is_approximate(right) else Form.EXACT


def natural_form(node: exp.Expr) -> Form:
    kind = kind_of(node)
    if kind is None:
        return Form.STRING
    return Form.LONG if kind is Kind.NUMBER and is_whole(node) else FORM_OF[kind]
