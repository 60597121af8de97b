"""The loop that owns delivery: what goes on when a part of it fails, and how it ends. In simulated time, in memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evermark.cluster.base import Holder, Lease
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.holding import Candidate
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.turns import TurnClass
from evermark.delivery.model import Cursor, GroupWork, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.run import parked_retries
from evermark.delivery.run.follower import FOLLOW_BUDGET_S, Follower
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.owner import DeliveryOwner, DeliveryTools
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook.base import Answer, Try
from evermark.delivery.work import Span
from evermark.errors import StaleError, UnreachableError
from evermark.testing.contracts.scene import done, event
from simulator.baton import Baton, BatonRuntime, Process

PLACE = SourcePartition("shop", 0)
ACCEPTED, REFUSED = Answer(Verdict.ACCEPTED, 204), Answer(Verdict.REFUSED, 422, "HTTP 422")


class Scene:
    """Subscriptions and an empty log; what was said is kept, and what was tried again: when, whose and which."""

    def __init__(self, *names: str, takes_s: float = 0.0) -> None:
        self.runtime = BatonRuntime(Baton(random.Random(1), 0.5, 0.01), Process("p"))
        self.leases = MemoryLeases(clock=self.runtime.now, is_gone=lambda _: False)
        self.store = MemoryDelivery(self.leases, jitter=lambda: 0.0, clock=self.runtime.now)
        self.takes_s = takes_s  # what "slow" needs to answer a retry
        self.tried: list[tuple[float, str, str]] = []
        self.trying = self.trying_max = 0
        self.answer = ACCEPTED
        self.said: list[tuple[str, dict[str, object]]] = []
        self.reports = 0
        self.on_report: Callable[[], None] = lambda: None
        say = lambda event, **about: self.said.append((event, about))  # noqa: E731
        log = SimpleNamespace(debug=say, info=say, warning=say, error=say)
        view = SimpleNamespace(heads=dict, files=lambda _: [])
        nothing = cast("Any", SimpleNamespace(deliver=None, replay=None, attempt=self._attempt))
        specs = [SubscriptionSpec(name, f"https://{name}.example") for name in names or "a"]
        tools = DeliveryTools(
            self.store,
            MemoryReplays(self.store, clock=self.runtime.now),
            cast("Any", view),
            nothing,
            nothing,
            str,
            {},
            lambda: specs,
            lambda *_: 0,
            2,
        )
        self.candidate = Candidate(self.leases, Holder("me", "host", "boot", 1, "1"), self.runtime, log)
        self.owner = DeliveryOwner(tools, cast("Any", self), self.candidate)

    def report(self) -> None:
        self.reports += 1
        self.on_report()

    def __getattr__(self, name: str) -> Any:
        if name in (
            "standby",
            "owned",
            "delivering",
            "released",
            "handed_over",
            "replaying",
            "stuck",
            "replay_stuck",
        ) or name.startswith("by_"):
            return lambda *_: None
        raise AttributeError(name)

    def run(self, seconds: float) -> None:
        """Deliver for this long, then stop."""
        task = self.runtime.spawn("deliver", self.owner.run)
        self.runtime.spawn("stop", lambda: (self.runtime.wait(seconds), self.owner.stop()))
        self.runtime.baton.run(lambda: task.task.done)
        self.runtime.baton.close()

    def events(self) -> list[str]:
        return [event for event, _ in self.said]

    def epoch(self) -> int:
        """Of the lease, once this instance delivers under it."""
        while "delivering" not in self.events():
            self.runtime.wait(0.01)
        return self.leases._held[DELIVER_LEASE].epoch

    def park(self, number: int, *names: str) -> None:
        epoch = self.epoch()
        if number == 1:
            self.store.open_partition(PLACE, 0, epoch)
        work = GroupWork(PLACE, Cursor(number - 1), Cursor(number), self.store.group().members)
        parked = [done(name, *([event(number)] if name in names else [])) for name in work.members]
        self.store.settle_group(work, parked, self.runtime.now(), epoch)

    def _attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        now = self.runtime.monotonic()
        self.tried += [(now, one.spec.name, f"e{json.loads(one.event)['n']}") for one in tries]
        self.trying += 1
        self.trying_max = max(self.trying, self.trying_max)
        if any(one.spec.name.startswith("slow") for one in tries):
            self.runtime.wait(self.takes_s)
        self.trying -= 1
        return [self.answer] * len(tries)


def test_a_step_that_fails_is_tried_again_and_holds_up_no_other() -> None:
    """GIVEN a report that raises the unforeseen WHEN time passes THEN it is said and repeated, and nothing ends."""
    scene = Scene()

    def fail() -> None:
        raise RuntimeError("unforeseen")

    scene.on_report = fail
    scene.run(9.0)
    assert scene.reports == 5
    assert scene.events().count("delivery step failed") == 5
    assert scene.events().count("delivering") == 1


def test_what_is_too_much_of_a_bots_stream_goes_though_the_release_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a release of what waits for keys that always fails WHEN it is swept THEN that is said, and the surplus of
    the streams goes all the same."""
    scene, swept = Scene(), list[float]()

    def fail(*_: Any) -> int:
        raise UnreachableError("state is away")

    monkeypatch.setattr("evermark.delivery.run.owner.release", fail)
    surplus = lambda *_: swept.append(scene.runtime.monotonic()) or 0  # noqa: E731
    monkeypatch.setattr("evermark.delivery.run.owner.sweep_surplus", surplus)
    scene.run(2.0)
    assert len(swept) == 1
    assert ("delivery step failed", "sweep") in [(said, about.get("step")) for said, about in scene.said]


