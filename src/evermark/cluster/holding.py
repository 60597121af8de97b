"""Holding leases while work goes on: renewed beside the work, which is told when they are lost, or should change hands.
A lease whose work does not go on is renewed no more (`evermark.progress`). And one change for a person under a lease,
whichever instance holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from evermark.cluster.base import Holder, Lease, LeaseStore
from evermark.errors import BusyError, EvermarkError, StaleError
from evermark.progress import Progress
from evermark.runtime import Log, Pause, Runtime, Steps, Wake, run_through

T = TypeVar("T")

_TRIES = 3
_UNSHARED_LOOK_S = 30.0
_AFTER_ERROR_S = 0.1


@dataclass(frozen=True)
class LeaseLimits:
    ttl_s: float = 10.0
    standby_poll_s: float = 0.5
    handoff_poll_s: float = 0.1  # for a lease that is about to be handed over, while others of its kind are held
    # A loop that has not gone on for so long hangs: every call in a step of it has a time-out that is shorter.
    hangs_after_s: float = 120.0

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / 4

    @property
    def lost_after_s(self) -> float:
        """Without a renewal. What is begun then may take as long as between two renewals, and still ends in time."""
        return self.ttl_s - self.renew_every_s


LIMITS = LeaseLimits()


class Share:
    """Which leases are this process's to take: all, until it is told which."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.names = None if names is None else frozenset(names)
        self._watching: list[Wake] = []

    def set(self, names: Collection[str] | None) -> None:
        self.names = None if names is None else frozenset(names)
        for wake in list(self._watching):
            wake.set()

    def watch(self, wake: Wake) -> None:
        """Have `wake` set whenever the share changes, until `unwatch`."""
        self._watching.append(wake)

    def unwatch(self, wake: Wake) -> None:
        self._watching.remove(wake)

    def of(self, names: Sequence[str]) -> list[str]:
        mine = self.names
        return [name for name in names if mine is None or name in mine]


