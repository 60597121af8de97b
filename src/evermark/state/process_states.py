"""Connections to State that many sources of one process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from evermark.secrets import Hidden
from evermark.state.connection import State

_CONNECTIONS_MAX = 8


class SharedStates:
    """Sources of one process, and of one deployment, share connections to State: a thousand sources with two each would
    be more than a server has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[tuple[int, Hidden, str], tuple[State, int]] = {}

    def of(self, dsn: Hidden, schema: str) -> tuple[State, Callable[[], None]]:
        """A state, and what to call once when it is not needed any more."""
        key = (os.getpid(), dsn, schema)  # a connection is of no use to a forked process
        with self._lock:
            state, users = self._used.get(key, (None, 0))
            if state is None:
                state = State(dsn.open, schema, connections_max=_CONNECTIONS_MAX)
            self._used[key] = state, users + 1
        return state, lambda: self._let_go(key)

    def _let_go(self, key: tuple[int, Hidden, str]) -> None:
        with self._lock:
            state, users = self._used.pop(key)
            if users > 1:
                self._used[key] = state, users - 1
                return
        state.close()


SHARED = SharedStates()
