"""Spark's Python daemon with our imports done before it forks: workers start warm and share the pages."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import sys

import psycopg  # noqa: F401
import pyarrow.compute
import pyarrow.parquet
import pyspark.worker  # noqa: F401
from pyspark import daemon

# What the tasks run: reading a source into the log, and delivering from it.
import evermark.ingest.reading
import evermark.spark.deliver
import evermark.spark.replay  # noqa: F401
from evermark.sources.kinds import task_modules

for _module in task_modules():
    importlib.import_module(_module)


def run() -> None:
    """Fork workers until Spark ends."""
    pyarrow.array([0])  # the first one of a process loads pandas
    # Tasks read and render in one thread and send in another: neither should wait long for Python's lock.
    sys.setswitchinterval(0.0005)
    # kill -USR1: where every thread stands, into spark.log. Workers inherit it.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Rows are many, short-lived and without cycles: to look for garbage after every 700 of them took a fourth of the
    # time of making them.
    gc.set_threshold(50_000, 20, 20)
    # What is loaded now stays: a worker that looks through all of it for garbage pauses for a tenth of a second.
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    run()
