"""A bot with a device, and events that need a session key: what the contracts of bots are told with."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from evermark.delivery.base import DeliveryStore, ParkedEvent
from evermark.delivery.bots.base import BotSpec, BotStore
from evermark.testing.contracts.scene import P0, T0, done, event

LEASE_S = 30.0
SECOND = timedelta(seconds=1)
WISH = BotSpec("shop", "helper", device="phone")


class Store(DeliveryStore, BotStore, Protocol):
    """Both in one: what waits for a key is parked."""


def keyed(store: Store, device: str) -> set[str]:
    """The sessions a device has keys for."""
    return {key.session for key in store.session_keys(device)}


def waiting(number: int, session: str = "s1", stream: str = "room") -> ParkedEvent:
    return replace(event(number, key=stream, status=None, stream=stream), session=session)


def settle(store: Store, epoch: int, at: int, *parked: ParkedEvent, name: str = "bot") -> None:
    store.settle_group(P0, at, at + 1, store.group().members, [done(name, *parked)], T0, epoch)


def claimed(store: Store, epoch: int, now: Any = T0, limit: int = 100) -> list[str]:
    return [row.event.event_id for row in store.claim(now, limit, LEASE_S, epoch)]
