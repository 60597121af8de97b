"""Delivery of one instance: the live group, the follower and the queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.base import BEGINNING, CursorVector, MadeBy, Subscription, SubscriptionSpec
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide.registration import free_names
from evermark.delivery.decide.retry import Verdict
from evermark.delivery.decide.turns import Turn, TurnClass, goes_on, next_turns
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.parked_retries import ParkedQueue
from evermark.delivery.webhook.base import Answer, as_it_is
from evermark.delivery.work import Span
from evermark.error_policy import Action, action_for
from evermark.errors import ConflictError, EvermarkError, NotFoundError, UnreachableError
from evermark.testing.simulator.baton import SimLock, Task
from evermark.testing.simulator.instance import HeldLease, Idle, Instance, SimLogView
from evermark.testing.simulator.posting import SimDeliverer, SimSink, said, stream_of
from evermark.testing.simulator.replaying import ReplayingRunner, SimReplays
from evermark.testing.simulator.source import Row

_QUEUE_JOIN_S = 5.0


class WatchedFollower(Follower):
    """Shows whom it is about to work for: at that moment nothing can have changed since it looked."""

    watch: Callable[[Sequence[Subscription]], None]

    def due(self) -> list[Subscription]:
        found = super().due()
        self.watch(found)
        return found


class DeliveryRunner:
    """Stands by for the `deliver` lease; while it has it, nobody else delivers."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._world = instance.world
        self._baton = instance.world.baton
        self._view = SimLogView(instance)
        self._epoch = 0
        self._serving: dict[str, TurnClass] = {}
        scenario, rng = self._world.scenario, self._baton.rng
        self._deliverer = SimDeliverer(
            self._world.account,
            self._world.logs,
            self._post,
            rng,
            lambda: self._baton.now,
            self._baton.sleep,
            lambda spec: self._world.receiver_of(spec).takes_s(self._baton.now),
            scenario.ttl_s,
        )
        busy = scenario.receiver_chance["busy"]
        failed = self._world.account.live_failed
        self._sink = SimSink(self._post, lambda: not self._world.calm and rng.random() < busy, failed.add)

    def _post(self, spec: SubscriptionSpec, rows: Sequence[Row], replay: str = "") -> Answer:
        receiver, ids = self._world.receiver_of(spec), " ".join(row.event_id for row in rows)

        def act() -> Answer:
            stale = self._world.owner_epoch(DELIVER_LEASE) != self._epoch
            return receiver.post(spec, rows, self._baton.now, replay, stale=stale)

        try:
            answer = self._world.effect(self._instance, f"post {spec.name} {ids} {replay}".rstrip(), act)
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
        instance, store = self._instance, self._instance.store
        epoch = self._epoch = held.lease.epoch
        mine, _ = free_names(self._world.file_specs(), store.subscriptions())
        store.register(mine, MadeBy.FILE, self._starts(), epoch)
        store.bots.forget_users(epoch)
        bot_views = BotViews(store.bots, self._view.files, epoch, self._telling)
        bot_views._lock = cast(Any, SimLock(self._baton))
        live = LiveGroup(store, self._deliverer, epoch, instance.clock, bot_views=bot_views)
        live.lock = cast(Any, SimLock(self._baton))
        follower = WatchedFollower(store, self._view, live, self._deliverer, epoch, instance.clock, bot_views=bot_views)
        follower.watch = self._world.account.standings.look_at_due
        queue = ParkedQueue(store, cast(Any, self._sink), as_it_is, epoch, instance.clock, self._baton.rng.random)
        instance.on_span = lambda span: self._hand_over(live, span)
        ended = [False]

        def over() -> bool:
            return ended[0] or held.lost

        task = instance.spawn("queue", lambda: self._repeat(queue.run, over, 1.0))
        replaying = self._replaying(bot_views, over) if self._world.scenario.replays else None
        try:
            self._follow(follower, over)
        finally:
            ended[0] = True
            self._wait_for(task)
            while replaying is not None and replaying.busy:
                self._baton.sleep(0.1)

    def _replaying(self, bot_views: BotViews, over: Callable[[], bool]) -> ReplayingRunner:
        instance = self._instance
        replayer = Replayer(
            instance.replays,
            instance.store,
            self._view,
            SimReplays(self._deliverer),
            self._epoch,
            instance.clock,
            list(self._world.sources),
            bot_views=bot_views,
            stopwatch=lambda: self._baton.now,
        )
        runner = ReplayingRunner(instance, replayer, over)
        instance.spawn("replays", runner.run)
        return runner

    def _telling(self, paths: Sequence[str], partition: int, after: int, to: int) -> list[dict[str, Any]]:
        """What `evermark.delivery.bots.views` finds in files."""
        held = [log.contents[path] for log in self._world.logs.values() for path in paths if path in log.contents]
        rows = [r for some in held for r in some if r.place.partition == partition and after < r.batch <= to]
        found = sorted((row for row in rows if row.about.kind != "message"), key=lambda r: (r.batch, r.position))
        return [
            {"stream": stream_of(r), "op": "message", "batch": r.batch, "position": r.position}
            | {"payload": json.dumps(said(r))}
            for r in found
        ]

    def _wait_for(self, task: Task) -> None:
        """Whoever works for a subscription is waited for; the queue may be in the middle of something for longer."""
        while self._instance.busy:
            self._baton.sleep(0.1)
        until = self._baton.now + _QUEUE_JOIN_S
        while not task.done and self._baton.now < until:
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
                self._serve(follower, over)
            except (ConflictError, NotFoundError):
                self._world.count("follower looks again")
            except EvermarkError as error:
                if action_for(error) is not Action.RETRY:
                    raise
                self._baton.sleep(1.0)
            idle.wait(moved=moved or bool(self._instance.busy))

    def _serve(self, follower: Follower, over: Callable[[], bool]) -> None:
        waiting = [one for one in follower.due() if one.name not in self._instance.busy]
        turns, queued = next_turns(waiting, follower.turn_class, list(self._serving.values()))
        for turn in turns:
            self._begin(turn, follower, over, queued=queued)

    def _begin(self, turn: Turn, follower: Follower, over: Callable[[], bool], *, queued: bool) -> None:
        busy, began = self._instance.busy, self._baton.now

        def work() -> None:
            try:
                on = follower.catch_up(*turn.subscriptions)
                while on and not over() and goes_on(turn, self._baton.now - began, queued=queued):
                    current = [one for one in follower.due() if one.name in on]
                    on = follower.catch_up(*current) if current else frozenset()
            except EvermarkError:
                self._world.count("subscriptions not moved")
            finally:
                for name in turn.names:
                    del busy[name], self._serving[name]

        self._serving.update(dict.fromkeys(turn.names, turn.turn_class))
        task = self._instance.spawn(f"behind {', '.join(turn.names)}", work)
        busy.update(dict.fromkeys(turn.names, task))

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
            spec.name: dict.fromkeys(self._view.heads(), BEGINNING)
            for spec in self._world.file_specs()
            if spec.start == "beginning"
        }
