"""What is decided about replays: requests, whose turn it is, and what a step makes of a target."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from evermark.delivery.model import BotSpec, Fate, Outcome, SourcePartition, Subscription, SubscriptionState
from evermark.delivery.replay import plan as decide
from evermark.delivery.replay import request as wish_module
from evermark.delivery.replay.plan import (
    AskedBy,
    Control,
    Replay,
    Replayed,
    ReplayState,
    Request,
    Target,
    TargetState,
)
from evermark.delivery.replay.request import request_of
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.errors import ConfigError
from evermark.testing.contracts.scene import event, spec

T0 = datetime(2026, 11, 15, 12, tzinfo=UTC)
LATER = T0 + timedelta(hours=1)


def control(payload: Any, **other: Any) -> Control:
    text = payload if isinstance(payload, str) or payload is None else json.dumps(payload)
    return replace(Control("c1", 0, 7, "public.orders", LATER, text), **other)


def window(since: Any, to: Any = None) -> dict[str, Any]:
    return {"type": "control", "action": "replay", "replay_from_ts": since, "replay_to_ts": to}


def subscription(name: str, generation: int = 1, **other: Any) -> Subscription:
    settings = {k: other.pop(k) for k in ("streams", "rate_per_s", "bundle", "bot") if k in other}
    return Subscription(
        spec(name, **settings), other.pop("state", SubscriptionState.LIVE), generation=generation, **other
    )


def asked(nth: int, *targets: Target, state: ReplayState = ReplayState.RUNNING, **request: Any) -> Replay:
    wish = Request(AskedBy.CLI, "shop", T0, LATER, **request)
    return Replay(f"r{nth}", nth, wish, state, heads={0: 9}, log_rows=1000, targets=targets)


def target(nth: int, name: str = "a", **other: Any) -> Target:
    return replace(Target(f"r{nth}", name, 1, TargetState.RUNNING, Mark(T0)), **other)


# requests


def test_a_control_event_asks_for_its_stream_and_window() -> None:
    """GIVEN what the trigger writes WHEN it is read THEN the window is the one asked for, to the microsecond."""
    wish = request_of("shop", control(window("2026-11-15T12:00:00.000001+02:00", "2026-11-15T12:30:00+00:00")))
    assert wish is not None
    assert (wish.source, wish.streams, wish.asked_by) == ("shop", ("public.orders",), AskedBy.SQL)
    assert wish.since == datetime(2026, 11, 15, 10, 0, 0, 1, tzinfo=UTC)
    assert wish.until == datetime(2026, 11, 15, 12, 30, tzinfo=UTC)
    assert (wish.asked_since, wish.asked_until) == ("2026-11-15T12:00:00.000001+02:00", "2026-11-15T12:30:00+00:00")


def test_without_an_end_a_replay_ends_when_it_was_asked_for() -> None:
    """GIVEN no replay_to_ts WHEN it is read THEN the control event's own time is the end."""
    wish = request_of("shop", control(window("-infinity")))
    assert wish is not None
    assert (wish.since, wish.until, wish.asked_until) == (wish_module.TIME_MIN, LATER, None)


@pytest.mark.parametrize("text", ["0044-03-15T12:00:00+00:00 BC", "infinity", "-infinity", "9999-12-31T23:59:59+00:00"])
def test_times_beyond_what_every_layer_holds_are_bounded(text: str) -> None:
    """GIVEN a time only Postgres knows WHEN it is asked for THEN it is the first or last time there is."""
    wish = request_of("shop", control(window(text, text)))
    assert wish is not None
    assert wish.since == wish.until
    assert wish.since in (wish_module.TIME_MIN, wish_module.TIME_MAX)


@pytest.mark.parametrize("payload", [{"type": "control", "action": "dance"}, [], 7, "null", {}])
def test_other_control_events_ask_for_nothing(payload: Any) -> None:
    """GIVEN a control event we do not know WHEN it is read THEN it is no replay, and no error either."""
    assert request_of("shop", control(payload)) is None


@pytest.mark.parametrize(
    "payload", [None, "{", "[" * 100_000, window(None), window(5), window("yesterday"), window("2026-01-01", 5)]
)
def test_nonsense_is_refused(payload: Any) -> None:
    """GIVEN a control event that makes no sense WHEN it is read THEN that is said, naming it."""
    with pytest.raises(ConfigError, match="c1"):
        request_of("shop", control(payload))


# starting


def test_a_replay_starts_only_when_the_log_is_durable_up_to_what_asked() -> None:
    """GIVEN a control event in batch 7 WHEN the head is before it THEN the replay waits."""
    one = asked(1, control=control(None))
    assert not decide.may_start(one, {SourcePartition("shop", 0): 6})
    assert decide.may_start(one, {SourcePartition("shop", 0): 7})
    assert decide.may_start(asked(1), {})


