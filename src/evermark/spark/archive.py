"""A class archive for Spark's JVM: loading Spark's classes from it takes less than half of the time to start.

`python -m evermark.spark.archive` makes one (`make setup` does). Without one, a JVM that ends properly leaves one
behind for the next start. It is a cache: safe to delete, made anew for another Java, another Spark or another class
path, and ignored by the JVM when it does not fit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame

from evermark.embedded.java import cache_folder, ensure_java
from evermark.spark.home import spark_home

_MAKE_TIMEOUT_S = 300
_MASTER = "local[2]"


def java_options(java_home: str, home: Path) -> str:
    """The JVM's options for using the archive, or for leaving one behind at its end."""
    try:
        archive = _archive(java_home, home)
        archive.parent.mkdir(parents=True, exist_ok=True)
        _adopt(archive)
        if archive.exists():
            return f"-XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
        return f"-XX:ArchiveClassesAtExit={archive}.{os.getpid()} -Xlog:cds=off -Xlog:cds+dynamic=off"
    except OSError:
        return ""  # a home that cannot be written to costs a few seconds at each start, nothing else


def make() -> Path:
    """Start Spark once in a process of its own, so that its classes are archived; the archive."""
    java_home = str(ensure_java(cache_folder() / "java"))
    archive = _archive(java_home, spark_home(_MASTER))
    _adopt(archive)
    if not archive.exists():
        with tempfile.TemporaryDirectory(prefix="evermark-archive-") as scratch:
            subprocess.run(
                [sys.executable, "-m", "evermark.spark.archive", "--once", scratch],
                env={**os.environ, "JAVA_HOME": java_home},
                check=True,
                capture_output=True,
                timeout=_MAKE_TIMEOUT_S,
            )
        _adopt(archive)
    return archive


def _archive(java_home: str, home: Path) -> Path:
    # A conda or virtual environment moved to another place has another class path: its archive would be refused.
    what = f"{Path(java_home).resolve()}|{pyspark.__version__}|{home}"
    return cache_folder() / f"spark-{hashlib.sha256(what.encode()).hexdigest()[:12]}.jsa"


def _adopt(archive: Path) -> None:
    """Take over what an earlier JVM left behind; one that is still running may still be writing."""
    for left in archive.parent.glob(f"{archive.name}.*"):
        if not _running(left.suffix[1:]):
            left.replace(archive)


def _running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def _read(batch: DataFrame, _: int) -> None:
    batch.collect()


def _once(scratch: Path) -> None:
    """What a pipeline does, in small: so that the classes it needs are among those loaded."""
    from evermark.spark.session import make_session

    spark = make_session("archive", _MASTER, scratch, {}, noise=scratch / "noise")
    path = str(scratch / "rows")
    spark.range(10).selectExpr("id", "cast(id as string) as payload").write.parquet(path)
    frame = spark.read.schema("id bigint, payload string").parquet(path)
    frame.selectExpr("explode(array(id)) as id").mapInArrow(lambda batches: batches, "id bigint").collect()
    stream = spark.readStream.schema("id bigint, payload string").parquet(path)
    query = (
        stream.writeStream.option("checkpointLocation", str(scratch / "checkpoint"))
        .foreachBatch(_read)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    jvm: Any = spark.sparkContext._gateway.proc  # type: ignore[union-attr] # noqa: SLF001 - nothing else knows it
    spark.stop()
    # The archive is written while the JVM ends, which it does when nobody is left to talk to it.
    jvm.stdin.close()
    jvm.wait(_MAKE_TIMEOUT_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        _once(Path(sys.argv[2]))
    else:
        make()