def test_an_owner_that_is_stopped_gives_its_lease_back_and_takes_no_batch_any_more() -> None:
    """GIVEN delivery WHEN it is stopped THEN `run` returns, the lease is free, and a fresh batch is left alone."""
    scene = Scene()
    scene.run(1.0)
    assert scene.leases._held[DELIVER_LEASE].holder is None
    scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))
    assert "hand-over failed; the follower takes it" not in scene.events()


def test_nothing_is_handed_over_once_the_end_of_delivery_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN delivery that was told to end WHEN a batch is handed over meanwhile THEN it is left to the next owner."""
    scene = Scene()
    handed_over: list[int] = []

    def note(_live: LiveGroup, span: Span) -> bool:
        handed_over.append(span.to)
        return True

    monkeypatch.setattr(LiveGroup, "hand_over", note)

    def take() -> None:
        scene.runtime.wait(0.5)
        scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))
        scene.owner.stop()  # the loop has not come to look yet
        scene.owner.hand_over(Span(PLACE, Cursor(1), 2, ("f",), 1, exact=True))

    scene.runtime.spawn("ingest", take)
    scene.run(1.0)
    assert handed_over == [1]


def test_a_hand_over_that_fails_wakes_the_follower_and_never_reaches_ingest(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a live group that raises WHEN a batch is handed over THEN that is said, and ingest goes on."""
    scene = Scene()

    def fail(*_: object) -> bool:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(LiveGroup, "hand_over", fail)

    def take() -> None:
        scene.runtime.wait(0.5)
        scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))

    scene.runtime.spawn("ingest", take)
    scene.run(1.0)
    assert "hand-over failed; the follower takes it" in scene.events()


