"""The bundled Java runtime, really run: alone, and under Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evermark.embedded import java

pytestmark = pytest.mark.skipif(java.bundled_runtime() is None, reason="the extra [embedded] is not installed")

# In a process of its own: this one's Spark runs on another Java.
SPARK = """
import sys
from pathlib import Path
from evermark.spark.session import make_session
spark = make_session("bundled-java", "local[1]", Path(sys.argv[1]), {})
print(spark.range(10).selectExpr("sum(id)").first()[0], spark._jvm.System.getProperty("java.version"))
spark.stop()
"""


def test_bundled_java_runs_with_the_argument_spark_passes(tmp_path: Path) -> None:
    """The folder we make is a Java home that runs, with the argument that the runtime itself refuses."""
    home = java.ensure_java(tmp_path, {"EVERMARK_JAVA": "bundled"})
    command = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "OpenJDK" in ran.stderr


def test_spark_starts_and_counts_on_the_bundled_java(tmp_path: Path) -> None:
    """A machine without Java runs Spark."""
    home = java.ensure_java(tmp_path, {"EVERMARK_JAVA": "bundled"})
    ran = subprocess.run(
        [sys.executable, "-c", SPARK, str(tmp_path / "scratch")],
        env=os.environ | {"JAVA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    total, version = ran.stdout.split()
    assert total == "45"
    probed = java.probe(home / "bin" / "java")
    assert probed is not None
    assert version.split(".")[0] == str(probed.major)
