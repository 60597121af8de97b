"""SQL over the log, answered by Spark: a view per source."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from evermark.errors import ConfigError, EvermarkError
from evermark.event import EVENT
from evermark.log.log import Log
from evermark.log.query import require_read

_TEXT_MAX = 300
_KEYWORDS = ("if", "and", "or", "not", "in", "date", "timestamp", "int", "bigint", "string", "double", "boolean", "div")
_CODE = re.compile(r"^(\[[A-Z0-9_.]+\] )+")
_STATE = re.compile(r"\s*SQLSTATE: \w+;?")


def knows_function(name: str) -> bool:
    """Whether Spark SQL has a function of that name, as far as can be told without starting it."""
    from pyspark.sql import functions

    return hasattr(functions, name.lower()) or name.lower() in _KEYWORDS


def query(spark: SparkSession, log: Log, text: str, limit: int) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Columns and rows, at most `limit`, of a statement in which every source is a table of that name."""
    require_read(text)
    # PySpark writes each refused statement to stderr, as JSON with a traceback; it is said below, in a line.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    for source in log.sources():
        log.read(spark, source=source).createOrReplaceTempView(source)
    try:
        frame = spark.sql(text).limit(limit)
        columns = list(frame.columns)
        rows = frame.toLocalIterator()
    except PySparkException as error:
        names = ", ".join(log.sources()) or "none yet"
        hint = f"the SQL is that of Spark; the tables are {names}, their columns {', '.join(EVENT.names)}"
        raise ConfigError(_first_words(error), hint=hint) from None
    return columns, _rows(rows)


def _rows(rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    try:
        for row in rows:
            yield tuple(_plain(value) for value in row)
    except PySparkException as error:
        raise EvermarkError(_first_words(error)) from None


def _plain(value: Any) -> Any:
    """A struct as names and values."""
    if isinstance(value, Row):
        return value.asDict(recursive=True)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _first_words(error: PySparkException) -> str:
    """What is wrong and where, in a line; not the plan and the Java stack that follow."""
    text = (error.getMessage() or str(error)).strip().split("\n")[0]
    return f"query: {_STATE.sub('', _CODE.sub('', text))[:_TEXT_MAX]}"
