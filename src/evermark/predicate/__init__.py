"""Predicates: which events a subscription wants, as a hostile text made safe.

`where` is Spark SQL over the event's columns and the JSON paths `data.a.b` (payload) and `before.a.b`. A text is
parsed, every node is held against an allow list, and the SQL that runs is written by us from the tree, never taken
from the text. What is allowed cannot raise at run time, cannot run away, and means the same live, behind and in
replay. Absent paths, JSON nulls and values of another type are null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache

from sqlglot import exp

from evermark.event import UNDELIVERED_OPS, Op
from evermark.predicate.compile import emit
from evermark.predicate.fragment import Fragment, Path, depth_of, joined, paths_of, refused, string_sql, variant_sql
from evermark.predicate.kinds import column_of, kind_of, path_of, require_conditions
from evermark.predicate.parse import parse
from evermark.predicate.steps import Step, every, steps_of
from evermark.predicate.values import Form, Kind, boolean_value, number_value, string_value, unparen

__all__ = ["Alias", "Equality", "Path", "Predicate", "match_sql", "variant_sql", "vet", "vetted"]

STREAMS_MAX = 1000
VETTED_MAX = 16_384
# Spark's own parser overflows its stack at about three times this.
SQL_DEPTH_MAX = 120

Alias = Callable[[Path], str]
Equality = tuple[str | Path, str | int | float | bool | Decimal]


@dataclass(frozen=True)
class ExactSteps:
    """A predicate as steps over the columns of a batch; `residual` is what its equalities leave to check, or None."""

    whole: Step
    residual: Step | None


@dataclass(frozen=True)
class Predicate:
    """A vetted predicate: plain values, so that it can be pickled, hashed and compared.

    `equalities` are conditions that must all hold, each an event column or a path with the value it must equal (of the
    path's type): an index over them finds the candidates. `residual_sql` is what is left to check on a candidate.
    """

    text: str
    paths: tuple[Path, ...]
    equalities: tuple[Equality, ...]
    _whole: Fragment
    _residual: Fragment | None
    # The same as steps that need no Spark. Not compared: they say nothing that the fragments do not say.
    exact: ExactSteps | None = field(default=None, compare=False)

    def sql(self, alias: Alias) -> str:
        """The whole predicate as a boolean Spark SQL expression; it may be null, which means no."""
        return _rendered(self._whole, alias)

    def residual_sql(self, alias: Alias) -> str | None:
        """What `equalities` leave to check, or None."""
        return None if self._residual is None else _rendered(self._residual, alias)


def vet(where: str | None, *, stored: bool = False) -> Predicate:
    """The predicate a text stands for. Raises `ConfigError` naming what is not allowed.

    `stored`: an earlier version may have accepted the text. A condition that can never hold is refused only when a
    person asks for it: among stored subscriptions it would stop the delivery of the others.
    """
    if where is None or not where.strip():
        return Predicate("", (), (), ("true",), None, ExactSteps(every([]), None))
    tree = parse(where)
    if kind_of(tree) not in (None, Kind.BOOLEAN):
        raise refused("it is not a condition", "compare it with something, as in data.total > 100")
    if not stored:
        require_conditions(tree)
    parts, rest, equalities = [], [], []
    steps: list[Step | None] = []
    left: list[Step | None] = []
    for conjunct in _conjuncts(tree):
        part = emit(conjunct, Form.BOOLEAN)
        steps.append(steps_of(conjunct))
        parts.append(part)
        equality, settled = _equality(conjunct)
        if equality is not None:
            equalities.append(equality)
        if not settled:
            rest.append(part)
            left.append(steps[-1])
    whole = joined(" and ", parts)
    if depth_of(whole) > SQL_DEPTH_MAX:
        raise refused("it nests too deep", "flatten it: use IN (…), AND, OR, or two subscriptions")
    text = tree.sql(dialect="spark", comments=False, copy=False)
    residual = joined(" and ", rest) if rest else None
    exact = _exact(steps, left)
    return Predicate(text, paths_of(whole), tuple(dict.fromkeys(equalities)), whole, residual, exact)


def _exact(steps: Sequence[Step | None], left: Sequence[Step | None]) -> ExactSteps | None:
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None
    rest = [step for step in left if step is not None]
    return ExactSteps(every(known), every(rest) if rest else None)


@lru_cache(maxsize=VETTED_MAX)
def vetted(where: str | None) -> Predicate:
    """The predicate of a stored subscription, kept: one takes milliseconds, and there may be thousands."""
    return vet(where, stored=True)


def match_sql(streams: Sequence[str], ops: Sequence[str], predicate: Predicate, alias: Alias) -> str:
    """Whether an event is for a subscription, never null. Empty `streams` or `ops` mean all that are delivered."""
    if len(streams) > STREAMS_MAX:
        raise refused(f"more than {STREAMS_MAX} streams", "leave `streams` out and restrict them in `where`")
    parts = [f"op in ({', '.join(map(string_sql, wanted_ops(ops)))})"]
    if streams:
        parts.append(f"stream in ({', '.join(map(string_sql, sorted(set(streams))))})")
    parts.append(f"({predicate.sql(alias)})")
    return f"coalesce({' and '.join(parts)}, false)"


def wanted_ops(ops: Sequence[str]) -> list[str]:
    """The operations a subscription gets that names these; all that are delivered when it names none."""
    delivered = {str(op) for op in Op} - UNDELIVERED_OPS
    wanted = sorted(set(ops) or delivered)
    if unknown := [op for op in wanted if op not in delivered]:
        allowed = ", ".join(sorted(delivered))
        raise refused(f"operation {unknown[0][:40]!r} is never delivered", f"use some of: {allowed}")
    return wanted


def _rendered(fragment: Fragment, alias: Alias) -> str:
    return "".join(part if isinstance(part, str) else alias(part) for part in fragment)


def _conjuncts(tree: exp.Expr) -> list[exp.Expr]:
    tree = unparen(tree)
    if not isinstance(tree, exp.And):
        return [tree]
    return [conjunct for part in tree.flatten() for conjunct in _conjuncts(part)]


def _equality(node: exp.Expr) -> tuple[Equality | None, bool]:
    """The equality a conjunct states, if an index can use it, and whether that says all of the conjunct."""
    if isinstance(node, exp.In) and len(node.expressions) == 1:
        sides = (node.this, node.expressions[0])
    elif isinstance(node, exp.EQ):
        sides = (node.this, node.expression)
    elif (path := path_of(node, Form.BOOLEAN)) is not None:
        return (path, True), True
    else:
        return None, False
    for named, literal in (sides, sides[::-1]):
        found = _named_value(unparen(named), literal)
        if found is not None:
            return found
    return None, False


def _named_value(named: exp.Expr, literal: exp.Expr) -> tuple[Equality, bool] | None:
    column = column_of(named)
    value: str | int | float | bool | Decimal
    if (text := string_value(literal)) is not None:
        value, form = text, Form.STRING
    elif (flag := boolean_value(literal)) is not None:
        value, form = flag, Form.BOOLEAN
    elif (amount := number_value(literal)) is None:
        return None
    elif column is not None:
        value, form = int(amount.value), Form.LONG
        if not amount.whole:
            return None
    elif amount.approximate:
        value, form = float(amount.value), Form.DOUBLE
    else:
        value, form = amount.value, Form.EXACT
    if column is not None:
        return ((column, value), True) if column != "event_time" else None
    path = path_of(named, form) if isinstance(named, exp.Column | exp.Dot | exp.Bracket) else None
    # An exact number is equal only if its double is too: the index narrows down, the residual decides.
    return ((path, value), form is not Form.EXACT) if path is not None else None
