"""Beside a native subscriber of Postgres, under a random workload: source, subscriber and log have the same tables."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from evermark.testing.chaos_oracle import copied_with_deaths, mended_with_deaths, walk
from evermark.testing.oracle import OracleScene, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS = 40
_STEPS = 200


def test_the_log_implies_what_a_native_subscriber_has(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN tables of all types with rows in them WHEN they are copied beside a random workload by a process that is
    killed, and their slot is lost while nobody reads THEN source, native subscriber and log have equal tables."""
    seed = random.randrange(10**9)
    print(f"seed {seed}; the long version: make chaos ARGS='--oracle {seed}'")
    with places(tmp_path) as at, OracleScene(tmp_path, at, seed) as scene:
        scene.workload.fill(_ROWS)
        running = copied_with_deaths(scene, ("copy.marked",))
        assert scene.requires_equal(spark) > 0
        walk(scene, _STEPS)
        assert running.terminate() == 0
        walk(scene, _STEPS)
        running = mended_with_deaths(scene, ())
        walk(scene, _STEPS)
        assert scene.requires_equal(spark) > 0
        assert running.terminate() == 0
