"""What is said when Spark does not start: one line and a hint."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evermark.error_policy import Action, action_for
from evermark.errors import ConfigError, UnreachableError
from evermark.spark import start_failure
from evermark.spark.start_failure import require_master_answers, start_error

USUAL = """\
WARNING: Using incubator modules: jdk.incubator.vector
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
26/11/16 03:32:32 WARN Utils: Your hostname, vm, resolves to a loopback address: 127.0.0.1
Setting default log level to "WARN".
"""
EXITED = "[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number."
CALLED = "An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.\n: "


@pytest.fixture
def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_master_that_does_not_answer_is_told_at_once(free_port: int) -> None:
    """The error names each address and why, and is of a kind that passes by itself."""
    master = f"spark://127.0.0.1:{free_port},nobody.invalid:7077"
    with pytest.raises(UnreachableError) as caught:
        require_master_answers(master)
    assert caught.value.message.startswith(f"the Spark master at {master} does not answer (127.0.0.1:{free_port}: ")
    assert "nobody.invalid:7077: " in caught.value.message
    assert "\n" not in caught.value.message
    assert action_for(caught.value) is Action.RETRY


def test_a_master_that_swallows_connections_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a server whose queue is full WHEN it is probed THEN the probe ends by its own time-out."""
    monkeypatch.setattr(start_failure, "_PROBE_TIMEOUT_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="timed out"):
            require_master_answers(f"spark://127.0.0.1:{address[1]}")
        for each in waiting:
            each.close()
    assert time.monotonic() - began < 5


def test_one_of_several_masters_is_enough_and_others_are_not_asked(free_port: int, listening: int) -> None:
    """A standby master may be down; masters that are no address have nothing to ask."""
    require_master_answers(f"spark://127.0.0.1:{free_port},127.0.0.1:{listening}")
    for master in ("local[4]", "local-cluster[1,1,1024]", "yarn", "k8s://https://nobody.invalid:1"):
        require_master_answers(master)


@pytest.mark.parametrize("master", ["spark://", "spark://host", "spark://host:port", "spark://a:1,b"])
def test_a_master_without_host_and_port_is_a_mistake_in_the_file(master: str) -> None:
    """Nothing to retry: a person has to write it otherwise."""
    if master.endswith(",b"):
        master = master.replace("a:1", "nobody.invalid:1")
    with pytest.raises(ConfigError, match="has no host and port"):
        require_master_answers(master)


@pytest.mark.parametrize(
    ("written", "raised", "said"),
    [
        ("Invalid maximum heap size: -Xmxlots\nError: Could not create", EXITED, "Invalid maximum heap size: -Xmxlots"),
        (
            (
                'Exception in thread "main" org.apache.spark.SparkException: Executor cores must be a positive number\n'
                "\tat org.apache.spark.deploy.SparkSubmit.main(SparkSubmit.scala)"
            ),
            EXITED,
            "SparkException: Executor cores must be a positive number",
        ),
        (
            "26/11/16 ERROR SparkContext: Error initializing SparkContext.",
            CALLED + "java.lang.ClassNotFoundException: no.such.Class\n\tat java.base/java.net.URLClassLoader",
            "ClassNotFoundException: no.such.Class",
        ),
        ("", EXITED, EXITED),
    ],
)
def test_the_line_that_tells_is_found_in_what_spark_raised_and_wrote(
    tmp_path: Path, written: str, raised: str, said: str
) -> None:
    """One line, without what every start writes and without stack traces; where the rest is, and what was set."""
    noise = tmp_path / "spark.log"
    noise.write_text(USUAL + written)
    error = start_error(RuntimeError(raised), {"spark.executor.cores": "x"}, noise)
    assert error.message == f"Spark could not be started: {said}"
    assert error.hint == f"is spark.conf right? It sets spark.executor.cores; the details are in {noise}"
    assert action_for(error) is Action.RETRY


@pytest.mark.parametrize(
    "written",
    [
        'Exception in thread "main" java.lang.OutOfMemoryError: Java heap space',
        "Error occurred during initialization of VM\nCould not reserve enough space for 419430400KB object heap",
        "# There is insufficient memory for the Java Runtime Environment to continue.",
    ],
)
def test_too_little_memory_is_called_that(tmp_path: Path, written: str) -> None:
    """The hint names the one setting that matters, not all that were set."""
    noise = tmp_path / "spark.log"
    noise.write_text(USUAL + written)
    hint = start_error(RuntimeError(EXITED), {"spark.ui.enabled": "true"}, noise).hint
    assert "spark.driver.memory" in hint
    assert "spark.ui.enabled" not in hint


def test_a_start_that_left_nothing_written_is_still_told(tmp_path: Path) -> None:
    """No file, no lines, no text: the kind of failure is named."""
    assert start_error(ValueError(), {}, tmp_path / "missing").message == "Spark could not be started: ValueError"
    assert start_error(ValueError("odd"), {}, None).hint == "the lines above have the details"
