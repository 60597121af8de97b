"""A small scene for tests of delivery: two places, a moment, subscriptions, events and outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from evermark.delivery.model import Fate, MadeBy, Outcome, ParkedEvent, SourcePartition, SubscriptionSpec
from evermark.delivery.ports import DeliveryStore

TakeOver = Callable[[], int]

T0 = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
P0, P1 = SourcePartition("shop", 0), SourcePartition("shop", 1)


def spec(name: str, **settings: Any) -> SubscriptionSpec:
    return SubscriptionSpec(name=name, url=settings.pop("url", f"https://{name}.example/hook"), **settings)


def event(
    number: int, place: SourcePartition = P0, key: str | None = None, status: int | None = 400, stream: str = "orders"
) -> ParkedEvent:
    return ParkedEvent(
        event_id=f"e{number}",
        place=place,
        batch=number,
        position=f"{number:06}",
        stream=stream,
        key=key,
        event=f'{{"n": {number}}}',
        reason="refused",
        status=status,
    )


def done(name: str, *parked: ParkedEvent, accepted: int = 1, expired: int = 0) -> Outcome:
    return Outcome(name, Fate.DONE, accepted=accepted, parked=parked, expired=expired)


def failed(name: str, reason: str = "503") -> Outcome:
    return Outcome(name, Fate.ENDPOINT_FAILED, reason=reason)


def snapshot(store: DeliveryStore) -> tuple[object, ...]:
    # Each store has a clock of its own.
    known = {name: replace(found, since=None) for name, found in store.subscriptions().items()}
    return (known, store.groups(), store.cursors_outside(), store.parked.rows(limit=1000))


def begin(store: DeliveryStore, epoch: int, *names: str, **settings: Any) -> None:
    """Two places, both at batch 0, and these members."""
    store.open_partition(P0, 0, epoch)
    store.open_partition(P1, 0, epoch)
    store.register([spec(name, **settings) for name in names], MadeBy.FILE, {}, epoch)