@dataclass(eq=False)
class HeldLease:
    """A lease, or several under one epoch: renewed until closed, while the loops that it is for go on (`progress`).
    `lost` is set when another instance has one of them, or may have it. `moved` is set when others are to be held
    instead: one that is held is not to be held any more, or one that is to be held can be had.
    """

    store: LeaseStore
    lease: Lease
    runtime: Runtime
    log: Log
    limits: LeaseLimits = LIMITS
    also: Sequence[Lease] = ()
    share: Share | None = None  # which of `may_have` are to be held; None: what is held now
    may_have: Sequence[str] = ()
    holder: Holder | None = None  # the instance that would take more of them
    on_refused: Callable[[str], None] = lambda _: None  # a write under this lease was refused, being stale
    since: float | None = None  # when it was asked for, by the runtime's clock; None: now
    keeper: LeaseKeeper | None = None  # that renews it with others; None: one of its own
    on_hanging: Callable[[str], None] = lambda _: None  # it was let go of, for this reason; its loop does not see it

    def __post_init__(self) -> None:
        self._watched: tuple[Progress, ...] = ()
        self._hangs = False
        self._renewed_at = self.runtime.monotonic() if self.since is None else self.since
        # Asking for it may have taken most of its time: then it is renewed at once.
        self.renew_at = self._renewed_at + self.limits.renew_every_s
        self.names = frozenset(lease.name for lease in (self.lease, *self.also))
        self.progress = self.progress_beside()
        self.lost = self.runtime.wake()
        self.moved = self.runtime.wake()
        self._closed = self.runtime.wake()
        self._changed = self.runtime.wake()
        self._keeper = self.keeper if self.keeper is not None else LeaseKeeper(self.runtime)
        self._keeper.keep(self)
        if self.share is not None:
            self.share.watch(self._changed)
            self.runtime.loop(f"share {self.lease.name}", self._look_for_moves(self.share), urgent=True)

    def close(self) -> None:
        """A renewal that is under way is not waited for: under an epoch that was let go of it finds nothing."""
        self._closed.set()
        self.progress.rest()
        if self.share is not None:
            self.share.unwatch(self._changed)
        self._keeper.let_go(self)
        try:
            self.store.release(self.lease, *self.also)
        except EvermarkError as error:
            self._warn("lease not released; it runs out by itself", error=error)

    def progress_beside(self) -> Progress:
        """Of one more loop that the lease is for."""
        made = Progress(self.runtime.monotonic)
        self._watched = (*self._watched, made)
        return made

    def require(self) -> None:
        """Raises `StaleError` when one of them is no longer ours."""
        for lease in (self.lease, *self.also):
            self.store.require(lease)

    @property
    def is_over(self) -> bool:
        return self.lost.is_set() or self._closed.is_set()

    @property
    def is_done(self) -> bool:
        """Whether its loops need not be looked at any more. A loop that hung when the lease was lost, or was let go
        of, is found all the same: nothing else in this process would do its work.
        """
        return self._hangs or (self.is_over and all(each.rests for each in self._watched))

    @property
    def lost_at(self) -> float:
        """When it may be lost, if it is not renewed before."""
        return self._renewed_at + self.limits.lost_after_s

    def _look_for_moves(self, share: Share) -> Steps[None]:
        """Until other leases are to be held."""
        while not self.is_over:
            self._changed.clear()  # before the look: no change is missed
            wanted = share.of(self.may_have)
            missing = [name for name in wanted if name not in self.names]
            if not self.names <= set(wanted) or self._is_one_free(missing):
                self.moved.set()
                return
            poll_s = self.limits.handoff_poll_s if missing else _UNSHARED_LOOK_S
            yield Pause(poll_s, (self._closed, self.lost, self._changed))

    def _is_one_free(self, missing: Sequence[str]) -> bool:
        try:
            return bool(missing and self.holder is not None and self.store.free(missing, self.holder))
        except EvermarkError:
            return False  # renewing says so

    def renew_if_due(self, now: float) -> None:
        """Once, soon enough to be renewed with others, while its loops go on. Waits for the store, which may hang."""
        if self.is_done or now < self.renew_at - self.limits.renew_every_s / 2:
            return
        # Where this comes late, the whole process stood still, or had no processor: so had the loops.
        late_s = max(0.0, now - self.renew_at)
        idle_s = max(each.idle_for(now) for each in self._watched) - late_s
        if idle_s > self.limits.hangs_after_s:
            self._let_go_of_hanging(idle_s)
            return
        if self.is_over:
            self.renew_at = now + self.limits.renew_every_s
            return
        began = self.runtime.monotonic()
        self.renew_at = began + self.limits.renew_every_s
        try:
            self._renewed_at = began - self.store.renew((self.lease, *self.also), self.limits.ttl_s)
        except StaleError as error:
            if not self.is_over:
                self.on_refused(self.lease.name)
                self._warn("lease lost", error=error)
                self.lost.set()
        except Exception as error:  # noqa: BLE001 - a lease that nobody renews must be noticed as lost
            missed_s = round(self.runtime.monotonic() - self._renewed_at, 1)
            if not self.is_over:
                self._warn("lease not renewed", error=error, missed_s=missed_s)

    def _let_go_of_hanging(self, idle_s: float) -> None:
        """At once, and not when its time is over: what its loop does after this, if it ever does, is refused."""
        self._hangs = True
        said = f"the loop of {self.lease.name} hangs: it has not gone on for {idle_s:.0f} s"
        self.log.error("lease let go of", lease=self.lease.name, epoch=self.lease.epoch, reason=said)
        self.lost.set()
        try:
            self.store.release(self.lease, *self.also)
        except EvermarkError as error:
            self._warn("lease not released; it runs out by itself", error=error)
        finally:
            self.on_hanging(said)

    def lose_if_late(self, now: float) -> None:
        if self.is_over or now < self.lost_at:
            return
        self._warn("lease lost: it was not renewed in time")
        self.lost.set()
        self.runtime.loop(f"ask for {self.lease.name}", self._count_if_taken())

    def _count_if_taken(self) -> Steps[None]:
        yield Pause(0.0)  # the store may hang: not in the loop that tells others of their leases
        try:
            self.require()
        except StaleError:
            self.on_refused(self.lease.name)
        except Exception as error:  # noqa: BLE001 - it is let go of all the same
            self._warn("it is not known whether another has it", error=error)

    def _warn(self, said: str, **about: object) -> None:
        self.log.warning(said, lease=self.lease.name, epoch=self.lease.epoch, **about)