def test_a_group_that_was_left_is_the_followers_until_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a hand-over that left the group WHEN batches come on and on THEN the next ones are only noted, until the
    follower, which waits for the group, has had its turn; then they are handed over again.
    """
    scene = Scene()
    tried: list[int] = []
    waits: list[float] = []

    def leave(_live: LiveGroup, *spans: Span) -> bool:
        tried.append(spans[-1].to)
        return spans[-1].to > 3

    def catch_up(_follower: Follower, wait_s: float = 0.0, _begin: object = None) -> bool:
        waits.append(wait_s)
        return False

    monkeypatch.setattr(LiveGroup, "hand_over", leave)
    monkeypatch.setattr(Follower, "catch_up_group", catch_up)

    def take() -> None:
        scene.runtime.wait(0.5)
        del waits[:]
        for to in (1, 2, 3):
            scene.owner.hand_over(Span(PLACE, Cursor(to - 1), to, ("f",), 1, exact=True))
        scene.runtime.wait(0.1)
        scene.owner.hand_over(Span(PLACE, Cursor(3), 4, ("f",), 1, exact=True))

    scene.runtime.spawn("ingest", take)
    scene.run(1.0)
    assert tried == [1, 4]
    assert waits[0] == scene.owner.limits.group_wait_s and set(waits[1:]) <= {0.0}


def test_delivery_that_cannot_begin_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN State that does not answer while subscriptions are registered WHEN it does again THEN delivery begins."""
    scene = Scene()
    register, failures = scene.store.register, [UnreachableError("state")] * 2

    def register_late(*given: Any) -> None:
        if failures:
            raise failures.pop()
        register(*given)

    monkeypatch.setattr(scene.store, "register", register_late)
    scene.run(5.0)
    assert scene.events().count("delivery failed; it is started again") == 2
    assert scene.events().count("delivering") == 1
    assert set(scene.store.subscriptions()) == {"a"}


def test_while_delivery_drains_no_turn_begins_and_the_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a receiver that hangs in its turn WHEN delivery drains THEN fresh batches are delivered until the turn
    ends, and it gets no other.
    """
    scene = Scene()
    turns: list[float] = []
    handed_over: list[float] = []
    drained_at: list[float] = []
    now = scene.runtime.monotonic
    behind = SimpleNamespace(name="slow", generation=1)

    def hang(*_: object) -> frozenset[str]:
        turns.append(now())
        scene.runtime.wait(3.0)
        return frozenset({"slow"})

    monkeypatch.setattr(Follower, "due", lambda _: [behind])
    monkeypatch.setattr(Follower, "turn_class", lambda *_: TurnClass.SLOW)
    monkeypatch.setattr(Follower, "catch_up", hang)
    monkeypatch.setattr(LiveGroup, "hand_over", lambda *_: handed_over.append(now()) or True)

    def drain() -> None:
        scene.runtime.wait(1.0)
        scene.owner.drain()
        while not scene.owner.drained():
            scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))
            scene.runtime.wait(0.1)
        drained_at.append(now())

    scene.runtime.spawn("drain", drain)
    scene.run(8.0)
    assert len(turns) == 1
    assert drained_at[0] - turns[0] >= 3.0
    assert len(handed_over) > 10


def test_the_owner_of_a_shard_stands_by_until_there_is_such_a_shard() -> None:
    """GIVEN a second shard that nobody has made WHEN its owner begins THEN it says once that it stands by, and delivers
    when the shard is there; and stands by again when it is gone.
    """
    scene = Scene()
    tools = replace(scene.owner.tools, store=scene.store.of_shard(1))
    scene.owner = DeliveryOwner(tools, cast("Any", scene), scene.candidate, shard=1, shards=2)
    first = scene.leases.acquire(DELIVER_LEASE, Holder("other", "host", "boot", 2, "2"), 1e9)
    assert first is not None

    def changes() -> None:
        scene.runtime.wait(10.0)
        assert scene.events() == ["standing by"]
        scene.store.spread(2, first.epoch)
        scene.runtime.wait(10.0)
        assert scene.events() == ["standing by", "delivering"]
        scene.store.spread(1, first.epoch)

    scene.runtime.spawn("changes", changes)
    scene.run(40.0)
    assert scene.events() == ["standing by", "delivering", "follower looks again", "standing by"]


def test_what_is_being_posted_when_delivery_is_told_to_stop_is_settled_under_its_lease() -> None:
    """GIVEN thousands of requests under way WHEN delivery is told to stop THEN the lease is kept until they are over:
    the next owner would send them again.
    """
    scene = Scene()
    freed: list[bool] = []

    def post() -> None:
        scene.runtime.wait(2.0)
        live = scene.owner._live
        assert live is not None
        with live.lock:
            scene.runtime.wait(12.0)
            freed.append(scene.leases._held[DELIVER_LEASE].holder is None)

    scene.runtime.spawn("post", post)
    scene.run(3.0)
    assert freed == [False]
    assert scene.leases._held[DELIVER_LEASE].holder is None


def test_a_planned_stop_waits_until_the_group_has_settled_what_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a group far behind, whose span takes minutes, WHEN a stop is planned THEN it is to wait for that span, and
    no other is begun: what was cut off would be sent again, at every renewal of a lane that is overloaded.
    """
    scene = Scene()
    begun: list[float] = []

    def catch_up(_follower: Follower, _wait_s: float = 0.0, _begin: object = None) -> bool:
        begun.append(scene.runtime.monotonic())
        scene.runtime.wait(100.0)
        return True

    monkeypatch.setattr(Follower, "catch_up_group", catch_up)
    drained: list[bool] = []

    def plan() -> None:
        scene.runtime.wait(10.0)
        scene.owner.drain()
        for _ in range(2):
            scene.runtime.wait(65.0)
            drained.append(scene.owner.drained())

    scene.runtime.spawn("plan", plan)
    scene.run(300.0)
    assert drained == [False, True]
    assert len(begun) == 1


