"""A real standalone Spark cluster for tests, out of the pip package: a master and workers, gone afterwards.

Where this process is root each worker has a mount namespace of its own, in which folders of the driver are empty: an
executor that needs a file of the driver does not find it, as on another machine.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from evermark.embedded.java import ensure_java
from evermark.testing.servers import free_port
from evermark.testing.until import until

_START_S = 180.0
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_JAVA = "-Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"


class SparkWorker:
    """One worker, with the executors it has started."""

    def __init__(self, cluster: SparkCluster, number: int) -> None:
        self._cluster, self._number = cluster, number
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, without: Sequence[str] = ()) -> None:
        """`without`: variables that its machine does not have."""
        folder = self._cluster.folder / f"worker-{self._number}"
        folder.mkdir(exist_ok=True)
        command = [
            *self._cluster.command("org.apache.spark.deploy.worker.Worker"),
            "--host", "127.0.0.1", "--port", "0", "--webui-port", "0", "--cores", str(self._cluster.cores),
            "--memory", "2g", "--work-dir", str(folder), self._cluster.url,
        ]  # fmt: skip
        self._process = self._cluster.begin(f"worker-{self._number}", command, hidden=True, without=without)

    @property
    def processes(self) -> list[psutil.Process]:
        """The worker and all it has started."""
        if self._process is None or self._process.poll() is not None:
            return []
        with suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self._process.pid)
            return [mine, *mine.children(recursive=True)]
        return []

    def executors(self) -> list[psutil.Process]:
        found = []
        for process in self.processes:
            with suppress(psutil.Error):
                if _EXECUTOR in process.cmdline():
                    found.append(process)
        return found

    def kill(self) -> None:
        """As the machine would die: worker, executors and their Python processes, without a word."""
        if self.processes:
            kill_with_children(self.processes[0])
        if self._process is not None:
            self._process.wait()


class SparkCluster:
    """A master and workers on 127.0.0.1, each worker with so many cores. Workers do not see the folders `hidden`."""

    def __init__(self, folder: Path, workers: int, cores: int, env: Mapping[str, str], hidden: Sequence[Path]) -> None:
        self.folder = folder
        self.cores = cores
        self._port = free_port()
        self._hidden = tuple(hidden) if can_hide() else ()
        self._home = _spark_home()
        java = str(ensure_java(folder / "java"))
        # As Spark's own start script says it: without the version of Scala no executor can be started.
        self._env = {**env, "JAVA_HOME": java, "SPARK_HOME": str(self._home), "SPARK_SCALA_VERSION": "2.13"}
        self._master: subprocess.Popen[bytes] | None = None
        self.workers = [SparkWorker(self, number) for number in range(workers)]

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    @property
    def hides(self) -> bool:
        return bool(self._hidden)

    def start(self) -> None:
        command = [
            *self.command("org.apache.spark.deploy.master.Master"),
            "--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0",
        ]  # fmt: skip
        self._master = self.begin("master", command)
        until(self._answers, "the Spark master answers", timeout_s=_START_S)

    def stop(self) -> None:
        for worker in self.workers:
            worker.kill()
        if self._master is not None:
            self._master.kill()
            self._master.wait()

    def command(self, main: str) -> list[str]:
        return [f"{self._env['JAVA_HOME']}/bin/java", *_JAVA.split(), "-cp", f"{self._home}/jars/*", main]

    def begin(
        self, name: str, command: Sequence[str], *, hidden: bool = False, without: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in self._env.items() if key not in without}
        shown = list(command)
        if hidden and self._hidden:
            mounts = " && ".join(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in self._hidden)
            shown = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh", *shown]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(shown, env=env, stdout=log, stderr=log, start_new_session=True)

    def _answers(self) -> bool:
        assert self._master is not None and self._master.poll() is None, f"the master ended: {self.folder}/master.log"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False


def _spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    assert found is not None and found.origin is not None, "there is no pyspark"
    return Path(found.origin).resolve().parent


def can_hide() -> bool:
    return os.geteuid() == 0 and sys.platform == "linux" and shutil.which("unshare") is not None


@contextmanager
def spark_cluster(
    folder: Path, *, workers: int = 2, cores: int = 4, env: Mapping[str, str], hidden: Sequence[Path] = ()
) -> Iterator[SparkCluster]:
    """A master that runs, and workers to start. `env` is their environment: as on another machine, not the driver's."""
    cluster = SparkCluster(folder, workers, cores, env, hidden)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def executor_of_a_lane(cluster: SparkCluster) -> psutil.Process | None:
    """The executor in which a lane is at work: one of its Python processes has a connection to the driver."""
    for worker in cluster.workers:
        for executor in worker.executors():
            with suppress(psutil.Error):
                if any(_is_connected(process) for process in executor.children(recursive=True)):
                    return executor
    return None


def executors_at(cluster: SparkCluster, port: int) -> list[psutil.Process]:
    """The executors whose Python processes have connections to this port: they post to the receiver behind it."""
    found = []
    for worker in cluster.workers:
        for executor in worker.executors():
            with suppress(psutil.Error):
                if any(_is_connected(process, port) for process in executor.children(recursive=True)):
                    found.append(executor)
    return found


def _is_connected(process: psutil.Process, port: int | None = None) -> bool:
    """To this port, or to any."""
    return any(
        connection.status == "ESTABLISHED" and port in (None, connection.raddr.port)
        for connection in process.net_connections("tcp")
    )


def kill_with_children(process: psutil.Process) -> None:
    """Kill -9, with all it has started, as a machine would die."""
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.kill()