class _Rounds:
    """A loop over leases that are held: goes on when the first of them is due, and ends with the last of them."""

    def __init__(
        self,
        runtime: Runtime,
        what: str,
        due: Callable[[HeldLease], float],
        do: Callable[[HeldLease, float], None],
        is_over: Callable[[HeldLease], bool],
    ) -> None:
        self._runtime, self._what, self._due, self._do, self._is_over = runtime, what, due, do, is_over
        self._lock = runtime.lock()
        self._again = runtime.wake()
        self._kept: dict[HeldLease, None] = {}
        self._runs = False
        self._at = 0.0  # when it goes on by itself

    def add(self, held: HeldLease) -> None:
        with self._lock:
            self._kept[held] = None
            if not self._runs:
                self._runs = True
                self._runtime.loop(f"{self._what} {held.lease.name}", self._steps(), urgent=True)
            elif self._due(held) < self._at:
                self._again.set()

    def remove(self, held: HeldLease) -> None:
        with self._lock:
            self._kept.pop(held, None)
            if not self._kept:
                self._again.set()

    def _steps(self) -> Steps[None]:
        while True:
            self._again.clear()
            with self._lock:
                self._kept = {held: None for held in self._kept if not self._is_over(held)}
                if not self._kept:
                    self._runs = False
                    return
                kept = list(self._kept)
                self._at = min(map(self._due, kept))
            now, pause_s = self._runtime.monotonic(), 0.0
            if self._at <= now:
                for held in kept:
                    try:
                        self._do(held, now)
                    except Exception as error:  # noqa: BLE001 - the other leases must not run out because of this one
                        held.log.warning("a lease could not be looked after", lease=held.lease.name, error=error)
                        pause_s = _AFTER_ERROR_S
            yield Pause(max(pause_s, self._at - now), (self._again,))


class LeaseKeeper:
    """Renews the leases of several holders in one loop, and looks in another whether one was not renewed in time: that
    is said before its time is over, also while the store does not come back.

    To be shared only where one call of the store renews them all: the first of them is then waited for, and no other.
    """

    def __init__(self, runtime: Runtime) -> None:
        renew, lose = HeldLease.renew_if_due, HeldLease.lose_if_late
        self._renewing = _Rounds(runtime, "renew", lambda held: held.renew_at, renew, lambda held: held.is_done)
        self._watching = _Rounds(runtime, "watch", lambda held: held.lost_at, lose, lambda held: held.is_over)

    def keep(self, held: HeldLease) -> None:
        self._renewing.add(held)
        self._watching.add(held)

    def let_go(self, held: HeldLease) -> None:
        if held.is_done:
            self._renewing.remove(held)
        self._watching.remove(held)