def test_what_the_group_is_sent_beside_is_waited_for_and_its_failure_is_the_followers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a large batch that the group is sent beside WHEN a stop is planned THEN it is to wait for that; and what
    fails there is said, and waited after, as if the follower had done it."""
    scene = Scene()
    sent: list[float] = []

    def large() -> None:
        scene.runtime.wait(40.0)
        if len(sent) == 1:
            raise UnreachableError("state")

    def catch_up(_follower: Follower, _wait_s: float = 0.0, begin: Callable[..., None] | None = None) -> bool:
        if begin is None or len(sent) == 2 or (sent and scene.runtime.monotonic() < sent[-1] + 40.0):
            return False
        sent.append(scene.runtime.monotonic())
        begin("group", large)
        return True

    monkeypatch.setattr(Follower, "catch_up_group", catch_up)
    drained: list[bool] = []

    def plan() -> None:
        scene.runtime.wait(50.0)
        scene.owner.drain()
        for _ in range(2):
            scene.runtime.wait(20.0)
            drained.append(scene.owner.drained())

    scene.runtime.spawn("plan", plan)
    scene.run(200.0)
    assert drained == [False, True]
    assert scene.events().count("follower waits") == 1
    assert len(sent) == 2


def _moved_during_a_turn(monkeypatch: pytest.MonkeyPatch, turn_s: float) -> tuple[Scene, list[float], list[float]]:
    """Delivery that is to move while it has a turn of so long: the scene, when its turns began, and when its lease was
    free, by its clock. Batches are handed over meanwhile."""
    scene = Scene()
    turns: list[float] = []

    def post(*_: object) -> frozenset[str]:
        turns.append(scene.runtime.monotonic())
        scene.runtime.wait(turn_s)
        return frozenset({"slow"})

    monkeypatch.setattr(Follower, "due", lambda _: [SimpleNamespace(name="slow", generation=1)])
    monkeypatch.setattr(Follower, "turn_class", lambda *_: TurnClass.SLOW)
    monkeypatch.setattr(Follower, "catch_up", post)
    monkeypatch.setattr(LiveGroup, "hand_over", lambda *_: scene.said.append(("handed over", {})) or True)
    freed: list[float] = []

    def move() -> None:
        scene.runtime.wait(3.0)
        scene.candidate.share.set(())
        while scene.leases._held[DELIVER_LEASE].holder is not None:
            scene.runtime.wait(0.1)
            scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))
        freed.append(scene.runtime.monotonic())

    scene.runtime.spawn("move", move)
    scene.run(120.0)
    return scene, turns, freed


def test_delivery_that_moves_settles_what_it_posts_before_another_can_post_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a turn that takes as long as its budget and one request WHEN delivery is to move THEN its lease is free
    when the turn is over, not before; no other turn begins, and fresh batches are delivered until then.
    """
    turn_s = FOLLOW_BUDGET_S + SubscriptionSpec("a", "https://a.example").timeout_s
    scene, turns, freed = _moved_during_a_turn(monkeypatch, turn_s)
    assert turn_s <= freed[0] - turns[0] < turn_s + 2.0
    assert len(turns) == 1
    assert scene.events().count("handed over") > 100
    assert "turns have not ended; the lease is let go of without them" not in scene.events()


