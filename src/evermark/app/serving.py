"""The services of a deployment, which the command line and the HTTP API of a running instance use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from evermark.app.build import Deployment
from evermark.app.checking import stream_warnings
from evermark.app.tailing import tail_of
from evermark.cluster.base import Holder, owner_epoch
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.holding import as_holder
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.delivery.sinks import Sinks
from evermark.delivery.status import durable_heads
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.store.stream_status import PostgresStatus
from evermark.delivery.tail.wish import BySpark
from evermark.errors import BusyError
from evermark.log.head import PostgresHeads
from evermark.log.read import LogReader
from evermark.server.bots import BotService
from evermark.server.calls import Services
from evermark.server.deliveries import DeliveryService
from evermark.server.replays import ReplayService
from evermark.server.statuses import StatusService
from evermark.server.subscriptions import SubscriptionService
from evermark.state.connection import State

if TYPE_CHECKING:
    from evermark.server.http import Server

T = TypeVar("T")

_CONNECTIONS_MAX = 4
_STATEMENT_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 5.0


def services_of(deployment: Deployment, state: State | None = None, holder: Holder | None = None) -> Services:
    """The services of a deployment, on its own connections to state unless others are given."""
    on = state or deployment.state
    leases, whose, one_at_a_time = deployment.leases_through(on), holder or deployment.holder, threading.Lock()
    heads = PostgresHeads(on)
    readers = {source: LogReader(deployment.log_folder(source)) for source in deployment.sources}

    def as_deliverer(step: Callable[[int], T]) -> T:
        # Two transactions of one holder would release each other's lease.
        if not one_at_a_time.acquire(timeout=_LOCK_TIMEOUT_S):
            raise BusyError("another change is under way, and takes long", hint="try again in a moment")
        try:
            return as_holder(leases, DELIVER_LEASE, whose, lambda: owner_epoch(leases, DELIVER_LEASE), step)
        finally:
            one_at_a_time.release()

    store = PostgresDelivery(on)
    subscriptions = SubscriptionService(
        store,
        deployment.box,
        as_deliverer,
        heads=lambda: durable_heads(heads, deployment.sources),
        files=lambda source: readers[source].files_if_any(),
        batch_at=deployment.batch_at,
        sink=Sinks(),
        warnings=lambda streams: stream_warnings(deployment.config, deployment.log_root, streams),
    )
    bots = BotService(subscriptions, store.bots, frozenset(deployment.sources))
    replays = ReplayService(
        PostgresReplays(on),
        as_deliverer,
        frozenset(deployment.sources),
        lambda: {*store.subscriptions(), *(spec.name for spec in deployment.specs)},
        subscriptions.warnings,
    )
    status = PostgresStatus(on)
    statuses = StatusService(status.all, status.one)
    return Services(subscriptions, DeliveryService(store, as_deliverer), bots, replays, statuses)


@contextmanager
def served(server: Server, deployment: Deployment, by_spark: BySpark) -> Iterator[None]:
    """The API and the live tail are open while this lasts. They have connections of their own: delivery never waits
    for them.
    """
    state = deployment.another_state(
        connections_max=_CONNECTIONS_MAX, timeout_s=_STATEMENT_TIMEOUT_S, lock_timeout_s=_LOCK_TIMEOUT_S
    )
    # A holder of its own, not that of delivery in this process: a lease acquired for a request is released after it.
    asking = replace(deployment.holder, instance=f"{deployment.holder.instance}/api")
    server.api.open(services_of(deployment, state, asking))
    server.tail.open(tail_of(deployment, state, by_spark))
    try:
        yield
    finally:
        server.api.close()
        server.tail.close()
        state.close()
