"""D6: what waits for session keys is bounded for each stream, by a sweep that looks once."""

from __future__ import annotations

import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.model import Surplus
from evermark.delivery.run import parked_retries
from evermark.delivery.run.parked_retries import sweep_surplus
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.memory_bots import MemoryBots
from evermark.testing.contracts.bot_scene import WISH, settle, waiting
from evermark.testing.contracts.scene import T0, begin
from evermark.testing.states import owners


class Counting(MemoryBots):
    looks = 0

    def surplus(self, keep: int = 0) -> list[Surplus]:
        self.looks += 1
        return super().surplus(keep)


def _crowded() -> tuple[MemoryDelivery, int]:
    leases = MemoryLeases(is_gone=lambda holder: True)
    store, epoch = MemoryDelivery(leases), owners(leases)(DELIVER_LEASE)
    store.bots = Counting(store.tables)
    begin(store, epoch, "bot", bot=WISH)
    rooms = [waiting(10 * n + room, "s1", f"room{room}") for room in range(3) for n in range(1, 5 + room)]
    settle(store, epoch, 0, *rooms)
    return store, epoch


def test_d6_a_sweep_counts_what_waits_once_however_much_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN streams with more than is kept WHEN swept a few rows at a time THEN each has its newest; one look."""
    monkeypatch.setattr(parked_retries, "SWEEP_ROWS", 2)
    store, epoch = _crowded()
    assert sweep_surplus(store.bots, T0, epoch, keep=1) == 3 + 4 + 5
    assert store.bots.looks == 1
    assert [row.event.event_id for row in store.parked.rows()] == ["e40", "e51", "e62"]
    assert store.counted("expired") == {"bot": 12}


def test_a_sweep_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a process that stops WHEN it sweeps THEN what was not removed yet is left to the next one."""
    monkeypatch.setattr(parked_retries, "SWEEP_ROWS", 2)
    store, epoch = _crowded()
    assert sweep_surplus(store.bots, T0, epoch, lambda: len(store.parked.rows()) < 13, keep=1) == 3
