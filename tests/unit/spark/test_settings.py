"""Settings of a Spark session: whose word counts."""

from __future__ import annotations

from pathlib import Path

from evermark.spark.session import settings_of


def test_the_operators_settings_win_but_for_those_that_a_lane_cannot_do_without() -> None:
    """GIVEN an operator's conf WHEN a session is made THEN memory is theirs; lanes are not doubled or ended."""
    given = {
        "spark.driver.memory": "3g",
        "spark.speculation": "true",
        "spark.python.worker.idleTimeoutSeconds": "10",
        "spark.python.worker.killOnIdleTimeout": "true",
        "spark.sql.execution.pyspark.udf.idleTimeoutSeconds": "10",
    }
    found = settings_of(Path("/home"), Path("/scratch"), given, "a.daemon")
    assert found["spark.driver.memory"] == "3g"
    assert found["spark.python.daemon.module"] == "a.daemon"
    assert found["spark.speculation"] == "false"
    assert found["spark.python.worker.idleTimeoutSeconds"] == "0"
    assert found["spark.python.worker.killOnIdleTimeout"] == "false"
    assert found["spark.sql.execution.pyspark.udf.idleTimeoutSeconds"] == "0"
