"""What tests of the tables that a log implies share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NO_CODE = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@pytest.fixture
def interpreted(spark: SparkSession) -> Iterator[None]:
    """Spark makes no classes for queries over a few rows: that is a third of what they cost. What it makes of the same
    SQL is tested where a table is asked for by an instance, or beside one (`tests/spark/ingest`, the oracle)."""
    for name, value in _NO_CODE.items():
        spark.conf.set(name, value)
    yield
    for name in _NO_CODE:
        spark.conf.unset(name)
