"""SQL over a local log, answered in this process by the Delta library's own engine, DataFusion: no JVM is started.

The log is asked in Spark's SQL. DataFusion answers what means the same to both engines; all else (functions and syntax
that only Spark has, arrays counted from 0, division) it leaves to Spark, by `NeedsSpark`, and also what takes more
memory than `MEMORY_BYTES_MAX`. A query that no engine could answer is a `ConfigError` of one line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from deltalake import QueryBuilder

from evermark.errors import ConfigError, EvermarkError, FormatError
from evermark.event import EVENT
from evermark.log.opened import require_readable
from evermark.log.read import sources_at
from evermark.log.table import open_table
from evermark.settings.problems import nearest
from evermark.storage import Place

MEMORY_BYTES_MAX = 1024**3  # beyond it sorts and groups go to disk, and what cannot is left to Spark
_TEXT_MAX = 300
_DIALECT = "databricks"  # Spark's, with the paths into JSON that Spark has since
# What both engines understand alike, by sqlglot's names for it.
_SAME = frozenset(
    word
    for words in (
        "select from where group having order ordered limit offset distinct with cte subquery table tablealias alias",
        "column identifier star union except intersect join window windowspec values tuple paren",
        "literal null boolean interval var and or not eq neq gt gte lt lte is in between like exists case if",
        "add sub mul neg cast datatype datatypeparam count sum avg min max coalesce upper lower length",
        "rownumber rank denserank lag lead timestamptrunc currenttimestamp currentdate",
    )
    for word in words.split()
)
# From anything to these, and from a text that is written out to anything; else the engines write and count differently.
_SAME_CASTS = ("DATE", "TIMESTAMP", "TIMESTAMPTZ")
_CONFIG = {
    "datafusion.catalog.information_schema": "true",  # show tables
    "datafusion.sql_parser.default_null_ordering": "nulls_min",  # null sorts first, as in Spark
}
_COMMENTS = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_READS = re.compile(
    r"[\s(]*(explain\s+((analyze|verbose|extended|formatted|cost|codegen)\s+)*)?[\s(]*"
    r"(select|with|values|from|table|describe|desc|show)\b",
    re.IGNORECASE,
)
_SHOW_TABLES = re.compile(r"^\s*show\s+tables\s*;?\s*$", re.IGNORECASE)
_TABLES = "select table_name from information_schema.tables where table_schema = 'public'"
_COMMANDS = re.compile(r"\s*(explain|describe|desc|show)\b", re.IGNORECASE)
_NO_COLUMN = re.compile(r"No field named (.+?)\.(?: Did you mean .*)?$", re.MULTILINE)
_NO_TABLE = re.compile(r"table '(?:[^'.]+\.)*([^'.]+)' not found")
_NO_FUNCTION = re.compile(r"Invalid function '([^']+)'")
_FILE = re.compile(r"([^/\s]+)/([^/\s]+\.parquet)")
_NO_CAST = re.compile(r"Cannot cast string '[^']*' to value of \w+ type")
_SYNTAX = re.compile(r'ParserError\("(.*)"\)', re.DOTALL)
_STEPS = re.compile(r"^(?:(?:\w+ error|Error during planning|This feature is not implemented): )+")
_VALID_FIELDS = re.compile(r"Valid fields are (.+?)\.\s*$", re.DOTALL)


class NeedsSpark(ConfigError):
    """This engine cannot answer, and Spark probably can."""


def require_read(text: str) -> None:
    """A query reads: whatever engine is asked, nothing is written, made or dropped by it."""
    bare = _COMMENTS.sub(" ", text)
    if not bare.strip():
        raise ConfigError("query: it is empty", hint='for example: evermark log query "select * from shop limit 10"')
    if not _READS.match(bare):
        raise ConfigError(
            f"query: {bare.split()[0][:40]} is not something the log can be asked",
            hint="a query begins with select, with, values, describe, explain or show",
        )


def query(
    root: Place,
    text: str,
    limit: int,
    spark_knows: Callable[[str], bool] = lambda _: False,
    *,
    own_dialect: bool = False,
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Columns and rows, at most `limit`, of a statement in which every source is a table of that name.

    Times are UTC, without a zone. `spark_knows` says whether Spark has a function of that name. With `own_dialect` the
    statement means what it means to DataFusion.
    """
    require_read(text)
    tables = sources_at(root)
    engine = QueryBuilder(_CONFIG)
    engine.execute(f"set datafusion.runtime.memory_limit = '{MEMORY_BYTES_MAX // 1024**2}M'").read_all()
    for name in tables:
        engine.register(name, open_table(root / name))
    said = _Refusals(root, text, tables, spark_knows, own_dialect)
    try:
        stream = engine.execute(_SHOW_TABLES.sub(_TABLES, text))
    except Exception as error:  # noqa: BLE001 - the engine's errors have no common class
        raise said(error) from None
    if said.differs:
        raise NeedsSpark(f"query: {said.differs}")
    try:
        reader = pa.RecordBatchReader.from_stream(stream)
        first = next(iter(reader), None)  # what needs too much memory or divides by zero shows here, before any row
    except Exception as error:  # noqa: BLE001 - likewise
        raise said(error) from None
    names = [_shown(name) for name in reader.schema.names]
    return names if len(set(names)) == len(names) else reader.schema.names, _rows(first, reader, limit, said)


