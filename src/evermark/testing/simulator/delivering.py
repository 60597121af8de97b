"""Delivery of one instance: the live group, the follower, the queue, and a person who interferes now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.base import (
    CursorVector,
    MadeBy,
    ParkedRow,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.follower import Follower
from evermark.delivery.live import LiveGroup
from evermark.delivery.queue import ParkedQueue
from evermark.delivery.retry import Verdict
from evermark.delivery.sinks.base import Answer, as_it_is
from evermark.delivery.work import Span
from evermark.error_policy import Action, action_for
from evermark.errors import ConflictError, EvermarkError, NotFoundError, UnreachableError
from evermark.testing.simulator.baton import SimLock, Task
from evermark.testing.simulator.instance import HeldLease, Idle, Instance, SimLogView
from evermark.testing.simulator.receiver import SimDeliverer, SimSink
from evermark.testing.simulator.source import Row

_QUEUE_JOIN_S = 5.0


class DeliveryRunner:
    """Stands by for the `deliver` lease; while it has it, nobody else delivers."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._world = instance.world
        self._baton = instance.world.baton
        self._view = SimLogView(instance)
        self._busy: dict[str, Task] = {}
        scenario, rng = self._world.scenario, self._baton.rng
        self._deliverer = SimDeliverer(
            self._world.truth,
            self._world.logs,
            self._post,
            rng,
            lambda: self._baton.now,
            scenario.ttl_s,
            lambda: not self._world.calm and rng.random() < scenario.receiver_chance["slow"],
        )
        busy = scenario.receiver_chance["busy"]
        self._sink = SimSink(self._post, lambda: not self._world.calm and rng.random() < busy)

    def _post(self, spec: SubscriptionSpec, row: Row) -> Answer:
        receiver = self._world.receiver(spec.name)
        try:
            answer = self._world.effect(
                self._instance, f"post {spec.name} {row.event_id}", lambda: receiver.post(spec, row, self._baton.now)
            )
        except UnreachableError:
            return Answer(Verdict.ENDPOINT, reason="no answer")
        return cast(Answer, answer)

    def run(self) -> None:
        while True:
            held = self._instance.acquire(DELIVER_LEASE)
            try:
                self._own(held)
            except EvermarkError:
                self._world.count("delivery started again")
                self._baton.sleep(1.0)
            finally:
                self._instance.on_span = lambda _: None
                held.close()

    def _own(self, held: HeldLease) -> None:
        instance, epoch, store = self._instance, held.lease.epoch, self._instance.store
        store.register(self._world.file_specs(), MadeBy.FILE, self._starts(), epoch)
        live = LiveGroup(store, self._deliverer, epoch, instance.clock)
        live.lock = cast(Any, SimLock(self._baton))
        follower = Follower(store, self._view, live, self._deliverer, epoch, instance.clock)
        queue = ParkedQueue(store, cast(Any, self._sink), as_it_is, epoch, instance.clock, self._baton.rng.random)
        instance.on_span = lambda span: self._hand_over(live, span)
        ended = [False]

        def over() -> bool:
            return ended[0] or held.lost

        tasks = [
            instance.spawn("queue", lambda: self._repeat(queue.run, over, 1.0)),
            instance.spawn("person", lambda: self._repeat(lambda: self._interfere(epoch), over, 2.0)),
        ]
        try:
            self._follow(follower, over)
        finally:
            ended[0] = True
            self._wait_for(tasks)

    def _wait_for(self, tasks: list[Task]) -> None:
        """Whoever works for a subscription is waited for; the others may be in the middle of something for longer."""
        while self._busy:
            self._baton.sleep(0.1)
        until = self._baton.now + _QUEUE_JOIN_S
        while not all(task.done for task in tasks) and self._baton.now < until:
            self._baton.sleep(0.2)

    def _hand_over(self, live: LiveGroup, span: Span) -> None:
        try:
            live.hand_over(span)
        except EvermarkError:
            self._world.count("hand-overs failed")

    def _follow(self, follower: Follower, over: Callable[[], bool]) -> None:
        idle = Idle(self._world, 0.4)
        while not over():
            moved = False
            try:
                moved = follower.catch_up_group()
                for subscription in follower.due():
                    self._catch_up(follower, subscription, over)
            except (ConflictError, NotFoundError):
                self._world.count("follower looks again")
            except EvermarkError as error:
                if action_for(error) is not Action.RETRY:
                    raise
                self._baton.sleep(1.0)
            idle.wait(moved=moved or bool(self._busy))

    def _catch_up(self, follower: Follower, subscription: Subscription, over: Callable[[], bool]) -> None:
        if subscription.name in self._busy:
            return

        def work() -> None:
            current: Subscription | None = subscription
            try:
                while current is not None and not over() and follower.catch_up(current):
                    current = next((s for s in follower.due() if s.name == subscription.name), None)
            except EvermarkError:
                self._world.count("subscriptions not moved")
            finally:
                del self._busy[subscription.name]

        self._busy[subscription.name] = self._instance.spawn(f"behind {subscription.name}", work)

    def _repeat(self, step: Callable[[], object], over: Callable[[], bool], every_s: float) -> None:
        idle = Idle(self._world, every_s)
        while not over():
            moved = False
            try:
                moved = bool(step())
            except EvermarkError:
                self._world.count("steps failed")
            idle.wait(moved=moved)

    def _starts(self) -> dict[str, CursorVector]:
        return {
            spec.name: dict.fromkeys(self._view.heads(), 0)
            for spec in self._world.file_specs()
            if spec.start == "beginning"
        }

    def _interfere(self, epoch: int) -> bool:
        """A person makes a subscription or makes it anew, pauses one, gives up what is dead, resumes what needs it."""
        store, rng, calm, api = self._instance.store, self._baton.rng, self._world.calm, self._world.scenario.api_spec
        known: dict[str, Subscription] = store.subscriptions()
        impatience = 0.5 if api is not None and api.name in self._busy else 0.1
        if api is not None and (api.name not in known if calm else rng.random() < impatience):
            self._make_anew(api.name, epoch)
            return True
        dead = [row for row in store.parked(limit=100) if self._is_hopeless(row, known)]
        if dead and (self._world.calm or rng.random() < 0.2):
            self._world.truth.before_drop([(row.subscription, row.event.event_id) for row in dead])
            store.drop([row.id for row in dead], epoch)
            return True
        for name, subscription in known.items():
            paused = subscription.state is SubscriptionState.SUSPENDED and subscription.next_attempt_at is None
            if (paused or subscription.state is SubscriptionState.DISABLED) and (
                self._world.calm or rng.random() < 0.5
            ):
                self._world.receiver(name).gone = False
                store.resume(name, epoch)
                return True
        if not self._world.calm and known and rng.random() < 0.1:
            store.suspend(rng.choice(sorted(known)), "a person", epoch)
        return False

    def _make_anew(self, name: str, epoch: int) -> None:
        """From now on, or from where the former one stood."""
        store = self._instance.store
        stood: CursorVector = store.cursors(name)
        store.register([], MadeBy.API, {}, epoch)
        starts = {name: stood} if stood and self._baton.rng.random() < 0.7 else {}
        store.register(self._world.api_specs(), MadeBy.API, starts, epoch)

    def _is_hopeless(self, row: ParkedRow, known: Mapping[str, Subscription]) -> bool:
        """Dead; or, in the calm, in the way of a subscription that has too much parked and will never be taken."""
        subscription = known.get(row.subscription)
        forever = row.event.event_id in self._world.truth.refused_forever[row.subscription]
        stuck = subscription is not None and subscription.state is SubscriptionState.SUSPENDED
        return row.next_attempt_at is None or (self._world.calm and forever and stuck)
