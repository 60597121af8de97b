"""Log rows as Spark DataFrames, by methods of the frame alone: nothing of Spark is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from evermark.event import EVENT, TAKEN, TIMESTAMP
from evermark.log.format import KEPT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from evermark.predicate import Alias, Predicate

_SPARK_TYPES = {
    pa.string(): "string",
    pa.int32(): "int",
    pa.int64(): "bigint",
    TIMESTAMP: "timestamp",
    pa.list_(pa.string()): "array<string>",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
}


def _spark_type(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_spark_type(field.type)}' for field in kind)}>"
    return _SPARK_TYPES[kind]


# Read with this and never inferred: Spark would open a file to find out what we know. A file from before a column was
# added has nulls in it.
SCHEMA, TAKEN_SCHEMA, KEPT_SCHEMA = (
    ", ".join(f"{f.name} {_spark_type(f.type)}" for f in schema) for schema in (EVENT, TAKEN, KEPT)
)


def files_frame(spark: SparkSession, paths: Sequence[str], schema: str = SCHEMA) -> DataFrame:
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*paths)


def with_paths(frame: DataFrame, predicates: Sequence[Predicate]) -> tuple[DataFrame, Alias]:
    """The frame with every JSON path of the predicates extracted once, and the name of each path's column."""
    from evermark.predicate import variant_sql  # here: Spark loads this module at every start, for its schema

    paths = list(dict.fromkeys(path for predicate in predicates for path in predicate.paths))
    names = {path: f"_path_{i}" for i, path in enumerate(paths)}
    variants = {path.column: f"_variant_{path.column}" for path in paths}
    if variants:
        frame = frame.selectExpr("*", *[f"{variant_sql(column)} as {name}" for column, name in variants.items()])
        frame = frame.selectExpr(
            "*", *[f"{path.extract_sql(variants[path.column])} as {name}" for path, name in names.items()]
        )

    return frame, names.__getitem__


def where_matches(frame: DataFrame, where: str) -> DataFrame:
    """Keep the events a predicate matches, with the meaning it has in a subscription."""
    from evermark.predicate import vet

    columns = frame.columns
    predicate = vet(where)
    wide, alias = with_paths(frame, [predicate])
    return wide.where(f"coalesce({predicate.sql(alias)}, false)").select(*columns)