def difference(text: str) -> str:
    """Why a statement may mean one thing to Spark and another to DataFusion; empty if it means the same."""
    if _COMMANDS.match(_COMMENTS.sub(" ", text)):
        return ""
    if '"' in text:
        return "what stands in double quotes is a text only to Spark"
    if "\\" in text:
        return "a backslash means something only to Spark"
    parsed = _parsed(text)
    if parsed is None:
        return ""  # neither will understand it, and DataFusion says so at once
    for node in parsed.walk():
        if node.key not in _SAME or (node.key == "cast" and not _same_cast(node)):
            return f"this means the same to Spark alone: {node.sql(_DIALECT, normalize_functions=False)[:60]}"
        if node.key == "join" and node.args.get("using"):
            return "the columns of a join with using have their order from Spark"
    return ""


def _same_cast(cast: Any) -> bool:
    return cast.this.key == "literal" or str(cast.to.this.value).upper() in _SAME_CASTS


def _rows(
    first: pa.RecordBatch | None, rest: Iterable[pa.RecordBatch], limit: int, said: _Refusals
) -> Iterator[tuple[Any, ...]]:
    batch, left, more = first, limit, iter(rest)
    while batch is not None and left > 0:
        some = batch.slice(0, left)
        left -= some.num_rows
        yield from zip(*(_values(column) for column in some.columns), strict=True)
        try:
            batch = next(more, None)
        except Exception as error:  # noqa: BLE001 - as above
            raise said(error) from None


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    if pa.types.is_timestamp(column.type) or pa.types.is_nested(column.type):
        return [_without_zone(value) for value in values]
    return values


