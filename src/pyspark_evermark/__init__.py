"""`spark.read.format("evermark")` and `spark.readStream.format("evermark")`: the log as a Spark source.

Spark registers packages called `pyspark_*` by itself. The format reads the log, never a source: any number of readers
cost the databases behind it nothing.
"""

from __future__ import annotations

from pyspark_evermark.source import DefaultSource

__all__ = ["DefaultSource"]
