"""Real node processes, started through the command line, and a small client that talks to them."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    EventKind,
    block_from,
    cookie_from,
    event_from,
    make_event,
    verify_chain,
    verify_event,
)

_ids = itertools.count()


def message(stream: str, text: str = "", **more: Any) -> dict[str, Any]:
    """A message that is like no other, as it goes over the wire."""
    number = next(_ids)
    payload = json.dumps({"text": text or f"message {number}"})
    fields: dict[str, Any] = {"at_us": 1_700_000_000_000_000 + number, "nonce": str(number), "payload": payload} | more
    return make_event(stream, EventKind.MESSAGE, "alice", **fields).wire()


def control(stream: str, kind: EventKind, **more: Any) -> dict[str, Any]:
    return make_event(stream, kind, "alice", at_us=1, nonce=str(next(_ids)), **more).wire()


class Client:
    """One connection to one node."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self.port = port
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def call(self, method: str, path: str, body: Any = None, **query: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        target = f"{path}?{urlencode(query)}" if query else path
        self._connection.request(method, target, data, self._headers)
        response = self._connection.getresponse()
        said = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(said) if is_json else said.decode()

    def good(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        status, answer = self.call(method, path, body, **query)
        assert status in {200, 201}, answer
        return answer

    def refused(self, method: str, path: str, body: Any = None, **query: Any) -> str:
        """The code of the refusal, which always comes with a message and a hint."""
        status, answer = self.call(method, path, body, **query)
        assert status >= 400, answer
        assert answer["message"]
        assert answer["hint"]
        return str(answer["code"])

    def create(self, stream: str, **more: Any) -> Any:
        return self.good("PUT", f"/v1/streams/{stream}", {"kind": "channel", "creator": "alice"} | more)

    def add(self, stream: str, *events: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = self.good("POST", f"/v1/streams/{stream}/events", {"events": events})
        return list(answer["events"])

    def say(self, stream: str, count: int) -> list[str]:
        """Add new messages; their hashes."""
        return [added["hash"] for added in self.add(stream, *[message(stream) for _ in range(count)])]

    def view(self, stream: str, cookie: Cookie | None = None) -> View:
        asked = cookie.wire() if cookie is not None else {}
        return View(self.good("GET", f"/v1/streams/{stream}", **asked))

    def history(self, stream: str) -> tuple[list[Block], list[BlockEvent]]:
        """The whole stream, verified from its first block on."""
        view = self.view(stream)
        end = view.blocks[0].number
        blocks: list[Block] = []
        while len(blocks) < end:
            page = self.good("GET", f"/v1/streams/{stream}/miniblocks", **{"from": len(blocks), "to": end})
            blocks += [block_from(block, stream) for block in page["blocks"]]
            assert page["next"] == len(blocks)
        blocks += view.blocks
        assert verify_chain(blocks, START) == view.cookie
        return blocks, view.minipool

    def hashes(self, stream: str) -> list[str]:
        """Of all events of a stream, in order."""
        blocks, pool = self.history(stream)
        return [event.hash for block in blocks for event in block.events] + [event.hash for event in pool]

    def close(self) -> None:
        self._connection.close()


class View:
    """What a node answers to `get stream`, or sends in a sync."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.stream = str(answer["stream"])
        self.reset = bool(answer["reset"])
        self.blocks = [block_from(block, self.stream) for block in answer["blocks"]]
        self.minipool = [event_from(event) for event in answer["minipool"]]
        self.cookie = cookie_from(answer["cookie"])
        for event in self.minipool:
            verify_event(self.stream, event)

    @property
    def hashes(self) -> list[str]:
        sealed = [event.hash for block in self.blocks for event in block.events]
        return sealed + [event.hash for event in self.minipool]


class Node:
    """One `evermark blocknode serve`."""

    def __init__(self, data: Path, *options: str, faults: Sequence[Mapping[str, Any]] = (), port: int = 0) -> None:
        self.data, self._options = data, list(options)
        if faults:
            self._options += ["--faults", json.dumps(list(faults))]
        self.port = port
        self.about: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        where = ["--data", str(self.data), "--port", str(self.port), "--json"]
        command = [sys.executable, "-m", "evermark.cli.main", "blocknode", "serve", *where, *self._options]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EVERMARK_")}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.stderr.read() if self._process.stderr else ""
        self.about = json.loads(line)
        self.port = int(self.about["port"])
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self, token: str | None = None) -> Client:
        return Client(self.port, token)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> tuple[int, str]:
        process, self._process = self._process, None
        if process is None:
            return 0, ""
        process.send_signal(how)
        _, said = process.communicate(timeout=20)
        return process.returncode, said

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
