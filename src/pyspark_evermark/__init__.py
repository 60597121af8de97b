"""`spark.read.format("evermark")` and `spark.readStream.format("evermark")`: the log as a Spark source.

Spark registers packages called `pyspark_*` by itself. The format reads the log, never a source: any number of readers
cost the databases behind it nothing.
"""

from __future__ import annotations

import gc
import sys

from pyspark_evermark.source import DefaultSource

__all__ = ["DefaultSource"]


def _is_a_worker() -> bool:
    """Whether this is one of the processes that Spark's daemon forks, and uses again and again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "pyspark.daemon"


if _is_a_worker():
    # After each task and each planning Spark's daemon has a worker look for garbage in all that is loaded. What is
    # loaded here stays for as long as the worker does, so there is nothing to find.
    gc.collect()
    gc.freeze()
