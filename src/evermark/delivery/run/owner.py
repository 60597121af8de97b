"""The loop of delivery: stands by for the lease of a shard; the holder delivers for the subscriptions of that shard.

Beside each other run: fresh batches, handed over by ingest to the live group; the follower, and the turns of the
subscriptions behind. The owner of the first shard does the rest for all of them: retries of parked deliveries; replays;
and, now and then, expiry and requests for missing keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from evermark.cluster.fence import deliver_lease
from evermark.cluster.holding import Candidate, HeldLease
from evermark.delivery.bots.views import BotViews, Read, ViewLimits, telling
from evermark.delivery.decide import registration
from evermark.delivery.decide.shards import FIRST
from evermark.delivery.decide.turns import ALONE_AT_ONCE, Turn, TurnClass, goes_on, next_turns
from evermark.delivery.model import CursorVector, KeyWanted, MadeBy, Outcome, SourcePartition, SubscriptionSpec
from evermark.delivery.ports import DeliveryStore, LogView
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.owner import ReplayLimits, ReplayLoop, ReplayObserver
from evermark.delivery.replay.plan import ReplayDeliverer
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.run.follower import Follower, FollowLimits
from evermark.delivery.run.key_requests import KeyAsker
from evermark.delivery.run.live import HandoverLimits, LiveGroup
from evermark.delivery.run.parked_retries import ParkedQueue, Tried, release, sweep, sweep_surplus
from evermark.delivery.webhook.base import Answer, OpenSecret, Sink
from evermark.delivery.work import Deliverer, Span
from evermark.error_policy import Action, action_for
from evermark.errors import ConflictError, EvermarkError, NotFoundError, StaleError
from evermark.progress import PATIENT_S, Progress
from evermark.runtime import Task, Wake, any_set
from evermark.sources.base import Source

Ends = tuple[Wake, ...]  # delivery here is over when any of them is set


@dataclass(frozen=True)
class DeliveryLimits:
    follow_every_s: float = 0.2
    queue_every_s: float = 1.0
    report_every_s: float = 2.0
    sweep_every_s: float = 60.0
    ask_every_s: float = 1.0
    group_wait_s: float = 10.0  # for a hand-over that is under way; longer than any takes
    again_after_s: float = 1.0  # after a failure that passes by itself
    # A step that has not ended by then posts to a slow receiver; its epoch is old when it comes back.
    end_s: float = 5.0
    live_end_s: float = 15.0  # the same for what is being handed over: thousands of requests take seconds
    # Before a planned stop, or a move to another instance, turns of subscriptions that are behind are waited for so
    # long, and the others are served: a receiver that hangs must not hold up the rest.
    drain_s: float = 60.0
    handover: HandoverLimits = field(default_factory=HandoverLimits)
    follow: FollowLimits = field(default_factory=FollowLimits)
    bot_views: ViewLimits = field(default_factory=ViewLimits)
    replay: ReplayLimits = field(default_factory=ReplayLimits)
    alone_at_once: int = ALONE_AT_ONCE  # turns of single subscriptions that are behind


class BothDeliverer(Deliverer, ReplayDeliverer, Protocol):
    """Delivers spans of the log, and slices of replays."""


@dataclass(frozen=True)
class DeliveryTools:
    """The tools of the delivery owner."""

    store: DeliveryStore  # of its shard
    replays: ReplayStore
    log: LogView
    deliverer: BothDeliverer
    sink: Sink
    open_secret: OpenSecret
    sources: Mapping[str, Source]
    specs: Callable[[], Sequence[SubscriptionSpec]]  # the subscriptions of the file
    batch_at: Callable[[SourcePartition, str], int]  # the last batch before a time
    cores: int
    memberships: Read = telling


class DeliveryObserver(ReplayObserver, Protocol):
    """Told what delivery does. No method may block for long, or raise; `report` may do both."""

    def standby(self) -> None:
        """Another instance has the lease."""

    def owned(self) -> None: ...

    def delivering(self) -> None:
        """Everything is in place: from here on events are delivered."""

    def released(self) -> None:
        """Nothing is delivered here any more, and the lease is about to be given back."""

    def handed_over(self, delivered: bool) -> None: ...

    def by_group(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None: ...

    def by_follower(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None: ...

    def stuck(self, place: SourcePartition, subscription: str | None, error: EvermarkError) -> None:
        """A subscription, or the live group (None), cannot go on there: the log cannot be read. Told again while it
        lasts; what is said by `by_group` or `by_follower` of the same place ends it.
        """

    def by_queue(self, tried: Sequence[Tried]) -> None: ...

    def by_asker(self, asked: Sequence[tuple[KeyWanted, Answer]]) -> None: ...

    def report(self) -> None:
        """Called every `report_every_s`: what can be counted is counted now, unless it was just counted."""


@dataclass(eq=False)
class DeliveryOwner:
    """`run` returns after `stop`, which may be called from anywhere."""

    tools: DeliveryTools
    observer: DeliveryObserver
    candidate: Candidate
    limits: DeliveryLimits = DeliveryLimits()
    shard: int = FIRST
    shards: int = 1  # how many there are to be
    _live: LiveGroup | None = field(default=None, init=False)  # while this instance delivers

    def __post_init__(self) -> None:
        self._runtime, self._log = self.candidate.runtime, self.candidate.log
        self._stopping = self._runtime.wake()
        self._draining = self._runtime.wake()
        self._drained_by = 0.0
        self._catching_up = False  # the group: what it is sent is not settled yet
        self._wake = self._runtime.wake()
        self._lock = self._runtime.lock()
        self._serving: dict[str, TurnClass] = {}
        self._served_at: dict[str, float] = {}
        self._turns: list[Task] = []
        self._retries: dict[str, tuple[Task, int]] = {}  # see `ParkedQueue.under_way`
        self._beside: list[Task] = []  # what the group is sent beside, as it takes long
        self._failed: list[Exception] = []  # of these, under this lease
        self._ends: Ends = ()
        self._left = False  # whether a hand-over has left the group to the follower
        self._progress = Progress()  # of the follower; under a lease, the lease's
        self._queued = False  # whether a subscription waits for a turn of its own

    def stop(self) -> None:
        self._stopping.set()

    def drain(self) -> None:
        """Begin no more turns, and end what takes long: before a planned stop, after which nothing is sent again."""
        self._drained_by = self._runtime.monotonic() + self.limits.drain_s
        self._draining.set()

    def drained(self) -> bool:
        """Whether a stop would cut off nothing that it could have waited for."""
        with self._lock:
            return self._winds_down() and not self._catching_up and all(task.join(0.0) for task in self._beside)

    def _winds_down(self) -> bool:
        """Whether the group is left to the next owner; hand-overs of fresh batches are short, and go on."""
        overdue = self._runtime.monotonic() > self._drained_by
        return self._draining.is_set() and (overdue or not self._serving)

    def serving(self) -> set[str]:
        """The subscriptions that have a turn just now."""
        with self._lock:
            return set(self._serving)

    def hand_over(self, *spans: Span) -> None:
        """Batches of one partition were just taken: deliver them now if the live group is right before them."""
        live = self._live
        if live is None or any_set(self._ends):
            return
        if self._left or spans[0].place in live.beside:
            # Batches come so fast that the group would never be free: the follower has the next turn.
            live.note(*spans)
            return
        try:
            done = live.hand_over(*spans)
        except Exception as error:  # noqa: BLE001 - an optimisation that fails must not reach ingest
            self._log.warning("hand-over failed; the follower takes it", error=error, batch=spans[-1].to)
            done = False
        self.observer.handed_over(done)
        if not done:
            self._left = True
            self._wake.set()

    def run(self) -> None:
        while not self._stopping.is_set():
            held = self.candidate.acquire(deliver_lease(self.shard), self._stopping, self._say_standby)
            if held is None:
                return
            self.observer.owned()
            try:
                self._own(held)
            except Exception as error:  # noqa: BLE001 - an unknown failure must not end the loop in silence
                if isinstance(error, StaleError):
                    self.candidate.on_refused(deliver_lease(self.shard))
                self._log.error("delivery failed; it is started again", error=error)
                self._runtime.wait(self.limits.again_after_s, self._stopping)
            finally:
                self._live = None
                self.observer.released()
                held.close()

    def _say_standby(self) -> None:
        self._log.info("standing by: another instance delivers", **self._which())
        self.observer.standby()

    def _which(self) -> dict[str, int]:
        return {"shard": self.shard} if self.shards > 1 else {}

    def _own(self, held: HeldLease) -> None:
        tools, runtime, epoch, now = self.tools, self._runtime, held.lease.epoch, self._runtime.now
        store, observer, limits = tools.store, self.observer, self.limits
        progress = self._progress = held.progress
        progress.alive(PATIENT_S)  # subscriptions that begin at a time are looked up in the log
        if self.shard == FIRST:
            store.spread(self.shards, epoch)
            self._register(epoch)
            store.bots.forget_users(epoch)
        elif not self._is_there(held):
            return
        log, deliverer, lock = tools.log, tools.deliverer, runtime.lock
        bot_views = BotViews(store.bots, log.files, epoch, tools.memberships, lock=lock(), limits=limits.bot_views)
        live = LiveGroup(store, deliverer, epoch, now, observer.by_group, bot_views, lock(), limits.handover)
        live.progress = held.progress_beside()
        self._failed = []
        ended = runtime.wake()
        over = self._ends = (ended, self._stopping, held.lost)
        told = observer.by_follower, bot_views, limits.follow, observer.stuck
        follower = Follower(store, log, live, deliverer, epoch, now, *told, partial(any_set, over))
        ends = (*over, held.moved)
        self._live = live
        observer.delivering()
        self._log.info("delivering", epoch=epoch, subscriptions=len(store.subscriptions()), **self._which())
        beside = self._begin_beside(epoch, bot_views, follower, ends) if self.shard == FIRST else []
        try:
            self._follow(follower, ends)
            self._wind_down(follower, beside, over)
        finally:
            self._live = None  # before any wait: batches handed over from here on are another's work
            ended.set()
            progress.alive()
            # What is being posted just now is settled under this lease, and not posted again under the next.
            live_end_s = limits.end_s if held.lost.is_set() else limits.live_end_s
            deadline = runtime.monotonic() + live_end_s
            if live.lock.acquire(timeout=live_end_s):
                live.lock.release()
            for task in self._beside:
                task.join(max(0.0, deadline - runtime.monotonic()))
            progress.alive()
            deadline = runtime.monotonic() + limits.end_s
            for task in [*beside, *self._turns]:
                task.join(max(0.0, deadline - runtime.monotonic()))
            # A turn that goes on even now waits for a receiver that hangs. What it brings is refused, its epoch being
            # old, and while it lasts nobody begins another here; the others need not wait for it to have the lease.
            if late := sorted(self.serving()):
                self._log.warning("turns have not ended; the lease is let go of without them", subscriptions=late[:20])

    def _is_there(self, held: HeldLease) -> bool:
        """Wait until there is such a shard: its maker, the owner of the first, may be told of fewer."""
        said = False
        while not any_set((self._stopping, held.lost, held.moved)):
            held.progress.alive()
            try:
                self.tools.store.group()
            except NotFoundError as error:
                if not said:
                    self._log.info("standing by", reason=error.message)
                    self.observer.standby()
                said = True
                self._runtime.wait(self.limits.again_after_s, self._stopping, held.lost, held.moved)
            else:
                return True
        return False

    def _begin_beside(self, epoch: int, bot_views: BotViews, follower: Follower, ends: Ends) -> list[Task]:
        tools, runtime, limits, observer = self.tools, self._runtime, self.limits, self.observer
        store, sink, open_secret = tools.store, tools.sink, tools.open_secret
        log, deliverer = tools.log, tools.deliverer
        now, tick, slices = runtime.now, runtime.monotonic, limits.replay.slices
        over = partial(any_set, ends)
        told = observer.by_queue, over, self._retries
        queue = ParkedQueue(store, sink, open_secret, epoch, runtime, self._log, *told)
        asker = KeyAsker(store.bots, store.subscriptions, sink, open_secret, epoch, now, observer.by_asker, tick)
        replayer = Replayer(tools.replays, store, log, deliverer, epoch, now, tools.sources, bot_views, tick, slices)
        replays = ReplayLoop(replayer, tools.sources, observer, runtime, self._log, ends, tools.cores, limits.replay)

        def run_queue() -> None:
            while not over() and queue.run():
                pass  # more may be due than one turn takes

        def retry_parked() -> None:
            self._repeated("queue", run_queue, limits.queue_every_s, ends)()
            queue.finish()  # what is being posted is settled, as far as the end of delivery waits for it

        def sweep_parked() -> None:
            sweep(store, now(), epoch, over)
            try:
                release(store.bots, now(), epoch, over)
            finally:  # whatever becomes of that: what was released is no surplus, and too much goes in any case
                if given_up := sweep_surplus(store.bots, now(), epoch, over):
                    self._log.warning("too many events of one stream of a bot were parked", expired=given_up)

        repeated: list[tuple[str, Callable[[], object], float]] = [
            ("report", observer.report, limits.report_every_s),
            ("sweep", sweep_parked, limits.sweep_every_s),
            ("expire", lambda: follower.expire_stopped(over), limits.sweep_every_s),
            ("ask", asker.run, limits.ask_every_s),
        ]
        return [runtime.spawn("replay", replays.run), runtime.spawn("queue", retry_parked)] + [
            runtime.spawn(name, self._repeated(name, step, every_s, ends)) for name, step, every_s in repeated
        ]

    def _repeated(self, name: str, step: Callable[[], object], every_s: float, ends: Ends) -> Callable[[], None]:
        def repeat() -> None:
            while not any_set(ends):
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - tried again at the next turn
                    self._log.warning("delivery step failed", step=name, error=error)
                self._runtime.wait(every_s, *ends)

        return repeat

    def _register(self, epoch: int) -> None:
        tools, specs = self.tools, self.tools.specs()
        known = tools.store.subscriptions()
        mine, taken = registration.free_names(specs, known)
        for name in taken:
            self._log.error(
                "a subscription of the file is left out: its name was taken at run time",
                subscription=name,
                hint=f"rename it in the file, or run: evermark subscription remove {name}",
            )
        places = tools.log.heads()
        # Of new ones alone: where a time stands in the log is read from its files, and some of them may be missing.
        new = [spec for spec in specs if spec.name not in known]
        starts = {spec.name: registration.start_vector(spec.start, places, tools.batch_at) for spec in new}
        begun: dict[str, CursorVector] = {name: start for name, start in starts.items() if start is not None}
        tools.store.register(mine, MadeBy.FILE, begun, epoch)

    def _follow(self, follower: Follower, ends: Ends) -> None:
        while not any_set(ends):
            if not self._followed(follower, ends):
                return  # it is stood by for

    def _wind_down(self, follower: Follower, beside: Sequence[Task], over: Ends) -> None:
        """Another instance is to deliver: what is being posted is settled before it can begin, else it would post the
        same again, at the same time. Meanwhile the group goes on here.
        """
        until = self._runtime.monotonic() + self.limits.drain_s
        while not any_set(over) and self._runtime.monotonic() < until:
            if all(task.join(0.0) for task in (*beside, *self._turns, *self._beside)):
                return
            if not self._followed(follower, over, serves=False):
                return

    def _followed(self, follower: Follower, ends: Ends, *, serves: bool = True) -> bool:
        """One look. False: there is no such shard any more."""
        moved = False
        self._wake.clear()
        self._progress.alive()
        try:
            moved = self._catch_up_group(follower)
            if serves:
                self._serve(follower, ends)
        except (ConflictError, NotFoundError) as error:
            self._log.info("follower looks again", error=error)
            if self.shard != FIRST and not self._still_there():
                return False
        except EvermarkError as error:
            if action_for(error) is not Action.RETRY:
                raise
            self._log.warning("follower waits", error=error)
            self._runtime.wait(self.limits.again_after_s, *ends)
        if not moved:
            self._runtime.wait(self.limits.follow_every_s, self._wake, *ends)
        return True

    def _catch_up_group(self, follower: Follower) -> bool:
        with self._lock:
            self._catching_up = not self._winds_down()
        if not self._catching_up:
            return False
        if self._failed:
            raise self._failed.pop()
        self._progress.rest()  # the thread that works for the group is watched there: that of a hand-over, or this one
        try:
            moved = follower.catch_up_group(self.limits.group_wait_s if self._left else 0.0, self._begin_beside_group)
            self._left = False
            return moved
        finally:
            self._progress.alive()
            self._catching_up = False

    def _begin_beside_group(self, name: str, work: Callable[[], None]) -> None:
        failed, over = self._failed, self._ends

        def watched() -> None:
            if any_set(over):
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the loop decides, as if it had done the work itself
                failed.append(error)
            finally:
                self._wake.set()

        with self._lock:
            self._beside = [task for task in self._beside if not task.join(0.0)]
            self._beside.append(self._runtime.spawn(name[:60], watched))

    def _still_there(self) -> bool:
        return self.shard in self.tools.store.groups()

    def _serve(self, follower: Follower, ends: Ends) -> None:
        if self._draining.is_set():
            return
        with self._lock:
            busy = dict(self._serving)  # before the look: what is seen of a subscription in its turn may be old
        waiting = [one for one in follower.due() if one.name not in busy]
        waiting.sort(key=lambda one: self._served_at.get(one.name, 0.0))
        turns, self._queued = next_turns(waiting, follower.turn_class, list(busy.values()), self.limits.alone_at_once)
        for turn in turns:
            self._begin(turn, follower, ends)

    def _begin(self, turn: Turn, follower: Follower, ends: Ends) -> None:
        began = self._runtime.monotonic()
        with self._lock:
            self._serving.update(dict.fromkeys(turn.names, turn.turn_class))
        self._served_at.update(dict.fromkeys(turn.names, began))

        def work() -> None:
            moved = False
            try:
                if any_set(ends):
                    return
                on = follower.catch_up(*turn.subscriptions)
                moved = bool(on)
                while on and not any_set((*ends, self._draining)) and self._goes_on(turn, began):
                    current = [one for one in follower.due() if one.name in on]
                    on = follower.catch_up(*current) if current else frozenset()
            except Exception as error:  # noqa: BLE001 - tried again at the next turn
                self._log.warning("subscriptions not moved", subscriptions=turn.names, error=error)
                moved = False
            finally:
                with self._lock:
                    for name in turn.names:
                        del self._serving[name]
            if moved:
                self._wake.set()  # the next turn begins at once

        self._turns = [task for task in self._turns if not task.join(0.0)]
        self._turns.append(self._runtime.spawn(f"behind {', '.join(turn.names)}"[:60], work))

    def _goes_on(self, turn: Turn, began: float) -> bool:
        return goes_on(turn, self._runtime.monotonic() - began, queued=self._queued)
