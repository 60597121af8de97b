"""Single orders at a steady rate: what live traffic feels of something else is seen by how long they take."""

from __future__ import annotations

import threading
import time

import psycopg

_RATE = 50


class Clockwork(threading.Thread):
    """One order per commit at a steady rate; when each commit returned, by the order's key."""

    def __init__(self, dsn: str) -> None:
        super().__init__(name="clockwork", daemon=True)
        self._dsn = dsn
        self._done = threading.Event()
        self.committed: dict[str, float] = {}

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            due = time.perf_counter()
            while not self._done.wait(max(0.0, due - time.perf_counter())):
                row = conn.execute("insert into public.orders (total) values (1) returning id").fetchone()
                assert row is not None
                self.committed[str(row[0])] = time.time()
                due += 1 / _RATE

    def finish(self) -> None:
        self._done.set()
        self.join()