def test_a_replay_goes_to_those_that_may_want_its_streams() -> None:
    """GIVEN subscriptions of several streams WHEN one is replayed THEN those of other streams are left out."""
    known = {
        "all": subscription("all"),
        "both": subscription("both", streams=("public.orders", "x")),
        "other": subscription("other", streams=("x",)),
    }
    chosen = decide.targets_of(asked(1, streams=("public.orders",)), known)
    assert [t.subscription for t in chosen if isinstance(t, Target)] == ["all", "both"]
    assert isinstance(decide.targets_of(asked(1, subscription="gone"), known), str)
    (only,) = decide.targets_of(asked(1, subscription="all"), known)
    assert isinstance(only, Target)
    assert (only.mark, only.generation) == (Mark(T0), 1)


def test_a_replay_goes_to_no_bot_of_another_source() -> None:
    """GIVEN bots of two sources, with streams of one name WHEN one is replayed THEN only its bots get it."""
    known = {
        "near": subscription("near", bot=BotSpec("shop", "u")),
        "far": subscription("far", bot=BotSpec("bank", "u")),
        "all": subscription("all"),
    }
    chosen = decide.targets_of(asked(1), known)
    assert [t.subscription for t in chosen if isinstance(t, Target)] == ["all", "near"]
    assert "another source" in str(decide.targets_of(asked(1, subscription="far"), known))


# whose turn it is


def test_requests_for_one_subscription_run_one_after_another() -> None:
    """GIVEN two overlapping requests WHEN both run THEN the older one comes first, even while it waits."""
    known = {"a": subscription("a"), "b": subscription("b")}
    both = [asked(2, target(2), target(2, "b")), asked(1, target(1))]
    assert [(d.replay.id, d.target.subscription) for d in decide.due(both, known, T0)] == [("r1", "a"), ("r2", "b")]
    waiting = asked(1, target(1, next_attempt_at=LATER))
    assert [d.target.subscription for d in decide.due([waiting, both[0]], known, T0)] == ["b"]
    done = asked(1, target(1, state=TargetState.DONE))
    assert [d.replay.id for d in decide.due([done, both[0]], known, T0)] == ["r2", "r2"]


def test_nobody_is_worked_for_by_what_was_seen_while_somebody_worked_for_it() -> None:
    """GIVEN some that are due WHEN one was busy as it was looked THEN it waits for the next look."""
    known = {name: subscription(name) for name in "abc"}
    due = decide.due([asked(1, *(target(1, name) for name in "abc"))], known, T0)

    def begun(busy: set[str], served: dict[str, float], at_once: int) -> list[str]:
        return [one.target.subscription for one in decide.to_begin(due, busy, served, at_once)]

    assert begun(set(), {}, 2) == ["a", "b"]
    assert begun({"a"}, {}, 2) == ["b"]
    assert begun(set(), {"a": 5.0, "b": 3.0}, 2) == ["c", "b"]
    assert begun({"a", "b"}, {}, 1) == []


@pytest.mark.parametrize(
    ("found", "ready"),
    [
        (subscription("a"), True),
        (subscription("a", state=SubscriptionState.BEHIND), True),
        (subscription("a", state=SubscriptionState.BEHIND, next_attempt_at=LATER), False),
        (subscription("a", state=SubscriptionState.SUSPENDED), False),
        (subscription("a", state=SubscriptionState.DISABLED), False),
        (subscription("a", generation=2), False),
    ],
)
def test_a_replay_waits_for_its_subscription(found: Subscription, ready: bool) -> None:
    """GIVEN a subscription that is not delivered to, or another one of its name THEN its replay is not due."""
    assert bool(decide.due([asked(1, target(1))], {"a": found}, T0)) == ready


def test_a_removed_subscription_leaves_an_orphan() -> None:
    """GIVEN a target WHEN its subscription is removed, or made anew THEN it is nobody's."""
    assert decide.is_orphaned(target(1), {})
    assert decide.is_orphaned(target(1), {"a": subscription("a", generation=2)})
    assert not decide.is_orphaned(target(1), {"a": subscription("a")})


def test_the_lesser_rate_holds_and_bounds_the_slice() -> None:
    """GIVEN two limits WHEN work is cut out THEN the lesser one holds, and a slice is what it lets through in time."""
    one = decide.Due(asked(1, rate_per_s=50.0), target(1), subscription("a", rate_per_s=10.0, bundle=5))
    work = decide.work_of(one, TimeSlice(Mark(T0), LATER, (), 1), [], decide.rows_of(one, flowing=False))
    assert work.spec.rate_per_s == 10.0
    assert work.rows_max == 10 * decide.STEP_S * 5
    assert decide.least_rate(0.0, 0.0) == 0.0
    assert decide.least_rate(0.0, 3.0) == 3.0


# after a step

PIECE = TimeSlice(Mark(T0), LATER, (), 400)
HALFWAY = Mark(T0 + timedelta(minutes=30), "e5")


