"""Which subscription wants which event, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from evermark.delivery.model import SubscriptionSpec
from evermark.event import EVENT
from evermark.log.frames import frame_of, with_paths
from evermark.predicate import Alias, Path, match_sql, vetted, wanted_ops
from evermark.predicate.fragment import string_sql
from evermark.predicate.index import Column, Filter, Index, Table, Value, index_of

SUBSCRIPTION = "_subscription"
# Up to here each event is tested for each subscription: a look-up costs more than a few tests.
TESTED_MAX = 16
_KEPT_MAX = 8
_FOUND, _TESTED = "_found", "_tested"


def matched(
    frame: DataFrame,
    specs: Sequence[SubscriptionSpec],
    columns: Sequence[str] = tuple(EVENT.names),
    tested_max: int = TESTED_MAX,
) -> DataFrame:
    """One row per (event, subscription that wants it), with some columns of the event; `_subscription` is the index
    into `specs`.

    JSON is parsed once and each path extracted once, however many predicates use them. Rows keep the order of the
    files; an order that `frame` had is lost, for Spark drops a sort that comes before a join.
    """
    filters = _wishes(tuple((spec.streams, spec.ops, spec.where) for spec in specs))
    wide, alias = with_paths(frame, [filter_.predicate for filter_ in filters])
    # Operations that are never delivered go first, so that a test is about its predicate alone.
    wide = wide.where(f"op in ({', '.join(map(string_sql, wanted_ops(())))})")
    if len(specs) <= tested_max:
        tests = _tests(filters, range(len(filters)), alias)
        return wide.selectExpr(*columns, f"explode({tests}) as {SUBSCRIPTION}")
    index = _index(filters)
    # By a step of its own: there Spark evaluates common parts of several tests once.
    wide = wide.selectExpr("*", f"{_tests(filters, index.tested, alias)} as {_TESTED}")
    for number, table in enumerate(index.tables):
        wide = _looked_up(wide, table, f"{_FOUND}_{number}", alias)
    found = [f"coalesce({_FOUND}_{number}, array())" for number in range(len(index.tables))]
    rows = wide.selectExpr("*", f"explode(concat({', '.join([*found, _TESTED])})) as {SUBSCRIPTION}")
    rest = _rest(filters, index, alias)
    return (rows.where(rest) if rest else rows).select(*columns, SUBSCRIPTION)


# Subscriptions seldom change, and batches are many.
_index = lru_cache(maxsize=_KEPT_MAX)(index_of)


@lru_cache(maxsize=_KEPT_MAX)
def _wishes(asked: tuple[tuple[tuple[str, ...], tuple[str, ...], str | None], ...]) -> tuple[Filter, ...]:
    return tuple(Filter(streams, ops, vetted(where)) for streams, ops, where in asked)


def wanted_by(frame: DataFrame, spec: SubscriptionSpec, more: str | None = None) -> tuple[DataFrame, str]:
    """The frame, perhaps widened, and the condition by which a subscription wants an event; `more` has to hold, too."""
    predicate, and_also = vetted(spec.where), vetted(more)
    wide, alias = with_paths(frame, [predicate, and_also])
    wanted = match_sql(spec.streams, spec.ops, predicate, alias)
    return wide, f"{wanted} and coalesce({and_also.sql(alias)}, false)" if more else wanted


def _tests(filters: Sequence[Filter], numbers: Sequence[int], alias: Alias) -> str:
    """An array of the filters in `numbers` that an event meets, each tested."""
    # Not by array_compact, which calls a function for each element.
    tests = [f"if({_test(filters[n], alias)}, {n}, -1)" for n in numbers]
    return f"array_remove(array({', '.join(tests)}), -1)" if tests else "cast(array() as array<int>)"


def _test(filter_: Filter, alias: Alias) -> str:
    if filter_.streams or filter_.ops:
        return match_sql(filter_.streams, filter_.ops, filter_.predicate, alias)
    return filter_.predicate.sql(alias)


def _looked_up(frame: DataFrame, table: Table, name: str, alias: Alias) -> DataFrame:
    """The frame with a column of the filters that a table has for each row."""
    rows = _frame_of(frame.sparkSession, table, name)
    on = None
    for n, column in enumerate(table.columns):
        mine = frame[column if isinstance(column, str) else alias(column)] == rows[f"{name}_{n}"]
        on = mine if on is None else on & mine
    return frame.join(F.broadcast(rows), on, "left").drop(*(f"{name}_{n}" for n in range(len(table.columns))))


def _frame_of(spark: SparkSession, table: Table, name: str) -> DataFrame:
    columns = list(zip(*table.rows, strict=True))
    arrays = [_values(of, values) for of, values in zip(table.columns, columns, strict=True)]
    arrays.append(pa.array(list(table.rows.values()), pa.list_(pa.int32())))
    names = [*(f"{name}_{n}" for n in range(len(table.columns))), name]
    return frame_of(spark, pa.table(arrays, names=names))


def _values(column: Column, values: Sequence[Value]) -> pa.Array:
    if isinstance(column, Path) and column.cast.startswith("decimal("):
        precision, scale = (int(part) for part in column.cast.removeprefix("decimal(").rstrip(")").split(","))
        return pa.array([Decimal(str(value)) for value in values], pa.decimal128(precision, scale))
    kind = EVENT.field(column).type if isinstance(column, str) else _KINDS[column.cast]
    return pa.array(values, kind)


_KINDS = {"string": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64(), "double": pa.float64()}


def _rest(filters: Sequence[Filter], index: Index, alias: Alias) -> str | None:
    """The checks left for filters that a table found, as one expression over the number of the filter."""
    conditions: dict[int, str] = {}
    for table in index.tables:
        for numbers in table.rows.values():
            for n in numbers:
                condition = _test(filters[n], alias) if n in index.whole else filters[n].predicate.residual_sql(alias)
                if condition is not None:
                    conditions[n] = condition
    return _by_number(sorted(conditions.items())) if conditions else None


def _by_number(conditions: Sequence[tuple[int, str]]) -> str:
    """A tree of comparisons: a filter's condition is found in a few steps, and only that one is evaluated."""
    if len(conditions) == 1:
        number, condition = conditions[0]
        return f"if({SUBSCRIPTION} = {number}, coalesce({condition}, false), true)"
    half = len(conditions) // 2
    low, high = _by_number(conditions[:half]), _by_number(conditions[half:])
    return f"if({SUBSCRIPTION} < {conditions[half][0]}, {low}, {high})"
