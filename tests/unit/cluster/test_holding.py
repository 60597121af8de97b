"""Leases that are held together, handed over when the share changes, and told of when they are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.cluster.base import Holder, Lease
from evermark.cluster.fence import source_lease
from evermark.cluster.holding import Candidate, HeldLease, LeaseKeeper, LeaseLimits, Share, as_holder
from evermark.cluster.memory import MemoryLeases
from evermark.errors import StaleError, UnreachableError
from evermark.runtime import Threads
from evermark.testing.until import until

FIRST, *OTHERS = NAMES = [source_lease("chat", p) for p in range(4)]
LIMITS = LeaseLimits(ttl_s=30.0, standby_poll_s=0.01)


class Scene:
    def __init__(self) -> None:
        self.leases = MemoryLeases(is_gone=lambda _: False)
        self.refused: list[str] = []
        self.runtime = Threads()

    def candidate(self, pid: int, *names: str, limits: LeaseLimits = LIMITS) -> Candidate:
        quiet = lambda *_, **__: None  # noqa: E731
        log: Any = SimpleNamespace(debug=quiet, info=quiet, warning=quiet, error=quiet)
        holder = Holder(f"i{pid}/lane", "host", "boot", pid, "1")
        return Candidate(self.leases, holder, self.runtime, log, limits, Share(names), self.refused.append)

    def held(self, candidate: Candidate) -> HeldLease:
        found = candidate.acquire(FIRST, self.runtime.wake(), lambda: None, others=OTHERS)
        assert found is not None
        return found


def test_s6_what_leaves_the_share_is_handed_over_under_a_higher_epoch() -> None:
    """GIVEN an owner of all WHEN its share is halved THEN it is told, and once it has let go the other takes its half;
    nothing is taken before.
    """
    scene = Scene()
    donor, receiver = scene.candidate(1, *NAMES), scene.candidate(2, *NAMES[2:])
    held = scene.held(donor)
    assert held.names == set(NAMES) and not held.moved.is_set()
    assert scene.leases.free(NAMES, receiver.holder) == []
    donor.share.set(NAMES[:2])
    until(held.moved.is_set, "the donor is told")
    assert scene.leases.free(NAMES, receiver.holder) == [], "it flushes first"
    held.close()
    kept, taken = scene.held(donor), scene.held(receiver)
    assert kept.names == set(NAMES[:2]) and taken.names == set(NAMES[2:])
    assert min(kept.lease.epoch, taken.lease.epoch) > held.lease.epoch
    assert not kept.lost.is_set() and not kept.moved.is_set()
    for each in (kept, taken):
        each.close()


def test_a_lease_of_the_share_that_comes_free_is_taken_with_those_that_are_held() -> None:
    """GIVEN an owner that waits for one more WHEN it is let go of THEN the owner is told, and has both."""
    scene = Scene()
    slow = scene.held(scene.candidate(2, NAMES[1]))
    waiting = scene.candidate(1, *NAMES[:2])
    held = scene.held(waiting)
    assert held.names == {FIRST} and not held.moved.is_set()
    slow.close()
    until(held.moved.is_set, "it is told")
    held.close()
    both = scene.held(waiting)
    assert both.names == set(NAMES[:2])
    both.close()


def test_a_lease_that_is_not_shared_out_stays_where_it_is() -> None:
    """GIVEN no share WHEN time passes THEN nothing moves: who runs alone is never interrupted."""
    scene = Scene()
    candidate = scene.candidate(1)
    candidate.share.set(None)
    held = scene.held(candidate)
    assert held.names == set(NAMES)
    assert not scene.runtime.wait(0.05, held.moved, held.lost)
    held.close()


def test_a_lease_that_was_taken_before_the_share_was_known_is_handed_over_too() -> None:
    """GIVEN a source with a single lease, taken while nobody could say which leases are this process's WHEN the share
    is known, and the lease is not in it THEN its holder is told."""
    scene = Scene()
    candidate = scene.candidate(1)
    candidate.share.set(None)
    held = candidate.acquire("deliver", scene.runtime.wake(), lambda: None)
    assert held is not None and not held.moved.is_set()
    candidate.share.set(())
    until(held.moved.is_set, "it is told", timeout_s=5)
    held.close()


def test_a_renewal_under_an_old_epoch_is_refused_and_counted() -> None:
    """GIVEN an owner whose lease another took WHEN it renews THEN it is told that it lost it, and that is counted."""
    scene = Scene()
    held = scene.held(scene.candidate(1, *NAMES, limits=LeaseLimits(ttl_s=4.0, standby_poll_s=0.01)))
    scene.leases._is_gone = lambda _: True
    assert scene.leases.acquire(NAMES[3], Holder("other", "host", "boot", 2, "1"), 60.0) is not None
    until(held.lost.is_set, "it is told")
    assert scene.refused == [FIRST]
    held.close()


def test_a_lease_that_could_not_be_released_comes_back_under_a_higher_epoch() -> None:
    """GIVEN an owner whose release did not reach the store WHEN it has its lease again THEN what it began before, and
    would settle late, is refused: it has a new epoch."""

    class Unreleased(MemoryLeases):
        def release(self, *leases: Lease) -> None:
            raise UnreachableError("no answer")

    scene = Scene()
    scene.leases = Unreleased(is_gone=lambda _: False)
    candidate = scene.candidate(1, "deliver")
    first, second = (candidate.acquire("deliver", scene.runtime.wake(), lambda: None) for _ in range(2))
    assert first is not None and second is not None
    first.close()
    assert second.lease.epoch > first.lease.epoch
    with pytest.raises(StaleError):
        scene.leases.fence("deliver", first.lease.epoch)
    scene.leases.fence("deliver", second.lease.epoch)
    second.close()


class HangingLeases(MemoryLeases):
    """Does not come back from a renewal until it is told to."""

    def __init__(self) -> None:
        super().__init__(is_gone=lambda _: False)
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        self.asked.set()
        self.goes_on.wait(60)
        return super().renew(leases, ttl_s)


def test_a_lease_is_called_lost_in_time_while_its_renewal_hangs() -> None:
    """GIVEN a store that does not come back from a renewal WHEN time passes THEN the owner is told before the lease is
    over; and a renewal that comes back late does not make it an owner again."""
    scene = Scene()
    scene.leases = leases = HangingLeases()
    limits = LeaseLimits(ttl_s=2.0, standby_poll_s=0.01)
    held = scene.held(scene.candidate(1, *NAMES, limits=limits))
    try:
        until(held.lost.is_set, "it is told", timeout_s=30)
        assert leases.asked.is_set() and not leases.goes_on.is_set()
    finally:
        leases.goes_on.set()
    until(lambda: not held._keeper._renewing._runs, "it renews no more", timeout_s=30)
    assert held.lost.is_set()
    held.close()


class KeptTogether:
    """Holders of one keeper, each of one lease."""

    def __init__(self, leases: MemoryLeases, count: int, ttl_s: float) -> None:
        self.scene = Scene()
        self.scene.leases = leases
        self.limits = LeaseLimits(ttl_s=ttl_s, standby_poll_s=0.01)
        self.keeper = LeaseKeeper(self.scene.runtime)
        self.held = [self.hold(f"source:{n}") for n in range(count)]

    def hold(self, name: str) -> HeldLease:
        candidate = replace(self.scene.candidate(1, name, limits=self.limits), keeper=self.keeper)
        found = candidate.acquire(name, self.scene.runtime.wake(), lambda: None)
        assert found is not None
        return found


class RoundsOfLeases(MemoryLeases):
    """Counts rounds: a lease that is renewed again begins the next one."""

    def __init__(self) -> None:
        super().__init__(is_gone=lambda _: False)
        self.rounds: list[set[str]] = [set()]

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        if leases[0].name in self.rounds[-1]:
            self.rounds.append(set())
        self.rounds[-1] |= {lease.name for lease in leases}
        return super().renew(leases, ttl_s)


def test_leases_of_one_keeper_are_renewed_in_one_round_and_lost_alone() -> None:
    """GIVEN many leases, acquired one after another, of one keeper WHEN time passes THEN each round renews all of them;
    one that another took is lost to its holder alone, and one that was let go of is renewed no more."""
    leases = RoundsOfLeases()
    kept = KeptTogether(leases, 20, ttl_s=4.0)
    until(lambda: len(leases.rounds) > 2, "two rounds", timeout_s=60)
    names = {held.lease.name for held in kept.held}
    assert leases.rounds[:2] == [names, names]
    taken, closed, *others = kept.held
    leases._is_gone = lambda _: True
    assert leases.acquire(taken.lease.name, Holder("other", "host", "boot", 2, "1"), 60.0) is not None
    closed.close()
    until(taken.lost.is_set, "it is told", timeout_s=60)
    began = len(leases.rounds)
    until(lambda: len(leases.rounds) > began + 1, "the others are renewed", timeout_s=60)
    assert leases.rounds[began] == names - {taken.lease.name, closed.lease.name}
    assert kept.scene.refused == [taken.lease.name]
    assert not any(held.lost.is_set() for held in others)
    for held in others:
        held.close()
    until(lambda: not kept.keeper._renewing._runs and not kept.keeper._watching._runs, "nothing is kept", timeout_s=60)
    again = kept.hold("source:again")
    until(lambda: "source:again" in leases.rounds[-1], "it is kept as the others were", timeout_s=60)
    again.close()


class StaleForOne(RoundsOfLeases):
    stale: str | None = None

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        if leases[0].name == self.stale:
            raise StaleError("another has it", hint="a test")
        return super().renew(leases, ttl_s)


def test_a_lease_whose_holder_fails_costs_the_others_nothing() -> None:
    """GIVEN leases of one keeper WHEN one is lost, and its holder fails when it is told THEN the others are renewed."""
    leases = StaleForOne()
    kept = KeptTogether(leases, 3, ttl_s=1.0)

    def fail(_: str) -> None:
        raise RuntimeError("nobody expected this")

    kept.held[0].on_refused = fail
    leases.stale = kept.held[0].lease.name
    until(kept.held[0].lost.is_set, "it is lost", timeout_s=60)
    began = len(leases.rounds)
    until(lambda: len(leases.rounds) > began + 5, "the others are renewed", timeout_s=60)
    assert not any(held.lost.is_set() for held in kept.held[1:])
    for held in kept.held:
        held.close()


def test_all_leases_of_a_keeper_are_called_lost_in_time_while_a_renewal_hangs() -> None:
    """GIVEN leases of one keeper, and a store that does not come back WHEN time passes THEN each owner is told."""
    leases = HangingLeases()
    kept = KeptTogether(leases, 5, ttl_s=2.0)
    try:
        until(lambda: all(held.lost.is_set() for held in kept.held), "all are told", timeout_s=60)
        assert not leases.goes_on.is_set()
    finally:
        leases.goes_on.set()
    for held in kept.held:
        held.close()


def test_a_lease_that_took_long_to_get_is_renewed_at_once() -> None:
    """GIVEN a lease whose time began long before its owner had it WHEN it is held THEN it is renewed at once."""
    scene = Scene()
    scene.leases = leases = HangingLeases()
    leases.goes_on.set()
    candidate = scene.candidate(1, *NAMES)
    lease = leases.acquire(FIRST, candidate.holder, LIMITS.ttl_s)
    assert lease is not None
    since = time.monotonic() - LIMITS.renew_every_s
    held = HeldLease(leases, lease, scene.runtime, candidate.log, LIMITS, since=since)
    assert leases.asked.wait(LIMITS.renew_every_s / 2)
    held.close()


def test_a_change_that_was_made_is_not_called_failed_when_its_lease_cannot_be_released() -> None:
    """GIVEN a store that goes away after a person's change was made THEN the change is told, and no error."""

    class Unreleased(MemoryLeases):
        def release(self, *leases: Lease) -> None:
            raise UnreachableError("no answer")

    holder = Holder("person", "host", "boot", 1, "1")
    assert as_holder(Unreleased(), "deliver", holder, lambda: None, lambda epoch: f"changed under {epoch}")


