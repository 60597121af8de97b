"""`make chaos ARGS="--oracle SEED"`: the oracle for a long time, with a death at every step of copies and of repairs.

Tables with rows are copied beside the workload, the process killed at each failpoint of a copy. Then the slot is
dropped while nobody reads, twice: the first time it is repaired undisturbed, the second time with a death at each step.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from evermark import failpoint
from evermark.embedded.binaries import Binaries
from evermark.embedded.java import ensure_java
from evermark.log import kept_table
from evermark.testing.commands import REAL
from evermark.testing.lost_slot import SLOT, slot_is_dropped
from evermark.testing.oracle import OracleScene, busy, places
from evermark.testing.pipeline import PATIENCE_S, Instance, died_by_itself
from evermark.testing.servers import system_binaries
from evermark.testing.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 400
# Tables are altered and emptied while a repair reads them, not faster than it can begin again.
REST_S = 10.0
STEPS = 4000
# Once the slot has its old name, the gap is closed.
_LISTS_COLUMNS = 15
_MENDED = "the gap is closed"


@contextmanager
def _spark(folder: Path) -> Iterator[SparkSession]:
    from evermark.spark.session import make_session

    os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
    session = make_session("evermark-oracle", "local[2]", folder / "scratch", {"spark.sql.shuffle.partitions": "2"})
    try:
        yield session
    finally:
        session.stop()


def oracle_asked(seed: int) -> int:
    """How many rows were compared. Raises, with the seed, when a table is not everywhere the same."""
    with tempfile.TemporaryDirectory(prefix="evermark-oracle-") as root, _spark(Path(root)) as spark:
        kept_table.KEPT_FROM_ROWS = 0  # so that the tables are kept, and read from what was kept
        folder = Path(root) / "scene"
        Path(root).chmod(0o711)
        folder.mkdir(mode=0o711)
        with places(folder, _binaries(seed)) as at, OracleScene(folder, at, seed) as scene:
            more = [kind.sql for columns in at.more.values() for kind in columns.values()]
            sys.stderr.write(f"columns of this server's own: {', '.join(more) or 'none'}\n")
            scene.workload.fill(ROWS)
            running = copied_with_deaths(scene, failpoint.COPY)
            rows = _told("copied, with a death at each step", scene, spark)
            walk(scene, STEPS)
            rows += _told("read", scene, spark)
            for title, kills in (("slot lost", ()), ("slot lost, with a death at each step", failpoint.MEND)):
                assert running.terminate() == 0
                walk(scene, STEPS)
                running = mended_with_deaths(scene, kills)
                rows += _told(title, scene, spark)
            walk(scene, STEPS)
            rows += _told("read on", scene, spark)
            assert running.terminate() == 0
    return rows


def _binaries(seed: int) -> Binaries | None:
    """Every other seed on a Postgres of this machine's, if there is one that can publish columns: it has types that the
    one of the wheel lacks, and no generated columns."""
    found = [each for each in system_binaries() if each.major >= _LISTS_COLUMNS]
    return found[-1] if found and seed % 2 else None


def walk(scene: OracleScene, steps: int) -> None:
    for _ in range(steps):
        scene.workload.step()


def copied_with_deaths(scene: OracleScene, kills: tuple[str, ...]) -> Instance:
    """Beside the workload; the instance that ended the copies."""
    with busy(scene.workload):
        for name in kills:
            died_by_itself(scene.up(f"{name}@1"))
        running = scene.up(commands=REAL)
        until(scene.copied, f"all is copied (seed {scene.seed})", timeout_s=PATIENCE_S)
    return running


def mended_with_deaths(scene: OracleScene, kills: tuple[str, ...]) -> Instance:
    """The slot is dropped, with changes in it that nobody has read; the instance that ended the repair."""
    with psycopg.connect(scene.at.source, autocommit=True) as admin:
        until(lambda: slot_is_dropped(admin, SLOT), "the slot is dropped")
    with busy(scene.workload, REST_S):
        for name in kills:
            died_by_itself(scene.up(f"{name}@1"))
        running = scene.up()
        if "repair.done" not in kills:
            until(lambda: running.said(_MENDED), f"{_MENDED} (seed {scene.seed})", timeout_s=PATIENCE_S)
    return running


def _told(title: str, scene: OracleScene, spark: SparkSession) -> int:
    scene.workload.fill(ROWS)  # truncates leave few
    rows = scene.requires_equal(spark)
    sys.stderr.write(f"{title}: {rows} rows are everywhere the same after {scene.workload.steps} steps\n")
    return rows
