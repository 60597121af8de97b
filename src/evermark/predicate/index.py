"""Which subscriptions an event is worth testing for: found by the values it must have, not one by one. Pure.

Most subscriptions name a stream, an operation or the value of a path. Subscriptions that name the same things are put
in one table, by value; an event is looked up once per table, however many subscriptions there are. What a subscription
asks beyond that is tested only for the events that were found for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from math import prod

from evermark.predicate import Path, Predicate, wanted_ops

# Each table is a look-up per event, so there are few; a table with one row is no better than a test.
TABLES_MAX = 6
TABLE_ROWS_MIN = 2
# One subscription may name many streams and operations: each pair of them is a row.
ROWS_PER_FILTER_MAX = 64

Column = str | Path
Value = str | int | float | bool | Decimal

_EXACT = "decimal("
_SHORT = ("partition", "schema_version")  # columns of 32 bits


@dataclass(frozen=True)
class Filter:
    """What one subscription wants."""

    streams: tuple[str, ...]
    ops: tuple[str, ...]
    predicate: Predicate


@dataclass(frozen=True)
class Table:
    """Values of some columns, and the numbers of the filters that need exactly these."""

    columns: tuple[Column, ...]
    rows: Mapping[tuple[Value, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Index:
    tables: tuple[Table, ...]
    tested: tuple[int, ...]  # filters that every event is tested for
    whole: frozenset[int]  # filters in a table that does not hold all they name: what is found is tested for everything


def index_of(filters: Sequence[Filter]) -> Index:
    """Every filter_ is in exactly one table, or tested, or can never be met."""
    named = {number: found for number, filter_ in enumerate(filters) if (found := _named(filter_)) is not None}
    exact = Counter(_columns(needs) for needs, _ in named.values() if needs)
    chosen = {columns for columns, count in exact.most_common(TABLES_MAX - 1) if count >= TABLE_ROWS_MIN and columns}
    rows: dict[tuple[Column, ...], dict[tuple[Value, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    tested: list[int] = []
    whole: set[int] = set()
    for number, (needs, is_all) in named.items():
        columns = _columns(needs)
        if columns not in chosen:
            columns = ("stream",) if "stream" in needs else ()
        if not columns:
            tested.append(number)
            continue
        if not is_all or columns != _columns(needs):
            whole.add(number)
        for values in product(*(needs[column] for column in columns)):
            rows[columns][values].append(number)
    tables = [
        Table(columns, {values: tuple(numbers) for values, numbers in found.items()})
        for columns, found in sorted(rows.items(), key=lambda one: str(one[0]))
    ]
    return Index(tuple(tables), tuple(tested), frozenset(whole))


def _columns(needs: Mapping[Column, tuple[Value, ...]]) -> tuple[Column, ...]:
    return tuple(sorted(needs, key=str))


def _named(filter_: Filter) -> tuple[dict[Column, tuple[Value, ...]], bool] | None:
    """The values each column must have one of, and whether these are all equalities; None: no event can have them."""
    values: dict[Column, tuple[Value, ...]] = {}
    if filter_.streams:
        values["stream"] = tuple(dict.fromkeys(filter_.streams))
    if filter_.ops:
        values["op"] = tuple(wanted_ops(filter_.ops))
    is_all = True
    for column, value in filter_.predicate.equalities:
        if not _fits(column, value):
            is_all = False
        elif column in values and value not in values[column]:
            return None
        else:
            values[column] = (value,)
    for column in ("op", "stream"):
        if prod(map(len, values.values())) > ROWS_PER_FILTER_MAX:
            values.pop(column, None)
            is_all = False
    return values, is_all


def _fits(column: Column, value: Value) -> bool:
    """Whether a value is of the column's type. Another value equals nothing, which the test itself knows best."""
    if isinstance(column, str) or not column.cast.startswith(_EXACT):
        bits = 31 if column in _SHORT else 63
        return not isinstance(value, Decimal) and (not isinstance(value, int) or -(1 << bits) <= value < 1 << bits)
    if isinstance(value, str):
        return False
    precision, scale = (int(part) for part in column.cast.removeprefix(_EXACT).rstrip(")").split(","))
    try:
        digits = Decimal(value).quantize(Decimal(1).scaleb(-scale))
    except (InvalidOperation, ValueError):
        return False
    return digits == value and len(digits.as_tuple().digits) <= precision
