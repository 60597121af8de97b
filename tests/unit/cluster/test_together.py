"""Leases that are renewed together: one call for all, and each lost to its own holder alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from evermark.cluster.base import Holder, Lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.together import RenewedTogether
from evermark.errors import BusyError, StaleError, UnreachableError

TTL_S = 10.0
ME, OTHER = Holder("me", "host", "boot", 1, "1"), Holder("other", "host", "boot", 2, "2")


class Counted(MemoryLeases):
    def __init__(self) -> None:
        began = datetime(2026, 1, 1, tzinfo=UTC)
        super().__init__(clock=lambda: began + timedelta(seconds=self.now), is_gone=lambda _: False)
        self.now = 0.0
        self.renewed: list[int] = []  # how many leases each call was for
        self.fails: Exception | None = None
        self.locked: set[Lease] = set()
        self.during: Callable[[], None] = lambda: None

    def renew_all(self, leases: Sequence[Lease], ttl_s: float) -> tuple[set[Lease], set[Lease]]:
        self.renewed.append(len(leases))
        self.during()
        if self.fails is not None:
            raise self.fails
        kept, _ = super().renew_all(leases, ttl_s)
        return kept - self.locked, kept & self.locked


class Scene:
    def __init__(self, count: int = 1_000) -> None:
        self.store = Counted()
        self.leases = RenewedTogether(self.store, lambda: self.store.now)
        found = [self.leases.acquire(f"source:{n}", ME, TTL_S) for n in range(count)]
        self.mine = [lease for lease in found if lease is not None]

    def renew_each(self) -> list[type[Exception] | None]:
        return [self.outcome(lease) for lease in self.mine]

    def outcome(self, lease: Lease) -> type[Exception] | None:
        try:
            self.leases.renew([lease], TTL_S)
        except Exception as error:  # noqa: BLE001 - its kind is the answer
            return type(error)
        return None


def test_a_thousand_leases_are_renewed_by_one_call() -> None:
    """GIVEN a thousand leases WHEN each is renewed by its own holder THEN the store is called once for all, and again
    when that was a while ago; none runs out."""
    scene = Scene()
    for round_ in range(1, 9):
        scene.store.now += TTL_S / 4
        assert set(scene.renew_each()) == {None}
        assert scene.store.renewed == [1_000] * round_
    assert scene.store.free([lease.name for lease in scene.mine], OTHER) == []


def test_a_lease_that_another_took_is_lost_to_its_holder_alone() -> None:
    """GIVEN three leases WHEN another takes one THEN its holder is told so, the others hold theirs, and the lost one is
    not renewed any more."""
    scene = Scene(3)
    scene.store.now += 1.2 * TTL_S
    assert scene.store.acquire("source:1", OTHER, 60.0) is not None
    assert scene.renew_each() == [None, StaleError, None]
    scene.store.now += TTL_S / 4
    assert scene.outcome(scene.mine[0]) is None
    assert scene.store.renewed == [3, 2]


def test_a_store_that_fails_is_told_to_every_holder_and_asked_again() -> None:
    """GIVEN a store that is away WHEN leases are renewed THEN each holder hears it, by few calls; then it is well."""
    scene = Scene(50)
    scene.store.now += TTL_S / 4
    scene.store.fails = UnreachableError("state does not answer")
    assert set(scene.renew_each()) == {UnreachableError}
    assert len(scene.store.renewed) == 1
    scene.store.fails = None
    scene.store.now += TTL_S / 4
    assert set(scene.renew_each()) == {None}


def test_a_renewal_that_hangs_is_waited_for_by_nobody_and_missed_in_the_end() -> None:
    """GIVEN a renewal that does not come back WHEN others renew THEN they do not wait, and once half the time of their
    lease is over they are told that it was not renewed."""
    scene = Scene(3)
    scene.store.now += TTL_S / 4
    seen: list[type[Exception] | None] = []

    def during() -> None:
        seen.append(scene.outcome(scene.mine[1]))
        scene.store.now += TTL_S / 2
        seen.append(scene.outcome(scene.mine[2]))

    scene.store.during = during
    assert scene.outcome(scene.mine[0]) is None
    assert seen == [None, BusyError]


def test_a_released_lease_is_not_renewed_with_the_others() -> None:
    """GIVEN two leases WHEN one is released THEN only the other is renewed, and another holder can have it."""
    scene = Scene(2)
    scene.leases.release(scene.mine[0])
    scene.store.now += TTL_S / 4
    assert scene.outcome(scene.mine[1]) is None
    assert scene.store.renewed == [1]
    assert scene.store.acquire("source:0", OTHER, TTL_S) is not None


def test_one_that_is_locked_costs_the_others_nothing() -> None:
    """GIVEN a lease whose row another process has locked WHEN all are renewed THEN its holder alone hears it, and tries
    again."""
    scene = Scene(3)
    scene.store.now += TTL_S / 4
    scene.store.locked = {scene.mine[1]}
    assert scene.renew_each() == [None, BusyError, None]
    scene.store.locked = set()
    scene.store.now += TTL_S / 4
    assert scene.renew_each() == [None, None, None]


def test_one_that_its_holder_gave_up_runs_out_though_others_are_renewed() -> None:
    """GIVEN two leases, and the holder of one hangs WHEN the other is renewed for long THEN the first can be had."""
    scene = Scene(2)
    for _ in range(12):
        scene.store.now += TTL_S / 4
        assert scene.outcome(scene.mine[1]) is None
    assert scene.store.acquire("source:0", OTHER, TTL_S) is not None
    assert scene.store.acquire("source:1", OTHER, TTL_S) is None
