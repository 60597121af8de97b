"""The Spark session: one per process, set up so that small batches are quick and nothing durable is Spark's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext, java_gateway
from pyspark.sql import SparkSession

from evermark.config.spark_master import master_in_effect
from evermark.errors import EngineError
from evermark.spark.home import java_options, spark_home
from evermark.spark.job import run_tasks
from evermark.spark.start_failure import require_master_answers, start_error

# Each line was measured (docs/findings.md): together they take a one-row batch from 284 ms to about 100 ms.
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    # A payload that names a key twice still has paths; refusing it would make every predicate over it say no.
    "spark.sql.variant.allowDuplicateKeys": "true",
    "spark.sql.adaptive.enabled": "false",
    # Scratch needs no checksums, no permissions by forked processes and no rename protocol: losing it costs nothing.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "4",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # It would be in the environment of tasks of frames, and not of others: each kind would have a daemon of its own.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    # After each row Spark adds up how large its batch has become, which takes the longer the more rows it has.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "512",
    "spark.cleaner.periodicGC.interval": "10min",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
}

# A lane is one long task. A second one beside it would only be fenced off, and silence is no reason to end it.
_FORCED = {
    "spark.speculation": "false",
    "spark.python.worker.reuse": "true",
    "spark.python.worker.idleTimeoutSeconds": "0",
    "spark.python.worker.killOnIdleTimeout": "false",
    "spark.sql.execution.pyspark.udf.idleTimeoutSeconds": "0",
    "spark.sql.execution.pyspark.udf.killOnIdleTimeout": "false",
}

_LOOK_UP_BY = "PYSPARK_DRIVER_PYTHON"
# Spark matches error texts with recursive regular expressions: the default stack is too small for a long one.
# Code made for many predicates is one long method, which the JVM would otherwise never compile.
# A JVM that has run out of memory once may be left with threads missing: it ends instead, and is started again. What it
# says of its own failure belongs with its other noise, not on our stdout. Nobody reads the counters that it would
# write into a file of /tmp, twenty times a second.
JAVA_OPTIONS = (
    "-Xss16m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-DontCompileHugeMethods"
    " -XX:-UsePerfData -XX:+ExitOnOutOfMemoryError -XX:+DisplayVMOutputToStderr"
    # Spark makes a class for each new query: the 48 MB that one compiler has by itself were full after a few hundred.
    " -XX:ReservedCodeCacheSize=192m"
)


def make_session(
    app_name: str,
    master: str,
    scratch: Path,
    conf: Mapping[str, str],
    noise: Path | None = None,
    *,
    finds_formats: bool = True,
) -> SparkSession:
    """The SQL session of this process, and Spark with it: see `make_context`."""
    make_context(app_name, master, scratch, conf, noise, finds_formats=finds_formats)
    return sql_session()


def sql_session() -> SparkSession:
    """The SQL session of this process, over its context; made when first asked for: two seconds of processor."""
    if SparkContext._active_spark_context is None:  # noqa: SLF001 - asked otherwise, a Spark without settings is started
        raise EngineError("Spark does not run in this process", hint="it is started again; try again in a moment")
    return SparkSession.builder.getOrCreate()


def make_context(
    app_name: str,
    master: str,
    scratch: Path,
    conf: Mapping[str, str],
    noise: Path | None = None,
    *,
    finds_formats: bool = True,
    daemon: str = "evermark.spark.daemon",
    python: str | None = None,
    cluster: Mapping[str, str] | None = None,
    on_jvm: Callable[[subprocess.Popen[bytes]], None] = lambda _process: None,
) -> SparkContext:
    """Spark in this process. `scratch` may vanish at any time; `conf` is the operator's and wins.

    `noise` takes what the JVM and the Python workers write to stderr: stack traces of sockets closed by a restart and
    the like. What matters of it reaches us as errors. `finds_formats`: Spark looks which formats written in Python are
    installed, as it does by itself. `daemon`: the module that forks Python workers, with what they need loaded.
    `python`: that of the executors, if it is another than this process's. `cluster`: our settings for executors on
    other machines (`cluster.py`). `on_jvm` is given the JVM's process as soon as there is one: seconds before
    Spark runs.

    Raises `UnreachableError` for a `spark://` master that does not answer, and `EngineError` when Spark does not start.
    """
    require_master_answers(master_in_effect(master, conf))
    if python is not None:
        os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    home = spark_home(master)
    os.environ["SPARK_HOME"] = str(home)
    settings = SparkConf().setAppName(app_name).setMaster(master)
    settings.setAll(list(settings_of(home, scratch, {**(cluster or {}), **conf}, daemon).items()))
    try:
        with _jvm_to(noise, on_jvm), nullcontext() if finds_formats else _without_look_up():
            return SparkContext.getOrCreate(settings)
    except Exception as error:
        raise start_error(error, conf, noise) from error


def settings_of(home: Path, scratch: Path, conf: Mapping[str, str], daemon: str) -> dict[str, str]:
    """Our settings, then the operator's, which win, then the settings that a lane cannot do without."""
    return {
        **_DEFAULTS,
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} {java_options(os.environ.get('JAVA_HOME', ''), home)}",
        "spark.local.dir": str(scratch / "spark"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.python.daemon.module": daemon,
        **conf,
        **_FORCED,
    }


@contextmanager
def _without_look_up() -> Iterator[None]:
    """Looking for formats, Spark starts two Python processes: half a second. Not if this variable names no Python."""
    kept = os.environ.get(_LOOK_UP_BY)
    os.environ[_LOOK_UP_BY] = "no-formats-are-looked-for"
    try:
        yield
    finally:
        os.environ.pop(_LOOK_UP_BY)
        if kept is not None:
            os.environ[_LOOK_UP_BY] = kept


def warm_up(context: SparkContext) -> threading.Thread:
    """Start the first Python worker now, beside the rest of the start: it takes as long as all the rest."""

    def work() -> None:
        with suppress(Exception):  # if something is wrong, the first job says so
            run_tasks(context, 1, nothing, "the first task failed")

    thread = threading.Thread(target=work, name="warm up", daemon=True)
    thread.start()
    return thread


def nothing(_number: int) -> tuple[()]:
    """A task that has nothing to do."""
    return ()


@contextmanager
def _jvm_to(noise: Path | None, on_jvm: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """The JVM that PySpark starts meanwhile writes its stderr to `noise`. Nothing else of this process is touched:
    its other threads may be starting other programs.
    """
    gateway: Any = java_gateway
    kept = gateway.Popen
    with ExitStack() as stack:
        named: dict[str, Any] = {}
        if noise is not None:
            noise.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # after a JVM's death, its last words are read in there
                noise.replace(noise.with_name(f"{noise.name}.1"))
            file = os.open(noise, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            stack.callback(os.close, file)
            named["stderr"] = file

        def started(*given: Any, **more: Any) -> Any:
            process = kept(*given, **{**more, **named})
            on_jvm(process)
            return process

        gateway.Popen = started
        try:
            yield
        finally:
            gateway.Popen = kept
