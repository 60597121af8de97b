"""A State of the test's own in a real Postgres, and owners that take over from each other."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psycopg import sql

from evermark.cluster.base import Holder, LeaseStore
from evermark.state.connection import State
from evermark.state.migrate import migrate


@contextmanager
def empty_state(dsn: str) -> Iterator[State]:
    """A State whose schema does not exist yet; it is dropped afterwards."""
    state = State(lambda: dsn, f"evermark_test_{secrets.token_hex(6)}", statement_timeout_s=20, lock_timeout_s=10)
    try:
        yield state
        with state.connection() as conn:
            conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(state.schema)))
    finally:
        state.close()


@contextmanager
def fresh_state(dsn: str) -> Iterator[State]:
    """A State that is ready to use."""
    with empty_state(dsn) as state:
        migrate(state)
        yield state


def owners(leases: LeaseStore) -> Callable[[str], int]:
    """Each call gives the lease of that name to a new holder and returns its epoch.

    The leases must hold every former holder for gone: `is_gone=lambda holder: True`.
    """
    pids = itertools.count(1)

    def take_over(name: str) -> int:
        lease = leases.acquire(name, Holder("owner", "host", "boot", next(pids), "1"), 60.0)
        assert lease is not None, "give the leases `is_gone=lambda holder: True`"
        return lease.epoch

    return take_over