def step(before: Target, fate: Fate, mark: Mark, took_s: float = 4.0, **outcome: Any) -> Target:
    result = Replayed(mark, Outcome("a", fate, **outcome))
    return decide.after_step(before, PIECE, result, decide.STEP_S / took_s, T0, lambda: 0.0, decide.SLICES)


def test_a_step_that_is_done_moves_the_mark_and_counts() -> None:
    """GIVEN a slice that was accepted but for one event WHEN it is settled THEN mark and counts say so."""
    after = step(target(1, failures=3), Fate.DONE, PIECE.end, accepted=9, parked=(event(1),))
    assert (after.mark, after.delivered, after.parked, after.passed_rows) == (PIECE.end, 9, 1, 400)
    assert (after.failures, after.next_attempt_at) == (0, None)


def test_slices_grow_towards_the_time_they_should_take_and_halve_after_a_failure() -> None:
    """GIVEN steps WHEN they are quick THEN the next is up to four times as large; a failure halves it."""
    rows = 100_000
    small = replace(target(1), slice_rows=rows)
    assert step(small, Fate.DONE, PIECE.end, took_s=0.1).slice_rows == 4 * rows
    assert step(small, Fate.DONE, PIECE.end, took_s=40.0).slice_rows == rows // 10
    assert step(target(1), Fate.DONE, PIECE.end, took_s=0.1).slice_rows == decide.SLICES.rows_max
    for _ in range(20):
        small = step(small, Fate.ENDPOINT_FAILED, Mark(T0))
    assert small.slice_rows == decide.SLICES.rows_min


def test_a_failed_endpoint_backs_off_and_keeps_what_was_done() -> None:
    """GIVEN a receiver that fails in the middle WHEN it is settled THEN the mark moved, and the wait begins small."""
    after = step(target(1, failures=6), Fate.ENDPOINT_FAILED, HALFWAY, accepted=5, reason="503")
    assert (after.mark, after.delivered, after.failures) == (HALFWAY, 5, 1)
    assert after.next_attempt_at == T0 + timedelta(seconds=1)
    worse = step(after, Fate.ENDPOINT_FAILED, HALFWAY, reason="503")
    assert (worse.failures, worse.next_attempt_at) == (2, T0 + timedelta(seconds=2))
    told = step(after, Fate.ENDPOINT_FAILED, HALFWAY, retry_after_s=70.0)
    assert told.next_attempt_at == T0 + timedelta(seconds=70)


def test_running_out_of_time_is_no_failure() -> None:
    """GIVEN a slow receiver WHEN a step is cut off THEN it goes on at once from where it was, with less."""
    after = step(target(1), Fate.UNFINISHED, HALFWAY, accepted=5)
    assert (after.mark, after.failures, after.next_attempt_at) == (HALFWAY, 0, None)
    assert after.slice_rows < decide.SLICES.rows_start
    idle = step(target(1), Fate.UNFINISHED, Mark(T0))
    assert idle.next_attempt_at is not None


def test_a_replay_rests_while_fresh_events_flow() -> None:
    """GIVEN a step of two seconds THEN it rests while live flows, longer on few cores, and takes less; else neither."""
    assert [decide.rest_s(2.0, True, cores) for cores in (1, 2, 4, 64)] == [12.0, 6.0, 2.0, 2.0]
    assert decide.rest_s(2.0, False, 2) == 0.0
    one = decide.Due(asked(1), target(1), subscription("a"))
    assert decide.rows_of(one, flowing=True) < decide.rows_of(one, flowing=False)


def test_progress_is_never_said_to_be_whole_before_it_is() -> None:
    """GIVEN estimates WHEN they are too small THEN only a target that is done is at a hundred."""
    one = asked(1)
    assert decide.percent(one, target(1, passed_rows=250)) == 25.0
    assert decide.percent(one, target(1, passed_rows=5_000)) < 100
    assert decide.percent(one, target(1, state=TargetState.DONE)) == 100


def test_a_replay_ends_with_its_last_target() -> None:
    """GIVEN targets WHEN none runs THEN the replay is over; one without any is over at once."""
    assert not decide.has_ended(asked(1, target(1), target(1, "b", state=TargetState.DONE)))
    assert decide.has_ended(asked(1, target(1, state=TargetState.CANCELLED), target(1, "b", state=TargetState.DONE)))
    assert decide.has_ended(asked(1))
    assert not decide.has_ended(asked(1, state=ReplayState.WAITING))


def test_what_runs_is_told_by_source() -> None:
    """GIVEN several replays WHEN a source is asked about THEN its window spans all that run."""
    early = replace(asked(1), request=Request(AskedBy.CLI, "shop", T0 - timedelta(hours=1), T0))
    assert decide.running_windows([early, asked(2), asked(3, state=ReplayState.DONE)]) == {
        "shop": (T0 - timedelta(hours=1), LATER)
    }
