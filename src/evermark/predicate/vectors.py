"""Carrying out the steps of predicates over the rows of one batch, a column at a time.

Each result says for each row that it is known, null, or in doubt. A doubt that cannot change a condition is none:
`false and doubt` is false. Texts are kept once each, with a number per row, so that a thousand comparisons with
literals look at each text once. Work is counted, and what would be too much is left to Spark.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from evermark.predicate.fragment import Path
from evermark.predicate.json_values import DOUBT, array_contains, document, followed, path_steps, read_as, size_of
from evermark.predicate.kinds import COLUMNS
from evermark.predicate.steps import Step
from evermark.predicate.values import Form

# In this order the least of two conditions is what AND makes of them.
NO, UNSURE, NULL, YES = range(4)
KNOWN = YES
_NOT = np.array([YES, UNSURE, NULL, NO], np.uint8)
_NOT_HELD = np.array([NO, UNSURE, NULL, NO], np.uint8)  # what a comparison that does not hold makes of a state

# About two nanoseconds each. Half a second is as long as a lane may take for a batch.
WORK_MAX = 250_000_000
_STEP_WORK, _VALUE_WORK = 500, 100
_LITERALS_MAX = 32_768
_KEPT_BYTES_MAX = 64 * 1024 * 1024

States = npt.NDArray[np.uint8]
T = TypeVar("T", bound=np.generic)


class TooMuchWorkError(Exception):
    """The steps asked for take longer than a lane may."""


@dataclass(frozen=True)
class Vector:
    """A result per row, or one for all rows. Of a condition there are only states, NO and YES among them."""

    states: States
    values: npt.NDArray[Any] | None = None
    texts: tuple[str, ...] = ()  # of texts: each once; `values` are numbers into these

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self.texts)}

    @cached_property
    def chars(self) -> int:
        return sum(map(len, self.texts))

    def spells(self, text: str) -> npt.NDArray[np.bool_]:
        """Whether it is this text, by row."""
        return np.asarray((self.values == self.numbers.get(text, -1)) & (self.states == KNOWN), np.bool_)

    def spelled(self) -> list[Any]:
        """Value by value, None and `DOUBT` among them."""
        values = _with_values(self).values
        plain: list[Any] = np.asarray(values).tolist()
        if self.texts:
            plain = [self.texts[number] for number in plain]
        if (self.states == YES).all():
            return plain
        odd = {NULL: None, UNSURE: DOUBT}
        return [odd.get(state, value) for state, value in zip(self.states.tolist(), plain, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + (0 if self.values is None else self.values.nbytes) + self.chars


class Batch:
    """The rows of a batch, and what is known about them so far. Each payload is parsed once, each path taken once."""

    def __init__(self, rows: pa.Table | pa.RecordBatch, paths: Sequence[Path], work_max: int = WORK_MAX) -> None:
        self._rows = rows
        self._work_left = work_max
        # By identity: equal steps are one object. With the step, so that its identity stays its own.
        self._kept: dict[int, tuple[Step, Vector]] = {}
        self._kept_bytes = 0
        self._found = self._taken(paths)

    def work(self, amount: int) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            raise TooMuchWorkError

    def condition(self, step: Step) -> States:
        """The states of a condition, one per row."""
        return self.by_row(self.vector(step).states)

    def by_row(self, found: npt.NDArray[T]) -> npt.NDArray[T]:
        """One for each row, also where one stands for all rows."""
        return np.broadcast_to(found, (self._rows.num_rows,))

    def vector(self, step: Step) -> Vector:
        kept = self._kept.get(id(step))
        if kept is not None:
            return kept[1]
        inputs = [self.vector(one) for one in step.inputs]
        self.work(_STEP_WORK + self._rows.num_rows)
        if step.does not in _BY_NUMBER:
            self.work(sum(_VALUE_WORK * len(one.texts) + one.chars for one in inputs))
        found = _DOES[step.does](inputs, step.given) if step.inputs else self._leaf(step)
        if self._kept_bytes + found.nbytes <= _KEPT_BYTES_MAX:
            self._kept[id(step)] = step, found
            self._kept_bytes += found.nbytes
        return found

    def _taken(self, paths: Sequence[Path]) -> dict[tuple[str, str], list[Any]]:
        """Per column and path the JSON value in each row."""
        wanted: dict[str, dict[str, list[Any]]] = {}
        for path in paths:
            wanted.setdefault(path.column, {})[path.json_path] = []
        for column, found in wanted.items():
            self.work(self._rows.num_rows * _VALUE_WORK * len(found))
            ways = [(path_steps(json_path), values.append) for json_path, values in found.items()]
            for text in self._rows.column(column).to_pylist():
                parsed = document(text)
                for steps, add in ways:
                    add(followed(parsed, steps))
        return {(column, path): values for column, found in wanted.items() for path, values in found.items()}

    def _leaf(self, step: Step) -> Vector:
        given = step.given
        if step.does == "literal":
            return _literal(*given)
        if step.does == "null":
            return vector_of([None], given)
        if step.does == "and":  # of nothing
            return Vector(np.array([YES], np.uint8))
        if step.does == "column":
            return self._column(given)
        if step.does == "array_contains":
            path, (form, wanted) = given
            return vector_of([array_contains(value, form, wanted) for value in self._at(path)], Form.BOOLEAN)
        values = self._at(given)
        if step.does == "size":
            return vector_of(list(map(size_of, values)), Form.LONG)
        if step.does == "absent":
            return vector_of([DOUBT if value is DOUBT else value is None for value in values], Form.BOOLEAN)
        return vector_of(list(map(read_as(given.cast), values)), Form(given.cast))

    def _at(self, path: Path) -> list[Any]:
        values = self._found[path.column, path.json_path]
        elements = sum(len(value) for value in values if isinstance(value, list))
        self.work(_VALUE_WORK * (len(values) + elements))
        return values

    def _column(self, name: str) -> Vector:
        column, form = self._rows.column(name), COLUMNS[name]
        if form is Form.TIMESTAMP:
            column = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        return vector_of(column.to_pylist(), form)


_TYPES: dict[str, Any] = {
    Form.DOUBLE: np.float64,
    Form.LONG: np.int64,
    Form.TIMESTAMP: np.int64,
    Form.DATE: np.int64,
    Form.EXACT: object,
}
_BLANK: dict[str, object] = {Form.EXACT: Decimal(0)}


def vector_of(values: Sequence[Any], form: str) -> Vector:
    """A vector of values of a form, None and `DOUBT` among them."""
    if form == Form.BOOLEAN:
        codes = [UNSURE if one is DOUBT else NULL if one is None else YES if one else NO for one in values]
        return Vector(np.array(codes, np.uint8))
    states = np.array([UNSURE if one is DOUBT else NULL if one is None else KNOWN for one in values], np.uint8)
    if form == Form.STRING:
        numbers: dict[str, int] = {"": 0}
        known = [numbers.setdefault(one, len(numbers)) if isinstance(one, str) else 0 for one in values]
        return Vector(states, np.array(known, np.int64), tuple(numbers))
    blank = _BLANK.get(form, 0)
    plain = [blank if one is None or one is DOUBT else one for one in values]
    return Vector(states, np.array(plain, _TYPES[form]))


@lru_cache(maxsize=_LITERALS_MAX)
def _literal(form: str, value: object) -> Vector:
    return vector_of([value], form)


def _gathered(vector: Vector, of_text: Callable[[str], Any], form: str) -> Vector:
    """What a function makes of each text, each looked at once."""
    made = vector_of([of_text(text) for text in vector.texts], form)
    states = np.where(vector.states == KNOWN, made.states[vector.values], vector.states)
    values = None if made.values is None else made.values[vector.values]
    return Vector(states.astype(np.uint8), values, made.texts)


def _if_ascii(change: Callable[[str], str]) -> Callable[[str], Any]:
    """Which letters have another case, and which, differs between Java's Unicode and Python's."""
    return lambda text: change(text) if text.isascii() else DOUBT


def _like(pieces: Sequence[str]) -> Callable[[str], bool]:
    """Whether a text has the pieces in this order, the first at its start and the last at its end."""
    first, *middles, last = pieces

    def found(text: str) -> bool:
        if not text.startswith(first):
            return False
        at = len(first)
        for piece in middles:
            next_at = text.find(piece, at)
            if next_at < 0:
                return False
            at = next_at + len(piece)
        return text.endswith(last, at)

    return found


_RELATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<=>": operator.eq,
    "<>": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def _compare(inputs: Sequence[Vector], sign: str) -> Vector:
    left, right = map(_with_values, inputs)
    holds = _related(left, right, sign)
    states = np.minimum(left.states, right.states)
    found = _held(holds, states)
    if sign == "<=>":
        both = np.maximum(left.states, right.states) == NULL
        found = np.where(states == NULL, np.where(both, YES, NO), found)
    return Vector(found.astype(np.uint8))


def _held(holds: npt.NDArray[np.bool_], states: States) -> States:
    return np.where(holds, states, _NOT_HELD[states])


def _with_values(vector: Vector) -> Vector:
    """A condition as a value among others."""
    if vector.values is not None:
        return vector
    states = np.where(vector.states == NO, KNOWN, vector.states).astype(np.uint8)
    return Vector(states, vector.states == YES)


def _related(left: Vector, right: Vector, sign: str) -> npt.NDArray[np.bool_]:
    relation = _RELATIONS[sign]
    if not left.texts or not right.texts:
        return np.asarray(relation(left.values, right.values), np.bool_)
    if len(right.states) == 1:
        return _related_to_one(left, right.texts[_only(right)], relation)
    if len(left.states) == 1:
        return _related_to_one(right, left.texts[_only(left)], lambda text, one: relation(one, text))
    return np.array([relation(*pair) for pair in zip(_texts(left), _texts(right), strict=True)], np.bool_)


def _related_to_one(vector: Vector, one: str, relation: Callable[[Any, Any], Any]) -> npt.NDArray[np.bool_]:
    if relation in (operator.eq, operator.ne):
        return np.asarray(relation(vector.values, vector.numbers.get(one, -1)), np.bool_)
    held = np.array([relation(text, one) for text in vector.texts], np.bool_)
    return np.asarray(held[vector.values], np.bool_)


def _only(vector: Vector) -> int:
    return int(np.asarray(vector.values)[0])


def _texts(vector: Vector) -> list[str]:
    return [vector.texts[number] for number in np.asarray(vector.values).tolist()]


def _in(inputs: Sequence[Vector], literals: Sequence[Any]) -> Vector:
    (vector,) = inputs
    if vector.texts:
        literals = [vector.numbers[text] for text in literals if text in vector.numbers]
    held = np.isin(np.asarray(vector.values), np.array(literals))
    return Vector(_held(held, vector.states))


def _where(holds: npt.NDArray[np.bool_], one: Vector, other: Vector) -> Vector:
    states = np.where(holds, one.states, other.states).astype(np.uint8)
    if one.values is None or other.values is None:
        return Vector(states)
    if not one.texts or not other.texts:
        return Vector(states, np.where(holds, one.values, other.values))
    numbers = dict(one.numbers)
    renumbered = np.array([numbers.setdefault(text, len(numbers)) for text in other.texts], np.int64)
    return Vector(states, np.where(holds, one.values, renumbered[other.values]), tuple(numbers))


def _coalesce(inputs: Sequence[Vector], _: object) -> Vector:
    return reduce(lambda found, other: _where(found.states != NULL, found, other), inputs)


def _case(inputs: Sequence[Vector], _: object) -> Vector:
    *branches, found = inputs
    for condition, result in reversed(list(zip(branches[::2], branches[1::2], strict=True))):
        found = _where(condition.states == YES, result, found)
        states = np.where(condition.states == UNSURE, UNSURE, found.states).astype(np.uint8)
        found = replace(found, states=states)
    return found


def _calculated(does: Callable[..., Any]) -> Callable[[Sequence[Vector], object], Vector]:
    """Arithmetic of doubles. Infinities and what comes of them Spark compares in a way of its own."""

    def run(inputs: Sequence[Vector], _: object) -> Vector:
        with np.errstate(all="ignore"):
            values = np.asarray(does(*(one.values for one in inputs)), np.float64)
        states = reduce(np.minimum, (one.states for one in inputs))
        unsure = (states == KNOWN) & ~np.isfinite(values)
        return Vector(np.where(unsure, UNSURE, states).astype(np.uint8), values)

    return run


def _divide(inputs: Sequence[Vector], _: object) -> Vector:
    found = _calculated(np.divide)(inputs, None)
    by = inputs[1]
    none = (by.states == KNOWN) & (np.asarray(by.values) == 0) & (inputs[0].states != UNSURE)
    return replace(found, states=np.where(none, NULL, found.states).astype(np.uint8))


def _from_long(inputs: Sequence[Vector], form: str) -> Vector:
    (vector,) = inputs
    values = np.asarray(vector.values)
    if form == Form.EXACT:
        return replace(vector, values=np.array([Decimal(value) for value in values.tolist()], object))
    return replace(vector, values=values.astype(np.float64))


def _is(state: int) -> Callable[[Sequence[Vector], object], Vector]:
    def run(inputs: Sequence[Vector], _: object) -> Vector:
        states = inputs[0].states
        return Vector(np.where(states == UNSURE, UNSURE, np.where(states == state, YES, NO)).astype(np.uint8))

    return run


def _or(inputs: Sequence[Vector], _: object) -> Vector:
    return Vector(_NOT[reduce(np.minimum, (_NOT[one.states] for one in inputs))])


def _text_step(change: Callable[[str], Any], form: str = Form.STRING) -> Callable[[Sequence[Vector], object], Vector]:
    return lambda inputs, _: _gathered(inputs[0], change, form)


# These look texts up instead of reading them.
_BY_NUMBER = frozenset(("compare", "in", "is_null"))
_DOES: dict[str, Callable[[Sequence[Vector], Any], Vector]] = {
    "and": lambda inputs, _: Vector(reduce(np.minimum, (one.states for one in inputs))),
    "or": _or,
    "not": lambda inputs, _: Vector(_NOT[inputs[0].states]),
    "is_null": _is(NULL),
    "is_true": _is(YES),
    "is_false": _is(NO),
    "compare": _compare,
    "in": _in,
    "coalesce": _coalesce,
    "case": _case,
    "from_long": _from_long,
    "+": _calculated(np.add),
    "-": _calculated(np.subtract),
    "*": _calculated(np.multiply),
    "/": _divide,
    "negative": _calculated(np.negative),
    "abs": _calculated(np.abs),
    "lower": _text_step(_if_ascii(str.lower)),
    "upper": _text_step(_if_ascii(str.upper)),
    "trim": _text_step(lambda text: text.strip(" ")),
    "length": _text_step(len, Form.LONG),
    "slice": lambda inputs, bounds: _gathered(inputs[0], lambda text: text[bounds[0] : bounds[1]], Form.STRING),
    "startswith": lambda inputs, wanted: _gathered(inputs[0], lambda text: text.startswith(wanted), Form.BOOLEAN),
    "endswith": lambda inputs, wanted: _gathered(inputs[0], lambda text: text.endswith(wanted), Form.BOOLEAN),
    "contains": lambda inputs, wanted: _gathered(inputs[0], lambda text: wanted in text, Form.BOOLEAN),
    "like": lambda inputs, pieces: _gathered(inputs[0], _like(pieces), Form.BOOLEAN),
}
