"""What every `ReplayStore` promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, ParkedEvent, Subscription
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.plan import (
    AskedBy,
    Control,
    Replayed,
    ReplayState,
    Request,
    Target,
    TargetState,
    targets_of,
)
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.errors import ConflictError, NotFoundError, StaleError
from evermark.testing.contracts.scene import T0, TakeOver, begin, done, event, spec

LATER = T0 + timedelta(hours=1)
MIDDLE = Mark(T0 + timedelta(minutes=30), "e5")


def asked(**other: Any) -> Request:
    return replace(Request(AskedBy.CLI, "shop", T0, LATER), **other)


def by_sql(event_id: str, stream: str = "public.orders", **other: Any) -> Request:
    control = Control(event_id, 0, 7, stream, T0, None)
    return asked(
        asked_by=AskedBy.SQL, streams=(stream,), control=control, asked_since="2026-11-15T12:00:00+00:00", **other
    )


def parked(number: int, replay: str) -> ParkedEvent:
    return replace(event(number), replay_id=replay)


class ReplayContract:
    @pytest.fixture
    def replays(self) -> ReplayStore:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def delivery(self) -> DeliveryStore:
        raise NotImplementedError("override this fixture with the delivery store beside it")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        raise NotImplementedError("override this fixture: a new owner of the `deliver` lease; returns its epoch")

    @pytest.fixture
    def source_epoch(self) -> int:
        raise NotImplementedError("override this fixture: the epoch of the owner of source `shop`")

    @pytest.fixture
    def epoch(self, take_over: TakeOver) -> int:
        return take_over()

    def started(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int, *names: str, **settings: Any
    ) -> tuple[str, dict[str, Target]]:
        """A replay that runs, to these subscriptions."""
        begin(delivery, epoch, *names, **settings)
        made = replays.request(asked(), epoch)
        known: dict[str, Subscription] = delivery.subscriptions()
        targets = targets_of(replays.one(made), known)
        assert not isinstance(targets, str)
        replays.start(made, {0: 9, 1: 4}, 1000, targets, epoch)
        return made, {t.subscription: t for t in replays.one(made).targets}

    def settle(
        self, replays: ReplayStore, begun: Target, epoch: int, outcome: Outcome, mark: Mark | None = None
    ) -> Target:
        piece = TimeSlice(begun.mark, LATER, (), 1000)
        result = Replayed(piece.end if mark is None else mark, outcome)
        return replays.settle(begun, piece, result, 1.0, T0, epoch)

    def test_a_person_who_resumes_a_subscription_resumes_its_replays(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """GIVEN two targets told to come back in a day WHEN one is resumed THEN it waits no longer, in its place."""
        made, targets = self.started(replays, delivery, epoch, "a", "b")
        told = Outcome("a", Fate.ENDPOINT_FAILED, reason="503", retry_after_s=86_400.0)
        for name in ("a", "b"):
            self.settle(replays, targets[name], epoch, replace(told, subscription=name), MIDDLE)
        delivery.resume("a", epoch)
        after = {target.subscription: target for target in replays.one(made).targets}
        assert (after["a"].next_attempt_at, after["a"].failures, after["a"].mark) == (None, 0, MIDDLE)
        assert after["b"].next_attempt_at is not None and after["b"].next_attempt_at >= T0 + timedelta(days=1)

    def test_since_when_a_target_gets_nowhere_is_kept_until_it_moves(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """The first failure counts, or that its subscription is not served; a step that moves it ends it."""
        _, targets = self.started(replays, delivery, epoch, "a", "b")
        down = Outcome("a", Fate.ENDPOINT_FAILED, reason="503")
        stuck = self.settle(replays, targets["a"], epoch, down, targets["a"].mark)
        assert stuck.stuck_since == T0
        replays.note_stuck(stuck, LATER, epoch)
        replays.note_stuck(targets["b"], LATER, epoch)
        after = {target.subscription: target for target in replays.open()[0].targets}
        assert (after["a"].stuck_since, after["b"].stuck_since) == (T0, LATER)
        assert self.settle(replays, after["a"], epoch, down, MIDDLE).stuck_since is None, "it moved, then failed"
        assert self.settle(replays, after["b"], epoch, done("b")).stuck_since is None
        replays.end_target(after["b"].replay, "b", "", epoch)
        replays.note_stuck(after["b"], LATER, epoch)
        assert {target.stuck_since for target in replays.one(after["a"].replay).targets} == {None}

    # requests

    def test_a_request_comes_back_whole(self, replays: ReplayStore, epoch: int) -> None:
        """Everything asked for survives the store, to the microsecond."""
        full = asked(
            since=T0 + timedelta(microseconds=1),
            streams=("public.orders", "ü"),
            where="data.n > 1",
            subscription="a",
            rate_per_s=2.5,
        )
        made = replays.request(full, epoch)
        found = replays.one(made)
        assert (found.request, found.state, found.targets) == (full, ReplayState.WAITING, ())
        assert len(made) == 12 and made.isalnum()
        with pytest.raises(NotFoundError):
            replays.one("nobody")

    def test_a_control_event_asks_once(self, replays: ReplayStore, source_epoch: int) -> None:
        """However often it is found in the log; another one with the same window is another request."""
        assert replays.register(by_sql("c1"), source_epoch)
        assert not replays.register(by_sql("c1"), source_epoch)
        assert replays.register(by_sql("c2"), source_epoch)
        first, second = replays.open()
        assert first.nth < second.nth
        assert first.request.control is not None
        assert (first.request.control.event_id, first.request.control.batch) == ("c1", 7)

    def test_however_many_are_open_none_is_left_out(self, replays: ReplayStore, epoch: int) -> None:
        """One that is asked for after a thousand others may be for somebody to whom none of them goes."""
        made = [replays.request(asked(), epoch) for _ in range(1_001)]
        assert [replay.id for replay in replays.open()] == made

    def test_stale_owners_write_nothing(
        self, replays: ReplayStore, delivery: DeliveryStore, take_over: TakeOver, source_epoch: int
    ) -> None:
        """Every call that writes is refused with an old epoch, and leaves everything as it was."""
        old = take_over()
        made, targets = self.started(replays, delivery, old, "a")
        waiting = replays.request(asked(), old)
        take_over()
        before = replays.newest(10)
        writes: list[Callable[[], object]] = [
            lambda: replays.register(by_sql("c1"), source_epoch - 1),
            lambda: replays.request(asked(), old),
            lambda: replays.cancel(made, old),
            lambda: replays.start(waiting, {}, 0, [], old),
            lambda: replays.note_waiting(waiting, "the log is away", old),
            lambda: self.settle(replays, targets["a"], old, done("a")),
            lambda: replays.pass_by(targets["a"], old),
            lambda: replays.note_stuck(targets["a"], T0, old),
            lambda: replays.end_target(made, "a", "", old),
            lambda: replays.end(made, ReplayState.FAILED, "", old),
            lambda: replays.finish(made, old),
            lambda: replays.cleared(made, old),
        ]
        for write in writes:
            with pytest.raises(StaleError):
                write()
        assert replays.newest(10) == before

    # running

    def test_a_start_fixes_heads_and_targets_once(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """A replay starts once; what the log and the subscriptions were then, it keeps."""
        made, targets = self.started(replays, delivery, epoch, "a", "b")
        found = replays.one(made)
        assert (found.state, found.heads, found.log_rows) == (ReplayState.RUNNING, {0: 9, 1: 4}, 1000)
        assert {t.mark for t in targets.values()} == {Mark(T0)}
        with pytest.raises(ConflictError):
            replays.start(made, {0: 10}, 0, [], epoch)

    def test_why_a_replay_cannot_start_is_said_until_it_does(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """What is noted of a replay that waits is gone with its start, and nothing is noted of one that runs."""
        made = replays.request(asked(), epoch)
        replays.note_waiting(made, "the log is away\x00", epoch)
        assert replays.one(made).state is ReplayState.WAITING
        assert replays.one(made).reason.startswith("the log is away")
        replays.start(made, {0: 9}, 1000, [], epoch)
        replays.note_waiting(made, "the log is away", epoch)
        assert (replays.one(made).state, replays.one(made).reason) == (ReplayState.RUNNING, "")

    def test_a_mark_moves_by_compare_and_set_with_what_is_parked(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """One transaction: a second settlement of the same work is refused and parks nothing twice."""
        made, targets = self.started(replays, delivery, epoch, "a")
        after = self.settle(replays, targets["a"], epoch, done("a", parked(1, made), accepted=4), MIDDLE)
        assert (after.mark, after.delivered, after.parked) == (MIDDLE, 4, 1)
        assert replays.one(made).targets == (after,)
        with pytest.raises(ConflictError):
            self.settle(replays, targets["a"], epoch, done("a", parked(2, made)), MIDDLE)
        assert [(p.event.event_id, p.event.replay_id) for p in delivery.parked.rows()] == [("e1", made)]

    def test_a_failing_endpoint_waits_and_touches_nothing_of_the_subscription(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """State, cursor and membership of the subscription stay; only the target backs off."""
        _, targets = self.started(replays, delivery, epoch, "a")
        before = (delivery.subscriptions(), delivery.group())
        after = self.settle(replays, targets["a"], epoch, Outcome("a", Fate.ENDPOINT_FAILED, reason="503"), Mark(T0))
        assert (after.failures, after.mark, after.reason) == (1, Mark(T0), "503")
        assert after.next_attempt_at is not None and after.next_attempt_at > T0
        assert (delivery.subscriptions(), delivery.group()) == before

    def test_what_a_replay_parks_is_apart_from_first_deliveries(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """The same event may be parked by both; each has its own limit, and a full one stops only the replay."""
        made, targets = self.started(replays, delivery, epoch, "a", parked_max=2)
        place = event(1).place
        members = frozenset({"a"})
        delivery.settle_group(
            GroupWork(place, Cursor(0), Cursor(1), members), [done("a", event(1), event(2))], T0, epoch
        )
        full = self.settle(replays, targets["a"], epoch, done("a", parked(1, made), parked(2, made)), MIDDLE)
        assert (full.mark, replays.parked_now("a")) == (MIDDLE, 2)
        refused = self.settle(replays, full, epoch, done("a", parked(3, made)))
        assert (refused.mark, refused.failures, replays.parked_now("a")) == (MIDDLE, 1, 2)
        assert delivery.subscriptions()["a"].state == "live"
        assert delivery.parked.counts()["a"]["waiting"] == 4

    def test_a_parked_delivery_of_a_replay_is_claimed_with_its_id_after_all_others(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """First deliveries come first; a retry of a replay is still the replay's."""
        made, targets = self.started(replays, delivery, epoch, "a")
        self.settle(replays, targets["a"], epoch, done("a", parked(1, made)))
        delivery.settle_group(
            GroupWork(event(1).place, Cursor(0), Cursor(1), frozenset({"a"})),
            [done("a", event(1))],
            T0 + timedelta(seconds=1),
            epoch,
        )
        later = T0 + timedelta(hours=1)
        (first,) = delivery.parked.claim(later, 1, 60, epoch)
        (second,) = delivery.parked.claim(later, 5, 60, epoch)
        assert (first.event.replay_id, second.event.replay_id) == ("", made)

    def test_order_by_key_is_kept_within_a_replay_and_not_across(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """A key that a replay parked holds back that replay, not the live deliveries; and the other way round."""
        made, targets = self.started(replays, delivery, epoch, "a", ordered=True)
        of_replay = replace(event(1, key="k"), replay_id=made)
        self.settle(replays, targets["a"], epoch, done("a", of_replay))
        assert delivery.parked.held_keys(["a"]) == {}
        assert delivery.parked.held_keys(["a"], replay_id=made) == {"a": {(of_replay.place, "orders", "k"): 1}}
        delivery.settle_group(
            GroupWork(of_replay.place, Cursor(0), Cursor(1), frozenset({"a"})),
            [done("a", event(2, key="k"))],
            T0,
            epoch,
        )
        assert len(delivery.parked.claim(T0 + timedelta(hours=1), 5, 60, epoch)) == 2

    # ends

    def test_a_replay_is_done_with_its_last_target(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """Not before; one whose subscription is gone counts as ended."""
        made, targets = self.started(replays, delivery, epoch, "a", "b")
        assert not replays.finish(made, epoch)
        passed = self.settle(replays, targets["a"], epoch, done("a"))
        assert replays.pass_by(passed, epoch).state is TargetState.DONE
        assert not replays.finish(made, epoch)
        replays.end_target(made, "b", "the subscription is gone", epoch)
        assert replays.open_sources() == {"shop"}
        assert replays.finish(made, epoch)
        assert replays.one(made).state is ReplayState.DONE
        assert (replays.open(), replays.open_sources()) == ([], set())

    def test_a_cancelled_replay_moves_no_more_and_drops_what_it_parked(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """What was under way is refused; nothing of it is delivered later; the drop is counted."""
        made, targets = self.started(replays, delivery, epoch, "a")
        begun = self.settle(replays, targets["a"], epoch, done("a", parked(1, made)), MIDDLE)
        assert replays.cancel(made, epoch)
        assert not replays.cancel(made, epoch)
        with pytest.raises(ConflictError):
            self.settle(replays, begun, epoch, done("a"))
        assert (delivery.parked.rows(), delivery.counted("dropped")) == ([], {"a": 1})
        assert replays.one(made).state is ReplayState.CANCELLED

    def test_a_subscription_made_anew_does_not_inherit_a_replay(
        self, replays: ReplayStore, delivery: DeliveryStore, epoch: int
    ) -> None:
        """What was sent to its predecessor says nothing about it."""
        _, targets = self.started(replays, delivery, epoch, "a")
        delivery.register([], MadeBy.FILE, {}, epoch)
        delivery.register([spec("a")], MadeBy.FILE, {}, epoch)
        with pytest.raises(ConflictError):
            self.settle(replays, targets["a"], epoch, done("a"))

    def test_a_request_is_cleared_when_the_last_of_its_window_is_over(
        self, replays: ReplayStore, epoch: int, source_epoch: int
    ) -> None:
        """The same window asked for again keeps the source's record; clearing is remembered until it was done."""
        for name in ("c1", "c2"):
            replays.register(by_sql(name), source_epoch)
        first, second = replays.open()
        replays.end(first.id, ReplayState.FAILED, "for a test", epoch)
        assert replays.uncleared() == []
        replays.end(second.id, ReplayState.FAILED, "for a test", epoch)
        assert [r.id for r in replays.uncleared()] == [first.id, second.id]
        replays.cleared(first.id, epoch)
        assert [r.id for r in replays.uncleared()] == [second.id]

    def test_a_request_by_a_person_leaves_nothing_to_clear(self, replays: ReplayStore, epoch: int) -> None:
        """There is no row at the source that shows it."""
        replays.end(replays.request(asked(), epoch), ReplayState.FAILED, "for a test", epoch)
        assert replays.uncleared() == []