def _without_zone(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
    if isinstance(value, list):
        return [_without_zone(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_zone(each) for key, each in value.items()}
    return value


def _shown(name: str) -> str:
    """A column's name as the query has it: the engine's own has types and tables in it."""
    name = re.sub(r'IntervalMonthDayNano\("IntervalMonthDayNano \{.*?\}"\)', "interval", name)
    name = re.sub(r'\b[A-Z]\w*\("?([^()"]*)"?\)', r"\1", name)  # Int64(7), Utf8("a")
    return re.sub(r"\b[A-Za-z_]\w*\.(?=\w)", "", name)


def _parsed(text: str) -> Any:
    """The statement as Spark's dialect reads it; None if it cannot."""
    import sqlglot

    logging.getLogger("sqlglot").setLevel(logging.ERROR)  # what it does not know it would say to the terminal
    with suppress(sqlglot.errors.SqlglotError):
        return sqlglot.parse_one(text, read=_DIALECT)
    return None


@dataclass
class _Refusals:
    """The engine's refusals as errors of ours: one line, and what to do."""

    root: Place
    text: str
    tables: Sequence[str]
    spark_knows: Callable[[str], bool]
    own_dialect: bool

    def __post_init__(self) -> None:
        self.differs = "" if self.own_dialect else difference(self.text)

    def __call__(self, error: Exception) -> EvermarkError:
        said = str(error)
        if (damage := self._damage(said)) is not None:
            return damage
        there_are = f"the tables are {', '.join(self.tables)}" if self.tables else "the log has nothing yet"
        dialect_hint = f"the SQL is that of {'DataFusion' if self.own_dialect else 'Spark'}; {there_are}"
        if "Resources exhausted" in said or "not enough memory" in said.lower():
            return NeedsSpark(f"query: it needs more than {MEMORY_BYTES_MAX // 1024**2} MiB of memory")
        if "single SQL statement" in said:
            return ConfigError("query: it has several statements", hint="ask one at a time")
        if found := _NO_COLUMN.search(said):
            return self._no_column(_bare(found[1]), said)
        if found := _NO_TABLE.search(said):
            hint = f"{_meant(found[1], self.tables)}{there_are}"
            return ConfigError(f"query: there is no table {found[1]}", hint=hint)
        if found := _NO_FUNCTION.search(said):
            if self.spark_knows(found[1]):
                return NeedsSpark(f"query: only Spark has the function {found[1]}")
            return ConfigError(f"query: there is no function {found[1]}", hint=dialect_hint)
        if self.differs:
            return NeedsSpark(f"query: {self.differs}")
        if "require unique expression names" in said:
            return ConfigError("query: two columns have the same name", hint="name one of them anew: batch as batch_2")
        if found := _NO_CAST.search(said):
            hint = f"a text is compared with a text, as in key = '1'; {there_are}"
            return ConfigError(f"query: {found[0]}", hint=hint)
        line = _one_line(_SYNTAX.sub(r"\1", said))
        if "not implemented" in said or (_SYNTAX.search(said) and _parsed(self.text) is not None):
            return NeedsSpark(f"query: DataFusion cannot do this ({line.split(' {')[0]})")
        return ConfigError(f"query: {line}", hint=dialect_hint)

    def _damage(self, said: str) -> FormatError | None:
        """The error is no fault of the query: a file that it names is missing or damaged."""
        for table, name in _FILE.findall(said):
            if table in self.tables:
                try:
                    require_readable([str(self.root / table / name)])
                except FormatError as damage:
                    return damage
        return None

    def _no_column(self, name: str, said: str) -> ConfigError:
        if self._means_something_to_spark(name):
            return NeedsSpark(f"query: {name} means something only to Spark")
        told = _VALID_FIELDS.search(said)
        columns = list(dict.fromkeys(_bare(field) for field in told[1].split(", "))) if told else EVENT.names
        quotes = "a text stands in single quotes; " if f'"{name}"' in self.text else ""
        hint = f"{_meant(name, columns)}{quotes}the columns are {', '.join(columns)}"
        return ConfigError(f"query: there is no column {name}", hint=hint)

    def _means_something_to_spark(self, name: str) -> bool:
        """A text in double quotes, `order by all`, or the name of another column of the same select."""
        if self.own_dialect:
            return False
        parsed = _parsed(self.text)
        aliases = {node.alias for node in parsed.walk() if node.alias} if parsed is not None else set()
        return f'"{name}"' in self.text or name.lower() == "all" or name in aliases


def _meant(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}? " if near else ""


def _bare(field: str) -> str:
    """A column's name without its table and its quotes."""
    return field.strip().rpartition(".")[2].strip('"')


def _one_line(said: str) -> str:
    """The last cause, which says what is wrong; not the steps of the engine that led to it."""
    last = said.rsplit("\ncaused by\n", maxsplit=1)[-1].split("\n", maxsplit=1)[0]
    return _STEPS.sub("", last)[:_TEXT_MAX]
