"""Which users are bots, as State says; asked from whichever process plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evermark.secrets import Hidden
from evermark.state.connection import State

_VERSION_FOR_S = 1.0

Read = Callable[[State, str], frozenset[str]]


class BotsInState:
    """`Bots` of one source. Picklable: what reads State are functions of a module, connections do not travel."""

    def __init__(
        self,
        dsn: Hidden,
        schema: str,
        source: str,
        users: Read,
        inboxes: Read,
        version: Callable[[State, str], str],
    ) -> None:
        self._dsn, self._schema, self._source = dsn, schema, source
        self._read, self._read_version = (users, inboxes), version
        self._forget()

    def _forget(self) -> None:
        self._state: State | None = None
        self._known: tuple[str, frozenset[str], frozenset[str]] | None = None
        self._versioned: tuple[float, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dsn": self._dsn,
            "schema": self._schema,
            "source": self._source,
            "read": self._read,
            "version": self._read_version,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._dsn, self._schema, self._source = state["dsn"], state["schema"], state["source"]
        self._read, self._read_version = state["read"], state["version"]
        self._forget()

    def users(self) -> frozenset[str]:
        return self._current()[1]

    def inboxes(self) -> frozenset[str]:
        return self._current()[2]

    def _current(self) -> tuple[str, frozenset[str], frozenset[str]]:
        version = self.version()
        if self._known is None or self._known[0] != version:
            # The version was read first: users that came in between are read once more, not missed.
            users, inboxes = (read(self._open(), self._source) for read in self._read)
            self._known = (version, users, inboxes)
        return self._known

    def version(self) -> str:
        now = time.monotonic()
        if self._versioned is None or now - self._versioned[0] > _VERSION_FOR_S:
            self._versioned = (now, self._read_version(self._open(), self._source))
        return self._versioned[1]

    def _open(self) -> State:
        if self._state is None:
            self._state = State(self._dsn.open, self._schema, connections_max=2)
        return self._state
