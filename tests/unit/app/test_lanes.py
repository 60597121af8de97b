"""The driver's side of lanes: a lane that is never ready, and work shared out over several."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.app import lanes as lanes_module
from evermark.app.delivering import limits_for
from evermark.app.lane import EndTimes
from evermark.app.lanes import Lanes, shared_out
from evermark.delivery.run.owner import DeliveryLimits
from evermark.runtime import Threads
from evermark.sources.base import Limit


def lanes(monkeypatch: pytest.MonkeyPatch, cancelled: list[str]) -> Any:
    """Without Spark: its jobs never begin, and are only noted when they are cancelled."""
    found: Any = object.__new__(Lanes)
    found._runtime, found._lanes, found._context, found._waiting = Threads(), {}, None, {}
    found._share = frozenset({"deliver"})
    found._able, found._on_able, found._telling_able = {}, lambda _: None, threading.Lock()
    found._stopping, found._hurry, found._late_in_a_row = found._runtime.wake(), found._runtime.wake(), {}
    monkeypatch.setattr(Lanes, "_job", lambda _self, _lane: None)
    monkeypatch.setattr("evermark.spark.job.cancel_long_task", lambda _spark, name: cancelled.append(name))
    return found


def test_a_lane_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a task that Spark never begins WHEN its time is over THEN it is cancelled, with a reason."""
    monkeypatch.setattr(lanes_module, "_READY_MAX_S", 0.2)
    monkeypatch.setattr(lanes_module, "_LOOK_EVERY_S", 0.05)
    cancelled: list[str] = []
    found = lanes(monkeypatch, cancelled)
    lane = found._submit(cast("Any", SimpleNamespace(sources=(), shard=0)))
    assert found._kept(lane) is lane
    assert cancelled == [lane.name]
    assert "was not ready within" in lane.error


def test_every_source_is_in_one_lane_and_every_lane_has_a_shard() -> None:
    """GIVEN five sources WHEN shared out over two lanes THEN none is read twice, or by nobody."""
    parts: Any = SimpleNamespace(sources=dict.fromkeys("edcba"))
    works = shared_out(parts, Limit(), EndTimes(1.0, 1.0), 2)
    assert [(work.sources, work.shard, work.shards) for work in works] == [(("a", "c", "e"), 0, 2), (("b", "d"), 1, 2)]


class Told:
    """The channel, as far as orders go: they are kept."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    def tell(self, *order: Any) -> bool:
        self.orders.append(order)
        return True


def test_the_retry_of_a_lane_that_is_being_renewed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane told to let go WHEN its worker was killed and Spark tries again THEN the retry is told, too: it
    would go on beside its successor for ever.
    """
    found = lanes(monkeypatch, [])
    found._channel = told = Told()
    lane, successor = (found._submit(cast("Any", SimpleNamespace(sources=("shop",), shard=0))) for _ in range(2))
    lane.began, lane.successor = 1.0, successor
    found._heard(lane.name, [("lane", "ready", (), {})])
    assert [order[1] for order in told.orders if order[0] == lane.name] == ["share", "begin", "renew"]


def test_a_share_that_changes_while_a_lane_is_told_it_is_the_last_one_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that is ready WHEN its share changes between being read and being told THEN the lane keeps the new
    one: with the old one it might take nothing until the instances change again, which may be never.
    """
    found = lanes(monkeypatch, [])
    found._share, told = frozenset(), Told()
    lane, after = found._submit(cast("Any", SimpleNamespace(sources=("shop",), shard=0))), frozenset({"source:shop"})

    def tell(*order: Any) -> bool:
        if order[1:] == ("share", frozenset()):
            found.share(after)
        return told.tell(*order)

    found._channel = SimpleNamespace(tell=tell)
    found._heard(lane.name, [("lane", "ready", (), {})])
    assert [order[2] for order in told.orders if order[1] == "share"][-1] == after


def test_when_a_lane_fails_whose_next_is_ready_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane and its next WHEN the lane fails THEN the next takes all of its parts, and is not forgotten."""
    monkeypatch.setattr(lanes_module, "_LOOK_EVERY_S", 0.05)
    found = lanes(monkeypatch, [])
    found._channel, found._lane_s = Told(), 0.0
    found._log = SimpleNamespace(error=lambda *_, **__: None, warning=lambda *_, **__: None)
    work = cast("Any", SimpleNamespace(sources=(), shard=0))
    lane, submitted = found._submit(work), found._submit

    def submit(again: Any) -> Any:
        following = submitted(again)
        lane.error = "lost"
        lane.ended.set()
        return following

    monkeypatch.setattr(found, "_submit", submit)
    lane.ready.set()
    following = found._kept(lane)
    assert following is not lane
    assert following is found._lanes[following.name]


