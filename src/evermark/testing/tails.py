"""A client of the live tail that lives through everything: it connects again with its last id, to any instance."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle

from evermark.testing.pipeline import TOKEN, Instance

_WAIT_S = 20.0  # an instance says something every 15 s
_PAUSE_S = 0.2


class TailReader:
    """Follows all events from the beginning of the log. `ids`: of the events that came, in order."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.ids: list[str] = []
        self.resyncs: list[str] = []
        self.others: list[str] = []  # data of events of any other type
        self.connections = 0
        self._last_id = ""
        self._instances = instances
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tail reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        for instance in cycle(self._instances):
            if self._done.is_set():
                return
            listen = instance.listens_on()
            if listen is not None and not instance.died():
                with suppress(OSError, http.client.HTTPException):
                    self._follow(listen)
            self._done.wait(_PAUSE_S)

    def _follow(self, listen: str) -> None:
        connection = http.client.HTTPConnection(listen, timeout=_WAIT_S)
        try:
            sent = {"Authorization": f"Bearer {TOKEN}"} | ({"Last-Event-ID": self._last_id} if self._last_id else {})
            connection.request("GET", "/v1/tail?from=beginning", headers=sent)
            answer = connection.getresponse()
            if answer.status == 200:
                self.connections += 1
                block: list[str] = []
                while not self._done.is_set() and (line := answer.readline().decode()):
                    if line == "\n":
                        self._block(block)
                        block = []
                    elif line.endswith("\n"):
                        block.append(line.rstrip("\n"))
        finally:
            connection.close()

    def _block(self, lines: Sequence[str]) -> None:
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        self._last_id = fields.get("id", self._last_id)
        if "data" in fields and "event" in fields:
            (self.resyncs if fields["event"] == "resync" else self.others).append(fields["data"])
        elif "data" in fields:
            self.ids.append(json.loads(fields["data"])["evermark"]["id"])


@contextmanager
def tailing(*instances: Instance) -> Iterator[TailReader]:
    reader = TailReader(instances)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()
