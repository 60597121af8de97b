"""The examples of receivers run as they are, and do what the docs promise."""

from __future__ import annotations

import asyncio
import base64
import http.client
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evermark_receiver import sign

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "receivers"
SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()


def delivery(*event_ids: str, secret: str = SECRET) -> tuple[dict[str, str], bytes]:
    """A signed request as Evermark makes it: one event alone, several as a bundle."""
    about = {"v": 1, "source": "shop", "stream": "public.orders", "key": "42", "op": "insert"}
    items = [{"type": "t", "data": {"n": 1}, "evermark": {**about, "id": one}} for one in event_ids]
    body = json.dumps(items[0] if len(items) == 1 else {"events": items}).encode()
    return sign("+".join(event_ids), int(time.time()), body, secret), body


class Running:
    """The WSGI example as a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def post(self, *event_ids: str, secret: str = SECRET) -> dict[str, Any]:
        headers, body = delivery(*event_ids, secret=secret)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", "/hooks", body, headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer

    def end(self, how: signal.Signals) -> list[str]:
        """The ids its handler ran for, in order."""
        self.process.send_signal(how)
        out, _ = self.process.communicate(timeout=10)
        return [line.split()[1] for line in out.splitlines() if line.startswith("handled ")]


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "wsgi_app.py", "0"],
        env={**os.environ, "EVERMARK_SECRET": SECRET, "DEDUP": str(folder / "handled.sqlite")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield Running(process, int(process.stdout.readline().strip().rstrip("/").rsplit(":", 1)[1]))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def load(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("EVERMARK_SECRET", f"{SECRET} {SECRET}")
    monkeypatch.setenv("DEDUP", str(folder / "handled.sqlite"))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_wsgi_example_handles_each_event_once_over_restarts(tmp_path: Path, ending: signal.Signals) -> None:
    """GIVEN the example as a process WHEN singles, bundles and duplicates come, also after a restart THEN once each."""
    with running(tmp_path) as app:
        assert app.post("a") == {"status": 200, "reason": "taken", "handled": 1, "duplicates": 0}
        assert app.post("a")["duplicates"] == 1
        assert app.post("a", "b", "c") == {"status": 200, "reason": "taken", "handled": 2, "duplicates": 1}
        assert app.post("d", secret="whsec_" + base64.b64encode(b"o" * 24).decode())["status"] == 401
        assert app.end(ending) == ["a", "b", "c"]
    with running(tmp_path) as app:
        assert app.post("a")["duplicates"] == 1
        assert app.post("b", "c", "d") == {"status": 200, "reason": "taken", "handled": 1, "duplicates": 2}
        assert app.end(ending) == ["d"]


async def drive(app: Any, headers: dict[str, str], body: bytes, method: str = "POST") -> int:
    """One request as an ASGI server makes it."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": "/hooks", "headers": raw}, receive, send)
    status: int = sent[0]["status"]
    return status


def test_the_asgi_example_handles_each_event_once_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN the example, loaded twice as by two workers WHEN duplicates come to both THEN each is handled once."""
    caplog.set_level(logging.INFO, logger="example")
    one, other = load("asgi_app", tmp_path, monkeypatch), load("asgi_app", tmp_path, monkeypatch)

    async def scenario() -> list[int]:
        return [
            await drive(one.app, *delivery("a")),
            await drive(other.app, *delivery("a", "b")),
            await drive(one.app, *delivery("b")),
            await drive(one.app, {}, b"", method="GET"),
        ]

    assert asyncio.run(scenario()) == [200, 200, 200, 405]
    assert [record.getMessage().split()[1] for record in caplog.records if record.name == "example"] == ["a", "b"]
