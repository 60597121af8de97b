"""Which rows a reader wants, as far as files can be left out and rows dropped before Spark sees them.

A condition may keep rows that are not wanted, because Spark looks again, and never drops one that is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import EVENT
from evermark.log.read import FileRange

Comparison = Literal["=", "<", "<=", ">", ">=", "in"]

_COMPARED: Mapping[Comparison, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TYPES: Mapping[pa.DataType, type] = {
    pa.string(): str,
    pa.int32(): int,
    pa.int64(): int,
    EVENT.field("event_time").type: datetime,
}
# Text is compared for equality alone: in which order it stands depends on who compares.
_TEXT_COMPARISONS = ("=", "in")

# A task reads files of so many bytes; each is opened, which takes as long as reading some more. Both are what Spark
# itself takes for files: a task in Python costs more to begin than one of the JVM, so there should not be more of them.
TASK_BYTES = 128 * 1024 * 1024
OPENING_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Condition:
    """`value` is a tuple for `in`."""

    column: str
    comparison: Comparison
    value: Any

    @property
    def values(self) -> tuple[Any, ...]:
        return self.value if self.comparison == "in" else (self.value,)


def is_usable(condition: Condition) -> bool:
    """Whether Arrow compares the column with these values as Spark does."""
    if condition.column not in EVENT.names or not condition.values:
        return False
    wanted = _TYPES.get(EVENT.field(condition.column).type)
    if wanted is str and condition.comparison not in _TEXT_COMPARISONS:
        return False
    return all(type(value) is wanted for value in condition.values)


def may_hold(file: FileRange, conditions: Iterable[Condition]) -> bool:
    """Whether some row of a file may be wanted, by what is known of the file."""
    return all(_may_hold(file, condition) for condition in conditions)


def _may_hold(file: FileRange, condition: Condition) -> bool:
    known: dict[str, tuple[Any, Any]] = {
        "batch": (file.batch_min, file.batch_max),
        "partition": (file.partition_min, file.partition_max),
        "event_time": (file.event_time_min, file.event_time_max),
    }
    least, greatest = known.get(condition.column, (None, None))
    if least is None or greatest is None:
        return True
    if condition.comparison in ("<", "<="):
        return bool(_COMPARED[condition.comparison](least, _zoned(condition.value)))
    if condition.comparison in (">", ">="):
        return bool(_COMPARED[condition.comparison](greatest, _zoned(condition.value)))
    return any(least <= _zoned(value) <= greatest for value in condition.values)


def expression(conditions: Sequence[Condition]) -> pc.Expression | None:
    """The same as Arrow's scanner takes it; it leaves out row groups by their statistics, too."""
    parts = [_expression(condition) for condition in conditions]
    return reduce(operator.and_, parts) if parts else None


def _expression(condition: Condition) -> pc.Expression:
    kind = EVENT.field(condition.column).type
    values = [pa.scalar(_zoned(value), kind) for value in condition.values]
    if condition.comparison == "in":
        return pc.field(condition.column).isin(values)
    return _COMPARED[condition.comparison](pc.field(condition.column), values[0])


def _zoned(value: Any) -> Any:
    """A time without a zone is UTC's."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def packed(files: Iterable[FileRange], task_bytes: int = TASK_BYTES) -> list[list[FileRange]]:
    """Files for one task each, in order: small ones together."""
    tasks: list[list[FileRange]] = []
    size = 0
    for file in files:
        cost = file.size + OPENING_BYTES
        if not tasks or size + cost > task_bytes:
            tasks.append([])
            size = 0
        tasks[-1].append(file)
        size += cost
    return tasks
