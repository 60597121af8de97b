"""A sync feed that is read, beside what `evermark.testing.blocknodes` has."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from evermark.sources.blocks.chain import Cookie
from evermark.testing.blocknodes import Client, Node, View, control, message
from evermark.testing.until import until

__all__ = ["Client", "Node", "Sync", "View", "control", "message"]


class Sync:
    """A sync that is read in a thread: what came is in `told`, in order."""

    def __init__(self, port: int, streams: Mapping[str, Cookie | None], *, reads: bool = True) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        asked = {stream: cookie.wire() if cookie is not None else None for stream, cookie in streams.items()}
        self._connection.request("POST", "/v1/sync", json.dumps({"streams": asked}).encode())
        self.told: list[tuple[str, Any]] = []
        self.keepalives = 0
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._thread.start()

    def read(self) -> None:
        """Begin to read, if it was not to at first."""
        self._thread.start()

    def _read(self) -> None:
        event = ""
        try:
            for line in self._connection.getresponse():
                if line.startswith(b":"):
                    self.keepalives += 1
                elif line.startswith(b"event: "):
                    event = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    self.told.append((event, json.loads(line[6:])))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.told.append(("broken", repr(error)))
        self.ended.set()

    def of(self, stream: str) -> list[View]:
        """Resets and updates of one stream."""
        return [
            View(data) for event, data in list(self.told) if event in {"reset", "update"} and data["stream"] == stream
        ]

    def seen(self, stream: str) -> list[str]:
        """Hashes in the order in which they first came."""
        return list(dict.fromkeys(found for view in self.of(stream) for found in view.hashes))

    @property
    def told_hashes(self) -> set[str]:
        """Of minipool events and of blocks' events, without parsing them."""
        views = [data for event, data in list(self.told) if event in {"reset", "update"}]
        sealed = (found for view in views for block in view["blocks"] for found in block["header"]["event_hashes"])
        return {*sealed, *(event["hash"] for view in views for event in view["minipool"])}

    def wait(self, condition: Callable[[Sync], Any], what: str) -> Any:
        return until(lambda: condition(self), what)

    @property
    def id(self) -> str:
        self.wait(lambda sync: sync.told, "the sync is open")
        return str(self.told[0][1]["sync"])

    def close(self) -> None:
        # The thread sits in a read: only shutting the socket down ends it.
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._connection.close()
