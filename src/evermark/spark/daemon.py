"""Spark's Python daemon with our imports done before it forks: workers start warm and share the pages."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import sys
from functools import partial
from typing import IO, Any, NoReturn

import psycopg  # noqa: F401
import pyarrow.compute
import pyarrow.parquet
import pyspark.worker
from pyspark import daemon
from pyspark.util import handle_worker_exception

# What the tasks run: reading a source into the log, and delivering from it.
import evermark.ingest.reading
import evermark.spark.deliver
import evermark.spark.replay  # noqa: F401
from evermark.errors import EngineError
from evermark.sources.kinds import task_modules

for _module in task_modules():
    importlib.import_module(_module)


def run(unfit: str | None = None) -> None:
    """Fork workers until Spark ends. `unfit`: why this machine cannot run tasks; each of them says so, and fails."""
    if unfit is not None:
        worker: Any = pyspark.worker
        worker.main = partial(_refuse, unfit)
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


def _refuse(unfit: str, _infile: IO[bytes], outfile: IO[bytes]) -> NoReturn:
    """A task that fails before it has begun, as Spark's own worker fails."""
    handle_worker_exception(EngineError(unfit), outfile, hide_traceback=True)
    sys.exit(-1)


if __name__ == "__main__":
    run()
