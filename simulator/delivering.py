"""Delivery of one instance: the product's owner of delivery over ports that may fail, and simulated receivers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from evermark.cluster.fence import deliver_lease
from evermark.delivery.bots.views import ViewLimits
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import KeyWanted, Outcome, SourcePartition, Subscription, SubscriptionSpec
from evermark.delivery.replay.owner import ReplayLimits
from evermark.delivery.replay.plan import Due, Replay, Replayed
from evermark.delivery.run.follower import Follower, FollowLimits
from evermark.delivery.run.live import HandoverLimits, LiveGroup
from evermark.delivery.run.owner import DeliveryLimits, DeliveryOwner, DeliveryTools
from evermark.delivery.run.parked_retries import Tried
from evermark.delivery.webhook.base import Answer, as_it_is
from evermark.delivery.work import Span
from evermark.errors import EvermarkError, UnreachableError
from evermark.log.opened import lost
from evermark.runtime import Task, Wake
from simulator import ports
from simulator.broken import Broken
from simulator.instance import Instance, SimLogView
from simulator.posting import SimSink, said, stream_of
from simulator.replaying import SimBothDeliverer
from simulator.source import Row, SimLog
from simulator.world import SLICES, World

# Spans of a few rows, and waits of seconds: limits made for millions, and for days, would never be met.
LIMITS = DeliveryLimits(
    follow_every_s=0.4,
    ask_every_s=5.0,
    handover=HandoverLimits(rows_max=8),
    follow=FollowLimits(join_distance_max=3, join_rows_max=8, span_rows_max=10, beside_rows_min=3, shared_rows_max=5),
    bot_views=ViewLimits(quick_rows_max=6, look_rows=6, keep_every=3),
    replay=ReplayLimits(slices=SLICES),
)
_CORES = 2


@dataclass
class SimDeliveryObserver:
    """`DeliveryObserver`: nobody has to know."""

    instance: Instance

    def standby(self) -> None: ...

    def owned(self) -> None: ...

    def delivering(self) -> None: ...

    def released(self) -> None: ...

    def handed_over(self, delivered: bool) -> None: ...

    def by_group(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None: ...

    def stuck(self, place: SourcePartition, subscription: str | None, error: EvermarkError) -> None: ...

    def by_follower(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None: ...

    def by_queue(self, tried: Sequence[Tried]) -> None: ...

    def by_asker(self, asked: Sequence[tuple[KeyWanted, Answer]]) -> None: ...

    def by_replay(self, due: Due, result: Replayed) -> None: ...

    def replay_stuck(self, replay: Replay, subscription: str | None, error: EvermarkError) -> None: ...

    def replaying(self, replays: list[Replay]) -> None: ...

    def report(self) -> None: ...


class WatchedOwner(DeliveryOwner):
    """Shows whom its follower is about to work for: at that moment nothing can have changed since it looked."""

    instance: Instance
    former: LiveGroup | None = None

    def hand_over(self, *spans: Span) -> None:
        if self.former is not None and self._live is self.former:
            self.instance.world.fail(Broken("a batch is handed over while the end of delivery is waited for"))
        super().hand_over(*spans)

    def _follow(self, follower: Follower, ends: tuple[Wake, ...]) -> None:
        find, live, world = follower.due, self._live, self.instance.world

        def due() -> list[Subscription]:
            found = find()
            with world.judged():
                world.account.standings.look_at_due(found)
            return found

        cast(Any, follower).due = due
        try:
            super()._follow(follower, ends)
        except BaseException:
            self.former = live
            raise

    def _wind_down(self, follower: Follower, beside: Sequence[Task], over: tuple[Wake, ...]) -> None:
        live = self._live
        try:
            super()._wind_down(follower, beside, over)
        finally:
            self.former = live


def _post(instance: Instance, lease: str, spec: SubscriptionSpec, rows: Sequence[Row], replay: str = "") -> Answer:
    world, ids = instance.world, " ".join(row.event_id for row in rows)
    receiver = world.receiver_of(spec)

    def act() -> Answer:
        stale = world.owner_epoch(lease) != instance.epochs.get(lease)
        return receiver.post(spec, rows, world.baton.now, replay, stale=stale)

    try:
        answer = world.effect(instance, f"post {spec.name} {ids} {replay}".rstrip(), act)
    except UnreachableError:
        return Answer(Verdict.ENDPOINT, reason="no answer")
    return cast(Answer, answer)


def _telling(
    world: World, logs: Mapping[str, SimLog], paths: Sequence[str], partition: int, after: int, to: int
) -> list[dict[str, Any]]:
    """What `evermark.delivery.bots.views` finds in files."""
    if gone := [path for path in paths if world.is_missing(path)]:
        raise lost(gone[0])
    held = [log.contents[path] for log in logs.values() for path in paths if path in log.contents]
    rows = [r for some in held for r in some if r.place.partition == partition and after < r.batch <= to]
    found = sorted((row for row in rows if row.about.kind != "message"), key=lambda r: (r.batch, r.position))
    return [
        {"stream": stream_of(r), "op": "message", "batch": r.batch, "position": r.position}
        | {"payload": json.dumps(said(r))}
        for r in found
    ]


def delivery_of(instance: Instance, shard: int, shards: int) -> DeliveryOwner:
    world, lease = instance.world, deliver_lease(shard)
    baton, scenario, rng = world.baton, world.scenario, world.baton.rng

    post, begin = partial(_post, instance, lease), partial(instance.begin_work, lease)

    def takes_s(spec: SubscriptionSpec) -> float:
        return world.receiver_of(spec).takes_s(baton.now)

    deliverer = SimBothDeliverer(
        world.account,
        world.logs,
        post,
        rng,
        lambda: baton.now,
        baton.sleep,
        takes_s,
        scenario.ttl_s,
        begin,
        world.is_missing,
        world.others,
    )
    busy = scenario.receiver_chance["busy"]
    sink = SimSink(
        post,
        lambda: not world.calm and rng.random() < busy,
        world.account.live_failed.add,
        begin,
        lambda: baton.now,
        baton.sleep,
        takes_s,
        world.fail,
    )
    sources = {name: instance.port(f"source {name}", made, ports.nothing) for name, made in world.sources.items()}
    tools = DeliveryTools(
        instance.store_of(shard),
        instance.replays,
        SimLogView(instance),
        deliverer,
        cast(Any, sink),
        as_it_is,
        sources,
        world.file_specs,
        lambda _place, _since: 0,
        _CORES,
        partial(_telling, world, world.logs),
    )
    owner = WatchedOwner(
        tools,
        SimDeliveryObserver(instance),
        instance.candidate,
        LIMITS,
        shard,
        shards,
    )
    owner.instance = instance
    return owner