def test_delivery_that_moves_does_not_wait_for_ever_for_a_receiver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a turn that hangs WHEN delivery is to move THEN its lease is free after a while, and that is said."""
    scene, turns, freed = _moved_during_a_turn(monkeypatch, 1000.0)
    limits = scene.owner.limits
    assert freed[0] - turns[0] < 3.0 + limits.drain_s + 2 * limits.end_s
    assert "turns have not ended; the lease is let go of without them" in scene.events()
    assert len(turns) == 1


def test_a_subscription_whose_turn_lasts_gets_no_other_when_delivery_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a turn that hangs WHEN the lease is lost, and had again THEN the subscription has one turn at a time."""
    scene = Scene()
    turns: list[float] = []

    def hang(*_: object) -> frozenset[str]:
        turns.append(scene.runtime.monotonic())
        scene.runtime.wait(1000.0)
        return frozenset()

    monkeypatch.setattr(Follower, "due", lambda _: [SimpleNamespace(name="slow", generation=1)])
    monkeypatch.setattr(Follower, "turn_class", lambda *_: TurnClass.SLOW)
    monkeypatch.setattr(Follower, "catch_up", hang)

    def lose() -> None:
        scene.runtime.wait(3.0)
        scene.leases._held.update(
            (name, replace(held, epoch=held.epoch + 1, holder=None)) for name, held in scene.leases._held.items()
        )

    scene.runtime.spawn("lose", lose)
    scene.run(60.0)
    assert scene.events().count("delivering") == 2 and len(turns) == 1


@pytest.mark.parametrize("where", ["hand-over", "follower"])
def test_delivery_that_hangs_loses_its_lease_whichever_loop_it_is(where: str) -> None:
    """GIVEN a hand-over or a follower that does not come back, while the other goes on WHEN the bound is over THEN the
    lease is let go of, once, and whoever runs them is told."""
    scene = Scene()
    told: list[str] = []
    scene.owner.candidate = replace(scene.candidate, on_hanging=told.append)
    asked = scene.store.group if where == "hand-over" else scene.store.outside
    hung: list[float] = []

    def hang() -> Any:
        if scene.runtime.monotonic() >= 50.0 and not hung:
            hung.append(scene.runtime.monotonic())
            scene.runtime.wait(1e9)
        return asked()

    setattr(scene.store, asked.__name__, hang)

    def take() -> None:
        scene.runtime.wait(60.0)
        scene.owner.hand_over(Span(PLACE, Cursor(0), 1, ("f",), 1, exact=True))

    scene.runtime.spawn("ingest", take)
    scene.runtime.spawn("deliver", scene.owner.run)
    baton = scene.runtime.baton
    scene.runtime.spawn("clock", lambda: baton.sleep(400.0))
    baton.run(lambda: bool(told) or baton.now >= 400.0)
    baton.close()
    assert len(told) == 1 and "the loop of deliver hangs" in told[0]
    limits = scene.candidate.limits
    assert limits.hangs_after_s < baton.now - hung[0] < limits.hangs_after_s + limits.ttl_s


