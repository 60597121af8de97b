"""A Spark that does not start, for real: one line, quickly, and the rest in spark.log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

_START = """
import json, os, sys
from pathlib import Path
from evermark.embedded.java import cache_folder, ensure_java
from evermark.errors import EvermarkError
os.environ["JAVA_HOME"] = str(ensure_java(cache_folder() / "java"))
from evermark.spark.session import make_session
master, conf, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
try:
    make_session("start", master, folder / "scratch", conf, noise=folder / "spark.log").stop()
except EvermarkError as error:
    print(f"{error.kind}: {error}")
"""


@pytest.mark.parametrize(
    ("master", "conf", "told", "kept"),
    [
        (
            "local[1]",
            {"spark.driver.memory": "lots"},
            "engine: Spark could not be started: Invalid maximum heap",
            "Xmx",
        ),
        ("local[1]", {"spark.driver.memory": "400000g"}, "engine: Spark could not be started: Could not reserve", "VM"),
        ("local[1]", {"spark.driver.port": "1"}, "engine: Spark could not be started: IllegalArgument", "\tat org."),
        ("spark://127.0.0.1:1", {}, "unreachable: the Spark master at spark://127.0.0.1:1 does not answer", ""),
    ],
)
def test_a_spark_that_does_not_start_says_one_line_and_a_hint(
    tmp_path: Path, master: str, conf: dict[str, str], told: str, kept: str
) -> None:
    """GIVEN a setting or a master that cannot work WHEN a session is made THEN two lines are said, nothing of Java."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _START, master, json.dumps(conf), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    took_s = time.monotonic() - began
    said = done.stdout.splitlines()
    assert done.stderr == ""
    assert len(said) == 2
    assert said[0].startswith(told)
    assert said[1].startswith("  hint: ")
    if kept:
        assert kept in (tmp_path / "spark.log").read_text()
        assert str(tmp_path / "spark.log") in said[1]
    assert took_s < 45