@dataclass(frozen=True)
class Candidate:
    """A process that stands by for leases."""

    leases: LeaseStore
    holder: Holder
    runtime: Runtime
    log: Log
    limits: LeaseLimits = LIMITS
    share: Share = field(default_factory=Share)
    on_refused: Callable[[str], None] = lambda _: None  # a write under this lease was refused, being stale
    keeper: LeaseKeeper | None = None  # renews these leases together with others
    on_hanging: Callable[[str], None] = lambda _: None  # a lease was let go of, for this reason: its loop hangs

    def acquire(
        self,
        name: str,
        stopping: Wake,
        on_standby: Callable[[], None],
        on_error: Callable[[EvermarkError], None] = lambda _: None,
        others: Sequence[str] = (),
    ) -> HeldLease | None:
        """As `acquiring`, in the caller's thread."""
        return run_through(self.runtime, self.acquiring(name, stopping, on_standby, on_error, others))

    def acquiring(
        self,
        name: str,
        stopping: Wake,
        on_standby: Callable[[], None],
        on_error: Callable[[EvermarkError], None] = lambda _: None,
        others: Sequence[str] = (),
    ) -> Steps[HeldLease | None]:
        """Wait for the lease; None when told to stop first. An error of the store goes to `on_error`.

        With `others`, the lease `name` is divided: each is taken by itself. It is waited for until at least one that is
        our share can be had.
        """
        changed = self.runtime.wake()
        self.share.watch(changed)
        try:
            return (yield from self._waited_for(name, stopping, on_standby, on_error, others, changed))
        finally:
            self.share.unwatch(changed)

    def _waited_for(
        self,
        name: str,
        stopping: Wake,
        on_standby: Callable[[], None],
        on_error: Callable[[EvermarkError], None],
        others: Sequence[str],
        changed: Wake,
    ) -> Steps[HeldLease | None]:
        said: str | None = None  # the error that was told last; empty: that another instance has the lease
        while not stopping.is_set():
            changed.clear()
            began = self.runtime.monotonic()
            try:
                leases = self._acquired(name, others)
            except EvermarkError as error:
                if error.message != said:
                    self.log.warning("lease not acquired", lease=name, error=error)
                said = error.message
                on_error(error)
            else:
                if leases:
                    return self._held(leases, (name, *others), began)
                if said != "":
                    on_standby()
                said = ""
            # What is not this process's to take need not be asked for: it is told when that changes.
            is_asked_for = bool(self.share.of((name, *others)))
            yield Pause(self.limits.standby_poll_s if is_asked_for else _UNSHARED_LOOK_S, (stopping, changed))
        return None

    def _acquired(self, name: str, others: Sequence[str]) -> list[Lease]:
        mine = self.share.of((name, *others))
        if not mine:
            return []
        if others and not self.leases.divide(name, others, self.holder):
            return []
        # Always under a new epoch: where a release did not reach the store, work of before may still go on.
        return self.leases.acquire_all(mine, self.holder, self.limits.ttl_s)

    def _held(self, leases: Sequence[Lease], names: Sequence[str], began: float) -> HeldLease:
        return HeldLease(
            self.leases,
            leases[0],
            self.runtime,
            self.log,
            self.limits,
            leases[1:],
            self.share,
            names,
            self.holder,
            self.on_refused,
            began,
            self.keeper,
            self.on_hanging,
        )


def as_holder(
    leases: LeaseStore,
    name: str,
    holder: Holder,
    owner_epoch: Callable[[], int | None],
    step: Callable[[int], T],
) -> T:
    """Run one transaction for a person under a lease, with the epoch that holds it.

    `owner_epoch` says under which epoch an instance holds the lease now. The instance sees the change at its next look,
    and a person need not stop it. While none does, the lease is acquired for as long as the step takes. `holder` must
    not be a process that holds this lease for longer: the lease acquired here is released here.
    """
    for attempt in range(_TRIES):
        lease = None
        try:
            epoch = owner_epoch()
            if epoch is not None:
                return step(epoch)
            lease = leases.acquire(name, holder, LIMITS.ttl_s)
            if lease is not None:
                return step(lease.epoch)
        except StaleError:  # the owner changed just now
            if attempt + 1 == _TRIES:
                raise
        finally:
            if lease is not None:
                with suppress(EvermarkError):  # the change was made; the lease runs out by itself
                    leases.release(lease)
    raise BusyError(f"lease {name} changes hands just now", hint="try again in a moment")
