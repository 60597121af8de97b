"""SQL over the log: a view per source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from evermark.errors import ConfigError, EvermarkError
from evermark.log.log import Log

_TEXT_MAX = 2000


def query(spark: SparkSession, log: Log, text: str, limit: int) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Columns and rows, at most `limit`, of a statement in which every source is a table of that name."""
    for source in log.sources():
        log.read(spark, source=source).createOrReplaceTempView(source)
    try:
        frame = spark.sql(text).limit(limit)
        columns = list(frame.columns)
        rows = frame.toLocalIterator()
    except PySparkException as error:
        names = ", ".join(log.sources()) or "none yet"
        raise ConfigError(_first_words(error), hint=f"Spark SQL; the tables are {names}") from None
    return columns, _rows(rows)


def _rows(rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
    try:
        for row in rows:
            yield tuple(row)
    except PySparkException as error:
        raise EvermarkError(_first_words(error)) from None


def _first_words(error: PySparkException) -> str:
    """What is wrong and where; not the plan and the Java stack that follow."""
    text = (error.getMessage() or str(error)).split("\nJVM stacktrace")[0].strip()
    return f"query: {text[:_TEXT_MAX]}"
