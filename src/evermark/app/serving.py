"""The desk of a deployment, and the API of a running instance behind which it stands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from evermark.app.build import Deployment
from evermark.app.leasing import as_holder
from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.sinks import Sinks
from evermark.delivery.status import durable_heads
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.errors import BusyError
from evermark.log.head import PostgresHeads
from evermark.log.read import LogReader
from evermark.server.bot_desk import BotDesk
from evermark.server.desk import Desk
from evermark.server.http import Server
from evermark.state.connection import State

T = TypeVar("T")

_CONNECTIONS_MAX = 4
_STATEMENT_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 5.0


def desk_of(deployment: Deployment, state: State | None = None, holder: Holder | None = None) -> Desk:
    """The desk of a deployment, on its own connections to state unless others are given."""
    on = state or deployment.state
    leases, whose, one_at_a_time = PostgresLeases(on), holder or deployment.holder, threading.Lock()
    heads = PostgresHeads(on)
    readers = {source: LogReader(deployment.log_folder(source)) for source in deployment.sources}

    def as_deliverer(step: Callable[[int], T]) -> T:
        # Two of one holder would release each other's lease.
        if not one_at_a_time.acquire(timeout=_LOCK_TIMEOUT_S):
            raise BusyError("another change is under way, and takes long", hint="try again in a moment")
        try:
            return as_holder(leases, whose, on, DELIVER_LEASE, step)
        finally:
            one_at_a_time.release()

    store = PostgresDelivery(on)
    desk = Desk(
        store,
        deployment.box,
        as_deliverer,
        heads=lambda: durable_heads(heads, deployment.sources),
        files=lambda source: readers[source].files_if_any(),
        batch_at=deployment.batch_at,
        sink=Sinks(),
    )
    return replace(desk, bots=BotDesk(desk, store, frozenset(deployment.sources)))


@contextmanager
def served(server: Server, deployment: Deployment) -> Iterator[None]:
    """The API is open while this lasts. It has connections of its own: delivery never waits for one of them."""
    state = deployment.another_state(
        connections_max=_CONNECTIONS_MAX, timeout_s=_STATEMENT_TIMEOUT_S, lock_timeout_s=_LOCK_TIMEOUT_S
    )
    # Another holder than the one that delivers in this process: what is acquired for a request is released after it.
    asking = replace(deployment.holder, instance=f"{deployment.holder.instance}/api")
    server.api.open(desk_of(deployment, state, asking))
    try:
        yield
    finally:
        server.api.close()
        state.close()
