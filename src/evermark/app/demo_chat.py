"""The demo's chat: a block node, rooms with bots in them, and people who talk all the time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evermark.errors import EvermarkError
from evermark.sources.blocks.chain import EventKind, make_event

EVERMARK = [sys.executable, "-m", "evermark.cli.main"]  # the program itself, as its own process
GREETER, HELPER = "greeter", "helper"
BOTS = (GREETER, HELPER)
_ROOMS = ("lobby", "kitchen")
_INBOX = "helper-inbox"
_NOBODYS = "attic"  # a room without a bot: nothing of it is to be taken
_TIMEOUT_S = 30.0
# Small blocks and many snapshots: a minute of talk is a gap worth fetching.
_NODE = ["--seal-events", "5", "--seal-after", "1s", "--snapshot-every", "10", "--page-blocks", "20"]

SETTINGS = """\
  chat: {{type: blocks, nodes: ["{node}"], streams_of: bots}}
"""
BOTS_SETTINGS = """\
bots:
  greeter:
    {{url: "http://127.0.0.1:{greeter}/", secret: "${{DEMO_SECRET}}", allow_networks: [127.0.0.0/8],
     source: chat, user: greeter, mode: all}}
  helper:
    {{url: "http://127.0.0.1:{helper}/", secret: "${{DEMO_SECRET}}", allow_networks: [127.0.0.0/8],
     source: chat, user: helper, mode: mentions_replies_reactions}}
"""


@contextmanager
def block_node(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    """A node of its own; where it listens."""
    command = [*EVERMARK, "blocknode", "serve", "--port", "0", "--json", *_NODE, "--data", str(folder / "node")]
    with (folder / "node.log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        said = process.stdout.readline() if process.stdout else ""
        if not said:
            raise EvermarkError("the block node did not start", hint=f"see {folder / 'node.log'}")
        yield f"http://127.0.0.1:{json.loads(said)['port']}"
    finally:
        process.terminate()
        process.wait(timeout=20)


class Chat(threading.Thread):
    """Talks at a steady rate, and notes which bot should get which message, in the order the node took them."""

    def __init__(self, node: str, rate: float = 20.0) -> None:
        super().__init__(name="chat", daemon=True)
        self._node = node
        self._rate = rate
        self._done = threading.Event()
        self._talking = threading.Lock()
        self._count = 0
        self.taken: set[str] = set()
        self.owed: dict[str, set[str]] = {bot: set() for bot in BOTS}
        self.error: Exception | None = None

    def open_rooms(self) -> None:
        """The greeter is in the lobby from the beginning; into the kitchen both come later."""
        self._create("lobby", "channel", ["alice", GREETER])
        self._create("kitchen", "channel", ["alice"])
        self._create(_INBOX, "inbox", [HELPER])
        self._create(_NOBODYS, "channel", ["alice"])
        with self._talking:
            self._post("kitchen", "before anybody came", owed=())
            self._enter("kitchen", GREETER)
            self._enter("kitchen", HELPER)

    def run(self) -> None:
        try:
            while not self._done.wait(1 / self._rate):
                self.talk(1)
        except (OSError, EvermarkError) as error:
            self.error = error

    def talk(self, rounds: int) -> None:
        """A message in each room, every third of them for the helper; one in its inbox now and then."""
        for _ in range(rounds):
            with self._talking:
                self._count += 1
                for room in _ROOMS:
                    mentioned = self._count % 3 == 0
                    tags = {"mentions": [HELPER]} if mentioned else {}
                    wanted = [GREETER, *([HELPER] if mentioned and room == "kitchen" else [])]
                    self._post(room, f"message {self._count}", owed=wanted, tags=tags)
                if self._count % 10 == 0:
                    self._post(_INBOX, f"for you: {self._count}", owed=[HELPER])
                    self._post(_NOBODYS, "nobody hears this", owed=None)

    def finish(self) -> None:
        self._done.set()
        if self.ident:
            self.join()

    def _enter(self, room: str, bot: str) -> None:
        self._add(room, EventKind.JOIN, f"join {bot}", [bot], member=bot)

    def _post(self, room: str, text: str, *, owed: Any, tags: Mapping[str, Any] | None = None) -> None:
        said = {"payload": json.dumps({"text": text}), "tags": dict(tags or {})}
        self._add(room, EventKind.MESSAGE, f"{room} {self._count} {text}", owed, **said)

    def _add(self, room: str, kind: EventKind, nonce: str, owed: Any, **more: Any) -> None:
        """Alice does something; `owed` are the bots that are to hear of it; None: it is not even to be taken."""
        event = make_event(room, kind, "alice", at_us=time.time_ns() // 1000, nonce=nonce, **more).wire()
        answer = self._ask("POST", f"/v1/streams/{room}/events", {"events": [event]})
        made = str(answer["events"][0]["hash"])
        if owed is not None:
            self.taken.add(made)
            for bot in owed:
                self.owed[bot].add(made)

    def _create(self, room: str, kind: str, members: list[str]) -> None:
        self._ask("PUT", f"/v1/streams/{room}", {"kind": kind, "creator": "alice", "members": members})

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the demo's own node, on this machine
            f"{self._node}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise EvermarkError(f"the block node said {error.code}: {error.read()[:300]!r}") from error
