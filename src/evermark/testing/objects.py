"""An S3 server for tests, and a proxy before it that is down, slow, refuses, or loses answers."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from evermark.secrets import KeyRef
from evermark.storage.access import Access
from evermark.testing.until import until

ACCESS_KEY, SECRET_KEY = "AKIAEVERMARKTESTS", "not-a-secret-but-looked-for-in-texts"
_OF_A_HOP = ("connection", "transfer-encoding", "content-length", "server", "date")


class S3Server:
    """moto, in a process of its own. What is put is in its memory, and gone with it."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("access", ACCESS_KEY), ("secret", SECRET_KEY)):
            (folder / name).write_text(f"{text}\n")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evermark.testing.s3_process", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._answers, "the S3 server answers", timeout_s=60)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key_files(self) -> tuple[Path, Path]:
        return self._folder / "access", self._folder / "secret"

    def access(self, endpoint: str | None = None) -> Access:
        access, secret = (KeyRef("file", str(file.absolute())) for file in self.key_files)
        return Access(endpoint or self.endpoint, "us-east-1", access, secret)

    def bucket(self) -> str:
        """A new one; its name."""
        name = f"evermark-{uuid.uuid4().hex[:12]}"
        self._ask("PUT", f"/{name}")
        return name

    def _answers(self) -> bool:
        with suppress(OSError):
            return self._ask("GET", "/moto-api/") == 200
        return False

    def _ask(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path)
            return connection.getresponse().status
        finally:
            connection.close()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Fault:
    """What a proxy does with a request: `answer` instead of asking the server; or `lose` the server's answer, or hold
    it back for `late_s`.
    """

    def __init__(self, *, answer: tuple[int, str] | None = None, lose: bool = False, late_s: float = 0) -> None:
        self.answer, self.lose, self.late_s = answer, lose, late_s


Choose = Callable[[str, str], Fault | None]  # of a method and a path


class FaultyProxy:
    """In front of an `S3Server`. `choose` is asked for each request; `seen` has all of them."""

    def __init__(self, server: S3Server) -> None:
        self.choose: Choose = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self.ended = threading.Event()
        self.connections: list[socket.socket] = []
        proxy, port = self, server.port

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *given: Any) -> None: ...

            def setup(self) -> None:
                super().setup()
                proxy.connections.append(self.connection)

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy.seen.append((self.command, self.path))
                fault = proxy.choose(self.command, self.path)
                if fault is not None and fault.answer is not None:
                    status, code = fault.answer
                    told = f"<Error><Code>{code}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>"
                    self._give(status, {}, told.encode())
                    return
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    found = answer.read()
                finally:
                    connection.close()
                if fault is not None and fault.late_s:
                    proxy.ended.wait(fault.late_s)
                if fault is not None and fault.lose:
                    self.close_connection = True
                    with suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self._give(answer.status, dict(answer.getheaders()), found)

            def _give(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in _OF_A_HOP:
                        self.send_header(name, value)
                length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
                self.send_header("content-length", length)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