def test_delivery_that_has_nothing_to_do_keeps_its_lease() -> None:
    """GIVEN delivery WHEN nothing happens for an hour THEN nothing is let go of."""
    scene = Scene()
    scene.run(3600.0)
    assert "lease let go of" not in scene.events() and scene.events().count("delivering") == 1


def test_d4_a_receiver_that_takes_minutes_holds_up_no_retry_of_another() -> None:
    """GIVEN a receiver that refuses after 299 s WHEN retries of another are due meanwhile THEN they are tried in time;
    the slow one's are tried once until its answer is there, although their claim has run out, and then put back.
    """
    scene = Scene("slow", "well", takes_s=299.0)
    scene.answer = REFUSED

    def park() -> None:
        scene.park(1, "slow", "well")
        scene.runtime.wait(20.0)
        scene.park(2, "slow", "well")

    scene.runtime.spawn("park", park)
    scene.run(320.0)
    begun = {(name, ident): at for at, name, ident in reversed(scene.tried)}
    assert [(name, ident) for _, name, ident in scene.tried if name == "slow"] == [("slow", "e1"), ("slow", "e2")]
    assert begun["well", "e1"] - 5 <= 2 and begun["well", "e2"] - 25 <= 2
    assert 0 <= begun["slow", "e2"] - begun["slow", "e1"] - 299 <= 2
    (row, _) = scene.store.parked.rows("slow")
    assert row.attempts == 2 and row.next_attempt_at is not None
    assert row.next_attempt_at >= scene.runtime.now()


def test_receivers_that_hang_leave_some_of_what_may_be_tried_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN 20 receivers that hang, and room for 10 rows at a time WHEN all are due THEN no more than 10 hang at once,
    and all are tried.
    """
    monkeypatch.setattr(parked_retries, "UNDER_WAY_MAX", 10)
    names = [f"slow{n}" for n in range(20)]
    scene = Scene(*names, takes_s=100.0)
    scene.runtime.spawn("park", lambda: scene.park(1, *names))
    scene.run(250.0)
    assert scene.trying_max == 10
    assert sorted(name for _, name, _ in scene.tried) == sorted(names)
    assert scene.store.parked.rows() == []


@pytest.mark.parametrize(("takes_s", "left"), [(4.0, 0), (299.0, 1)])
def test_a_retry_under_way_at_a_stop_is_waited_for_and_settled_but_not_for_minutes(takes_s: float, left: int) -> None:
    """GIVEN a retry that a receiver works on WHEN delivery is stopped THEN its answer is settled if it comes soon."""
    scene = Scene("slow", takes_s=takes_s)
    scene.runtime.spawn("park", lambda: scene.park(1, "slow"))
    scene.run(8.0)
    assert len(scene.tried) == 1
    assert scene.runtime.monotonic() <= 8.0 + scene.owner.limits.end_s + 1.0
    assert len(scene.store.parked.rows()) == left


def test_what_a_retry_brings_after_the_lease_was_lost_is_refused_and_it_is_tried_again_only_then() -> None:
    """GIVEN a retry under way WHEN the lease is lost, and had again THEN it is not tried twice at a time; what it
    brought is refused, and the next try settles it.
    """
    scene = Scene("slow", takes_s=60.0)

    def lose() -> None:
        scene.park(1, "slow")
        scene.runtime.wait(10.0)
        scene.leases.release(Lease(DELIVER_LEASE, scene.epoch()))
        other = scene.leases.acquire(DELIVER_LEASE, Holder("other", "host", "boot", 2, "2"), 1e9)
        assert other is not None
        scene.runtime.wait(10.0)
        scene.leases.release(other)

    scene.runtime.spawn("lose", lose)
    scene.run(140.0)
    (first, _, _), (second, _, _) = scene.tried
    assert scene.events().count("delivering") == 2
    assert 60 <= second - first <= 62 and scene.trying_max == 1
    (refused,) = [about["error"] for event, about in scene.said if event == "retries are not settled"]
    assert isinstance(refused, StaleError)
    assert scene.store.parked.rows() == []