def test_what_a_lane_has_let_go_of_is_begun_by_the_lane_after_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that still reads a large batch, and has let go of its other parts WHEN the lane that follows it
    fails THEN another follows soon, and begins with these parts."""
    monkeypatch.setattr(lanes_module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(lanes_module, "_BACKOFF_MAX_S", 0.05)
    found = lanes(monkeypatch, [])
    found._channel, found._lane_s = told, _ = Told(), 0.05
    found._log = SimpleNamespace(error=lambda *_, **__: None, warning=lambda *_, **__: None)
    work = cast("Any", SimpleNamespace(sources=("shop",), shard=0))
    lane, submitted, following = found._submit(work), found._submit, []

    def submit(again: Any) -> Any:
        following.append(submitted(again))
        late_s = 0.1 * (len(following) - 1)  # the second is not ready at once
        threading.Timer(
            late_s, lambda lane: found._heard(lane.name, [("lane", "ready", (), {})]), following[-1:]
        ).start()
        return following[-1]

    def tell(name: str, order: str, *parts: str) -> None:
        told.orders.append((name, order, *parts))
        if order == "renew" and len(following) == 1:
            found._heard(lane.name, [("lane", "let_go", ("delivery",), {})])
            following[0].error = "no room"
            following[0].ended.set()
            found._lane_s = 3_600.0
        elif order == "renew":
            assert following[1].error is None
            lane.ended.set()

    monkeypatch.setattr(found, "_submit", submit)
    monkeypatch.setattr(told, "tell", tell)
    lane.ready.set()
    assert found._kept(lane) is following[1]
    assert (following[1].name, "begin", "delivery") in told.orders


def test_a_lane_that_nobody_runs_or_that_is_silent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that Spark does not begin, and one that said nothing for a while THEN the work stands still; a lane
    that has just been submitted, or has just spoken, is no trouble."""
    found = lanes(monkeypatch, [])
    found._works = [SimpleNamespace(sources=("shop",), shard=0), SimpleNamespace(sources=("chat",), shard=3)]
    found._waiting[0] = time.monotonic()
    assert found.stalled() == {}
    found._waiting[0] -= lanes_module._READY_MAX_S + 1
    assert found.stalled() == {"shop": "lane 0 waits for Spark to run it"}, "the others are read"
    found._waiting.clear()
    lane = found._submit(found._works[1])
    lane.began = lane.heard_at = time.monotonic()
    assert found.stalled() == {}
    lane.heard_at -= lanes_module._STALLED_AFTER_S + 1
    assert found.stalled() == {"chat": "lane 3 is silent"}