SHORT = LeaseLimits(ttl_s=0.8, standby_poll_s=0.01, hangs_after_s=0.5)


class Clock(Threads):
    """Threads whose time passes where the test says so."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at


def _no(_: object) -> bool:
    return False


class Hanging:
    """A holder of a lease whose loop is called hanging after half a second."""

    def __init__(
        self,
        limits: LeaseLimits = SHORT,
        runtime: Threads | None = None,
        leases: MemoryLeases | None = None,
    ) -> None:
        self.scene = Scene()
        self.scene.runtime = runtime or self.scene.runtime
        self.scene.leases = leases or self.scene.leases
        self.said: list[str] = []
        self.candidate = replace(self.scene.candidate(1, FIRST, limits=limits), on_hanging=self.said.append)
        found = self.candidate.acquire(FIRST, self.scene.runtime.wake(), lambda: None)
        assert found is not None
        self.held = found

    def other(self) -> Lease | None:
        return self.scene.leases.acquire(FIRST, Holder("other", "host", "boot", 2, "1"), 60.0)


def on_a_clock() -> tuple[Hanging, Clock]:
    """Renewed by the test alone, at times of its own: the threads that would do it wait for minutes."""
    clock = Clock()
    leases = MemoryLeases(clock=lambda: datetime(2026, 11, 1, tzinfo=UTC) + timedelta(seconds=clock.at), is_gone=_no)
    return Hanging(LeaseLimits(ttl_s=800.0, hangs_after_s=500.0), clock, leases), clock


def renewed(hanging: Hanging, clock: Clock, for_s: float, step: Callable[[], None] = lambda: None) -> bool:
    """Whether the lease is still held after so long, with a step of its loop between renewals."""
    held, over = hanging.held, clock.at + for_s
    while clock.at < over and not held.lost.is_set():
        step()
        clock.at += held.limits.renew_every_s
        held.renew_if_due(clock.at)
    return not held.lost.is_set()


def test_a_lease_whose_loop_hangs_is_let_go_of_at_once_and_its_lane_is_told() -> None:
    """GIVEN a loop that has begun WHEN it does not go on THEN its lease is lost, another has it with a higher epoch,
    and what the loop writes later is refused."""
    hanging = Hanging()
    hanging.held.progress.alive()
    until(hanging.held.lost.is_set, "it is told")
    until(lambda: hanging.said, "its lane is told")
    assert f"the loop of {FIRST} hangs" in hanging.said[0]
    taken = hanging.other()
    assert taken is not None and taken.epoch > hanging.held.lease.epoch
    with pytest.raises(StaleError):
        hanging.held.require()


def test_a_process_that_stood_still_is_not_called_hanging() -> None:
    """GIVEN a process without a processor for an hour, its loop and its renewals alike WHEN it goes on THEN the renewal
    that comes first calls nobody hanging, and one that comes later does."""
    hanging = Hanging()
    held = hanging.held
    held.progress.alive()
    held.renew_if_due(held.renew_at + 3600.0)
    assert hanging.said == []
    until(lambda: hanging.said, "its lane is told of a loop that does not go on then, either")


def test_a_lease_is_kept_while_all_its_loops_go_on_rest_or_may_take_long() -> None:
    """GIVEN loops of one lease WHEN one goes on, one rests and one is in a long call THEN it is renewed; WHEN the one
    beside them hangs THEN it is let go of, though the first goes on."""
    hanging, clock = on_a_clock()
    held, limits = hanging.held, hanging.held.limits
    beside, long = held.progress_beside(), held.progress_beside()
    long.alive(for_s=3600.0)
    assert renewed(hanging, clock, 2 * limits.ttl_s, held.progress.alive) and hanging.other() is None
    beside.alive()
    assert renewed(hanging, clock, limits.hangs_after_s - limits.renew_every_s, held.progress.alive)
    assert not renewed(hanging, clock, 2 * limits.renew_every_s, held.progress.alive)
    assert hanging.said and hanging.other() is not None


def test_a_lease_without_a_loop_is_renewed_as_ever() -> None:
    """GIVEN a person's command, which has a lease and no loop WHEN time passes THEN it keeps the lease."""
    hanging, clock = on_a_clock()
    assert renewed(hanging, clock, 2 * hanging.held.limits.ttl_s)
    assert hanging.other() is None
    hanging.held.close()


@pytest.mark.parametrize("is_closed", [False, True], ids=["lost", "let go of"])
def test_a_loop_that_hangs_is_found_though_its_lease_is_gone_already(is_closed: bool) -> None:
    """GIVEN a loop that hangs WHEN its lease was lost before that is seen, or was let go of by the loop beside it THEN
    its lane is told: the lease is free, but here nobody would take it."""
    hanging = Hanging()
    held, beside = hanging.held, hanging.held.progress_beside()
    (beside if is_closed else held.progress).alive()
    if is_closed:
        held.close()
    else:
        held.lost.set()
    until(lambda: hanging.said, "its lane is told")
    until(lambda: not held._keeper._renewing._runs, "it is looked at no more")
    assert len(hanging.said) == 1


def test_a_loop_beside_that_ends_late_is_no_hanging_loop() -> None:
    """GIVEN a lease that was let go of while a loop beside was at work WHEN that ends in time THEN all is well."""
    hanging = Hanging()
    beside = hanging.held.progress_beside()
    beside.alive(for_s=0.2)
    hanging.held.close()
    beside.rest()
    until(lambda: not hanging.held._keeper._renewing._runs, "it is looked at no more")
    assert not hanging.said
