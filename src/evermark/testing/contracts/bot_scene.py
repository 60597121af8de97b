"""A bot with a device, and events that need a session key: what the contracts of bots are told with."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from evermark.delivery.model import BotSpec, Cursor, GroupWork, ParkedEvent
from evermark.delivery.ports import DeliveryStore
from evermark.testing.contracts.scene import P0, T0, done, event

LEASE_S = 30.0
SECOND = timedelta(seconds=1)
WISH = BotSpec("shop", "helper", device="phone")


def keyed(store: DeliveryStore, device: str) -> set[str]:
    """The sessions a device has keys for."""
    return {key.session for key in store.bots.session_keys(device)}


def waiting(number: int, session: str = "s1", stream: str = "room") -> ParkedEvent:
    return replace(event(number, key=stream, status=None, stream=stream), session=session)


def settle(store: DeliveryStore, epoch: int, at: int, *parked: ParkedEvent, name: str = "bot") -> None:
    store.settle_group(
        GroupWork(P0, Cursor(at), Cursor(at + 1), store.group().members), [done(name, *parked)], T0, epoch
    )


def claimed(store: DeliveryStore, epoch: int, now: Any = T0, limit: int = 100) -> list[str]:
    return [row.event.event_id for row in store.parked.claim(now, limit, LEASE_S, epoch)]