def test_a_spark_that_begins_no_lane_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two lanes of each shard in a row that Spark did not begin in their time THEN Spark has to be started again,
    not while a shard has other troubles, not for lanes that it began, and not where a later one began."""
    monkeypatch.setattr(lanes_module, "_READY_MAX_S", 0.05)
    monkeypatch.setattr(lanes_module, "_LOOK_EVERY_S", 0.02)
    found = lanes(monkeypatch, [])
    found._channel, found._works = Told(), [SimpleNamespace(sources=(), shard=shard) for shard in range(2)]

    def stuck_after(shard: int, asked: bool = False) -> bool:
        lane = found._submit(found._works[shard])
        lane.asked = asked
        assert found._kept(lane).error is not None
        return found.stuck() is not None

    assert [stuck_after(shard) for shard in (0, 0, 0, 1, 1)] == [False, False, False, False, True]
    failed = found._submit(found._works[0])
    failed.error = "State is away"
    failed.ended.set()
    found._kept(failed)
    assert found.stuck() is None
    assert not any(stuck_after(shard, asked=True) for shard in (0, 0, 1, 1))


def test_a_next_lane_is_looked_after_while_the_lane_before_it_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that has let go of one source, and reads a long batch of another WHEN the task of the next lane is
    tried again THEN it is told that source alone; WHEN it is silent THEN that source is named, and the lane given up;
    WHEN the task of the first lane is tried again THEN it is told what it has not let go of."""
    monkeypatch.setattr(lanes_module, "_LOOK_EVERY_S", 0.02)
    found = lanes(monkeypatch, [])
    found._channel, found._lane_s = told, _ = Told(), 3_600.0
    found._log = SimpleNamespace(error=lambda *_, **__: None, warning=lambda *_, **__: None)
    work = cast("Any", SimpleNamespace(sources=("chat", "shop"), shard=0))
    found._works = [work]
    lane, following = found._submit(work), found._submit(work)
    lane.began = lane.heard_at = time.monotonic()
    following.ready.set()
    found._renew(lane, following)
    found._heard(lane.name, [("lane", "let_go", ("source chat",), {})])
    for name in (following.name, lane.name):
        told.orders.clear()
        found._heard(name, [("lane", "ready", (), {})])
        begun = [order[2:] for order in told.orders if order[1] == "begin"]
        assert begun == [("source chat",) if name == following.name else ("delivery", "source shop")]
    assert found.stalled() == {}
    following.heard_at -= lanes_module._SILENT_MAX_S + 1
    assert found.stalled() == {"chat": "lane 0 is silent"}
    assert found._followed(lane, following) is following
    assert following.error == f"{following.name} {lanes_module._SILENT}"
    following.ended.set()
    assert found._followed(lane, following) is None
    assert 0 < lane.began + found._lane_s - time.monotonic() <= lanes_module._BACKOFF_MAX_S
    following.heard_at = lane.heard_at = time.monotonic()
    assert found.stalled() == {}
    lane.alone_since -= lanes_module._STALLED_AFTER_S + 1
    assert found.stalled() == {"chat": "lane 0 has no successor"}
    told.orders.clear()
    found._is_ready(lane)
    assert "renew" not in [order[1] for order in told.orders], "there is no lane to let go to"


def test_a_next_lane_that_fails_takes_no_work_from_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane at work and one that is to follow it WHEN the latter fails, before it is ready or after THEN this
    instance can do the work as before; WHEN the lane at work fails, too THEN it cannot, until another is ready."""
    found, told = lanes(monkeypatch, []), []
    found._on_able = lambda works: told.append([work.shard for work in works])
    found._channel = SimpleNamespace(tell=lambda *_: None)
    found._board = SimpleNamespace(deliver=lambda **_: None)
    work = cast("Any", SimpleNamespace(sources=("shop",), shard=0))

    def fails(lane: Any) -> None:
        lane.error = "no room"
        lane.ended.set()
        found._no_longer_able(lane)

    at_work = found._submit(work)
    found._is_ready(at_work)
    fails(found._submit(work))
    following = found._submit(work)
    found._is_ready(following)
    fails(following)
    assert told == [[0], [0]] and not found._ended_alone(following)
    fails(at_work)
    assert told[2:] == [[]] and found._ended_alone(at_work)
    found._is_ready(found._submit(work))
    assert told[3:] == [[0]]


def test_the_cores_of_a_cluster_are_shared_by_the_work_of_its_lanes() -> None:
    """GIVEN a cluster THEN what the lanes and their successors do not take is for jobs, and behind subscriptions and
    replays get as many; GIVEN one machine THEN the limits are those that were measured there."""
    parts: Any = SimpleNamespace(sources={"a": None})
    assert [work.at_once for work in shared_out(parts, Limit(), EndTimes(1.0, 1.0), 2, cores=100)] == [48, 48]
    assert [work.at_once for work in shared_out(parts, Limit(), EndTimes(1.0, 1.0), 1)] == [0]
    assert (limits_for(48).alone_at_once, limits_for(48).replay.at_once) == (48, 24)
    assert limits_for(0) == limits_for(2) == DeliveryLimits()
