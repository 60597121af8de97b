"""Making the class archive of Spark's JVM (see `home`): `make setup` runs this module."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from evermark.embedded.java import cache_folder, ensure_java
from evermark.spark.home import adopt, archive_of, is_whole, making_options, spark_home
from evermark.spark.session import JAVA_OPTIONS, make_session

_MAKE_TIMEOUT_S = 300
_MASTER = "local[2]"


def make() -> Path:
    """Start Spark once in a process of its own, so that its classes are archived; the archive."""
    java_home = str(ensure_java(cache_folder() / "java"))
    archive = archive_of(java_home, spark_home(_MASTER))
    adopt(archive)
    if not is_whole(archive):
        archive.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, so that it appears whole: a Spark that starts meanwhile starts without one.
        with tempfile.TemporaryDirectory(prefix=".archive-", dir=archive.parent) as scratch:
            draft = Path(scratch) / archive.name
            subprocess.run(
                [sys.executable, "-m", "evermark.spark.archive", "--once", str(draft)],
                env={**os.environ, "JAVA_HOME": java_home},
                check=True,
                capture_output=True,
                timeout=_MAKE_TIMEOUT_S,
            )
            draft.replace(archive)
    return archive


def _read(batch: DataFrame, _: int) -> None:
    batch.collect()


def _once(draft: Path) -> None:
    """A small pipeline, so that all the classes that a pipeline needs are loaded."""
    scratch = draft.parent
    options = f"{JAVA_OPTIONS} {making_options(draft)}"
    conf = {"spark.driver.extraJavaOptions": options}
    spark = make_session("archive", _MASTER, scratch, conf, noise=scratch / "noise")
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
    # The archive is written while the JVM ends, which it does when its stdin is closed.
    jvm.stdin.close()
    jvm.wait(_MAKE_TIMEOUT_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        _once(Path(sys.argv[2]))
    else:
        make()
