"""The board behind /health: what readers say of partitions, what sources say when asked, and what follows from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from evermark.observe.health import (
    LAGGING_AFTER_S,
    LISTED_MAX,
    RATE_OVER_S,
    TROUBLE_TOLD_S,
    FailingCopy,
    HealthBoard,
    LagWatch,
    LiveGroupReport,
    PartitionHealth,
    PartitionReport,
    SourceAnswer,
    as_json,
    overall,
    unready,
)

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
HEALTHY, LAGGING, STALE = PartitionHealth.HEALTHY, PartitionHealth.LAGGING, PartitionHealth.STALE
FAILED, STANDBY, STARTING = PartitionHealth.FAILED, PartitionHealth.STANDBY, PartitionHealth.STARTING


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> HealthBoard:
    return HealthBoard(clock)


def partition(board: HealthBoard, name: str = "shop/0") -> PartitionReport:
    return board.partitions()[name]


def test_a_failure_and_a_new_try_do_not_forget_what_was_taken(board: HealthBoard) -> None:
    """GIVEN ten events taken WHEN the partition fails and is read again THEN the count and the time stay."""
    board.put("shop", 0, HEALTHY)
    board.seen("shop", 0, 10, NOON)
    board.put("shop", 0, STALE, "no space left", "free some")
    failed = partition(board)
    assert (failed.state, failed.reason, failed.hint) == (STALE, "no space left", "free some")
    board.put("shop", 0, HEALTHY)
    again = partition(board)
    assert (again.events, again.last_event_at, again.reason, again.hint) == (10, NOON, "", "")


def test_a_batch_clears_reason_and_hint(board: HealthBoard) -> None:
    """GIVEN a partition that failed WHEN a batch is taken THEN neither the reason nor the hint is left."""
    board.put("shop", 0, STALE, "no space left", "free some")
    board.seen("shop", 0, 1, NOON)
    found = partition(board)
    assert (found.state, found.reason, found.hint) == (HEALTHY, "", "")


def test_a_batch_that_closes_a_gap_does_not_make_it_healthy(board: HealthBoard) -> None:
    """GIVEN a gap that is being closed WHEN batches of it are taken THEN it is stale until reading goes on."""
    board.put("shop", 0, STALE, "failover: slot was lost", "wait", repairing=True)
    board.seen("shop", 0, 50_000, NOON)
    assert (partition(board).state, partition(board).reason) == (STALE, "failover: slot was lost")
    board.put("shop", 0, HEALTHY)
    board.seen("shop", 0, 1, NOON)
    assert (partition(board).state, partition(board).events) == (HEALTHY, 50_001)


@pytest.mark.parametrize(
    ("waits_s", "state"),
    [(None, HEALTHY), (0.5, HEALTHY), (LAGGING_AFTER_S, HEALTHY), (LAGGING_AFTER_S + 0.1, LAGGING), (86_400, LAGGING)],
)
def test_s7_a_partition_whose_events_wait_for_more_than_30_s_is_lagging(
    board: HealthBoard, clock: Clock, waits_s: float | None, state: PartitionHealth
) -> None:
    """GIVEN a reader that says nothing is wrong WHEN the source has untaken events THEN their age decides."""
    assert LAGGING_AFTER_S == 30.0
    board.put("shop", 0, HEALTHY)
    board.answered("shop", SourceAnswer(clock(), {} if waits_s is None else {0: waits_s}))
    found = partition(board)
    assert (found.state, found.lag_s) == (state, waits_s or 0.0)
    assert bool(found.reason) is (state is LAGGING)


def test_lag_grows_while_the_source_does_not_answer_and_ends_when_it_says_so(board: HealthBoard, clock: Clock) -> None:
    """GIVEN an event that waits WHEN time goes by THEN lag is what it is now, not what it was; 0 once it is taken."""
    board.put("shop", 0, HEALTHY)
    board.answered("shop", SourceAnswer(clock(), {0: 25.0}))
    clock.now += 6.0
    assert (partition(board).state, partition(board).lag_s) == (LAGGING, 31.0)
    board.answered("shop", SourceAnswer(clock()))
    assert (partition(board).state, partition(board).lag_s, partition(board).reason) == (HEALTHY, 0.0, "")


def test_a_batch_of_old_events_says_nothing_of_what_waits(board: HealthBoard, clock: Clock) -> None:
    """GIVEN an instance that was down for an hour WHEN it has taken what had come THEN it is healthy, with no lag."""
    board.put("shop", 0, HEALTHY)
    board.answered("shop", SourceAnswer(clock(), {0: 3600.0}))
    board.seen("shop", 0, 1, NOON)
    board.answered("shop", SourceAnswer(clock()))
    assert (partition(board).state, partition(board).lag_s) == (HEALTHY, 0.0)


@pytest.mark.parametrize("before", [HEALTHY, STANDBY, STARTING])
def test_a_source_that_cannot_be_asked_is_stale_with_the_reason(
    board: HealthBoard, clock: Clock, before: PartitionHealth
) -> None:
    """GIVEN partitions whose reader has nothing to say WHEN the source does not answer THEN that is said of them."""
    board.put("shop", 0, before)
    board.put("shop", 1, before)
    board.answered("shop", SourceAnswer(clock(), refused={1: ("Postgres does not answer", "is it up?")}))
    assert partition(board, "shop/0").state is before
    found = partition(board, "shop/1")
    assert (found.state, found.reason, found.hint) == (STALE, "Postgres does not answer", "is it up?")
    assert found.lag_s is None, "nobody knows it: 0 would say that nothing waits"


@pytest.mark.parametrize("before", [STALE, FAILED])
def test_what_a_reader_says_goes_before_what_the_source_says(
    board: HealthBoard, clock: Clock, before: PartitionHealth
) -> None:
    """GIVEN a reader that failed WHEN the source is well, or not THEN its own reason stands, with the lag."""
    board.put("shop", 0, before, "no space left", "free some")
    board.answered("shop", SourceAnswer(clock(), {0: 100.0}))
    found = partition(board)
    assert (found.state, found.reason, found.lag_s) == (before, "no space left", 100.0)
    board.answered("shop", SourceAnswer(clock(), refused={0: ("does not answer", "")}))
    assert (partition(board).reason, partition(board).lag_s) == ("no space left", None)
    told = as_json(board.partitions(), version="1", uptime_s=1)
    assert told["partitions"]["shop/0"]["lag_s"] is None


def test_a_standby_shows_the_lag_and_is_not_ill(board: HealthBoard, clock: Clock) -> None:
    """GIVEN another instance that owns the source and is late WHEN the standby is asked THEN it is standing by."""
    board.put("shop", 0, STANDBY)
    board.answered("shop", SourceAnswer(clock(), {0: 100.0}))
    assert (partition(board).state, partition(board).lag_s) == (STANDBY, 100.0)
    assert overall(board.partitions()) == "healthy" and not unready(board.partitions())


def reports(*states: PartitionHealth) -> dict[str, PartitionReport]:
    return {f"shop/{n}": PartitionReport(state) for n, state in enumerate(states)}


@pytest.mark.parametrize(
    ("states", "whole", "ready"),
    [
        ((), "degraded", False),
        ((HEALTHY, STANDBY), "healthy", True),
        ((STARTING,), "degraded", False),
        ((STARTING, HEALTHY), "degraded", False),
        ((HEALTHY, HEALTHY, LAGGING), "degraded", True),
        ((HEALTHY, LAGGING), "unhealthy", True),
        ((LAGGING,), "unhealthy", True),
        ((HEALTHY, HEALTHY, STALE), "degraded", False),
        ((HEALTHY, STALE), "unhealthy", False),
        ((HEALTHY, HEALTHY, FAILED), "degraded", False),
        ((STANDBY, FAILED), "unhealthy", False),
    ],
)
def test_s7_the_whole_is_unhealthy_when_half_is_unwell_and_ready_when_events_can_be_taken(
    states: tuple[PartitionHealth, ...], whole: str, ready: bool
) -> None:
    """Every state a partition may be in, alone and in company."""
    found = reports(*states)
    assert overall(found) == whole
    assert (not unready(found)) is ready


def test_why_it_is_not_ready_is_said_by_partition() -> None:
    """GIVEN a source that is away WHEN asked whether it is ready THEN the partition and the reason are named."""
    found = {"shop/0": replace(PartitionReport(STALE), reason="does not answer"), "chat/0": PartitionReport(HEALTHY)}
    assert unready(found) == {"shop/0": "stale: does not answer"}


@pytest.mark.parametrize(
    ("group", "whole"),
    [
        (LiveGroupReport(delivering=True, lag_s=30.0), "healthy"),
        (LiveGroupReport(delivering=True, lag_s=30.1), "degraded"),
        (LiveGroupReport(delivering=False, lag_s=30.1), "degraded"),
        (LiveGroupReport(standby=True, lag_s=30.1), "healthy"),
        (LiveGroupReport(delivering=False, lag_s=0.0), "healthy"),
    ],
)
def test_delivery_that_stands_still_is_shown(group: LiveGroupReport, whole: str) -> None:
    """GIVEN partitions that are well WHEN the log has what the live group has not passed for long THEN it is seen."""
    told = as_json(reports(HEALTHY), version="1", uptime_s=1.0, delivery=group)
    assert told["status"] == whole
    assert (told["delivering"], told["delivery"]["lag_s"]) == (group.delivering, group.lag_s)


def test_s7_the_event_rate_is_of_the_last_minute(board: HealthBoard, clock: Clock) -> None:
    """GIVEN batches WHEN time goes by THEN the rate follows, down to 0, and the count stays."""
    rate: Callable[[], float] = lambda: partition(board).events_per_s  # noqa: E731 - read below
    board.seen("shop", 0, 90, NOON)
    clock.now += RATE_OVER_S / 2
    board.seen("shop", 0, 30, NOON)
    assert rate() == pytest.approx(120 / RATE_OVER_S)
    clock.now += RATE_OVER_S / 2 + 1
    assert rate() == pytest.approx(30 / RATE_OVER_S)
    clock.now += RATE_OVER_S
    assert (rate(), partition(board).events) == (0.0, 120)


def test_a_copy_that_fails_is_shown_with_its_error(board: HealthBoard) -> None:
    """GIVEN partitions that are read WHEN a copy fails THEN the whole is degraded, the error is told, and the instance
    is ready: the stream goes on."""
    board.put("shop", 0, HEALTHY)
    assert as_json(board.partitions(), version="1", uptime_s=1.0)["failing_copies"] == []
    failing = FailingCopy("0a", "shop", "public.orders", 3, "may not read")
    told = as_json(board.partitions(), version="1", uptime_s=1.0, copies=[failing])
    assert told["status"] == "degraded" and not unready(board.partitions())
    assert told["failing_copies"] == [
        {"copy": "0a", "source": "shop", "stream": "public.orders", "tries": 3, "error": "may not read"}
    ]


def test_s7_health_has_the_names_of_the_first_design_beside_ours(board: HealthBoard, clock: Clock) -> None:
    """GIVEN a partition that lags WHEN health is asked for as a list THEN each field that was asked for is there, and
    says the same as ours; durations are whole nanoseconds."""
    board.put("shop", 3, HEALTHY)
    board.seen("shop", 3, 120, NOON)
    board.answered("shop", SourceAnswer(clock.now, {3: 42.5}))
    told = as_json(board.partitions(), version="1.2", uptime_s=1.5, as_list=True)
    assert (told["status"], told["version"], told["uptime"]) == ("unhealthy", "1.2", 1_500_000_000)
    (one,) = told["partitions"]
    assert (one["id"], one["status"], one["lag"], one["eventRate"]) == (3, "lagging", 42_500_000_000, 2.0)
    assert one["lastEvent"] == one["last_event"] == NOON.isoformat()
    by_name = as_json(board.partitions(), version="1.2", uptime_s=1.5)["partitions"]
    assert by_name == {"shop/3": one}


def test_s1_a_store_of_checkpoints_that_is_away_degrades_and_does_not_make_unready(board: HealthBoard) -> None:
    """GIVEN a partition that is read WHEN its checkpoints cannot be saved THEN health says so, and why, until they can;
    events are taken meanwhile."""
    board.put("shop", 0, HEALTHY)
    board.store_away("shop", "etcd does not answer", "is it up?")
    told = as_json(board.partitions(), version="1", uptime_s=0.0, stores_away=board.stores_away)
    assert told["status"] == "degraded"
    assert told["checkpoints_away"] == {"shop": {"reason": "etcd does not answer", "hint": "is it up?"}}
    assert unready(board.partitions()) == {}
    board.store_back("shop")
    assert overall(board.partitions(), stores_away=board.stores_away) == "healthy"


def test_s7_an_idle_night_raises_no_alarm_and_a_lag_is_said_once_and_its_end(board: HealthBoard, clock: Clock) -> None:
    """GIVEN a source that is asked every five seconds for a night WHEN nothing waits THEN nothing is said; an event
    that waits is said once, though the source cannot be asked meanwhile, and so is its end."""
    watch = LagWatch()
    board.put("shop", 0, HEALTHY)
    board.seen("shop", 0, 1, NOON)
    for _ in range(10 * 3600 // 5):
        clock.now += 5.0
        board.answered("shop", SourceAnswer(clock.now))
        assert watch.heard(board.partitions()) == ([], [])
    assert overall(board.partitions()) == "healthy"

    said = []
    for waited_s in (10.0, 31.0, 36.0, None, 46.0, 0.0, 0.0):
        refused = {0: ("no answer", "")} if waited_s is None else {}
        waits = {} if not waited_s else {0: waited_s}
        board.answered("shop", SourceAnswer(clock.now, waits, refused))
        said.append(watch.heard(board.partitions()))
    nothing: tuple[list[str], list[str]] = ([], [])
    assert said == [nothing, (["shop/0"], []), nothing, nothing, nothing, ([], ["shop/0"]), nothing]


def test_while_no_lane_runs_nothing_is_healthy() -> None:
    """GIVEN a partition that is read and one that another instance reads WHEN Spark has no executor THEN the first is
    stale, with the reason, and the second is as it was; when Spark has one again, both are."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    board.put("shop", 1, PartitionHealth.STANDBY)
    board.put("chat", 0, PartitionHealth.HEALTHY)
    board.stalled = {"shop": "Spark has no executor"}
    found = board.partitions()
    assert (found["shop/0"].state, found["shop/0"].reason) == (PartitionHealth.STALE, "Spark has no executor")
    assert found["shop/1"].state is PartitionHealth.STANDBY
    assert found["chat/0"].state is PartitionHealth.HEALTHY
    assert overall(found) == "degraded"
    board.stalled = {}
    assert overall(board.partitions()) == "healthy"


def test_of_a_thousand_partitions_the_unwell_are_listed_and_all_are_counted() -> None:
    """GIVEN more partitions than one answer lists, the last of them unwell WHEN health is told THEN it is among those
    that are listed, the answer is bounded, and the counts are of all."""
    well, ill = PartitionReport(PartitionHealth.HEALTHY), PartitionReport(PartitionHealth.FAILED, reason="lost")
    reports = {f"idle{n:04d}/0": well for n in range(2 * LISTED_MAX)} | {"zoo/0": ill}
    told = as_json(reports, version="1", uptime_s=1.0)
    assert len(told["partitions"]) == LISTED_MAX
    assert told["partitions"]["zoo/0"]["reason"] == "lost"
    assert told["partition_counts"] == {"failed": 1, "healthy": 2 * LISTED_MAX}
    assert told["status"] == "degraded"
    assert len(unready(dict.fromkeys(reports, ill))) == LISTED_MAX


def test_who_cannot_look_at_the_others_does_not_say_that_they_read() -> None:
    """GIVEN an instance that stands by WHEN State has not answered for longer than a lease is good for THEN it says
    that it does not know, and is not healthy; what it reads itself is as it was."""
    now = [0.0]
    board = HealthBoard(lambda: now[0])
    board.put("shop", 0, STANDBY)
    board.put("own", 0, HEALTHY)
    board.others_seen(10.0)
    now[0] = 9.0
    assert overall(board.partitions()) == "healthy"
    now[0] = 11.0
    found = board.partitions()
    assert found["shop/0"].state is PartitionHealth.STALE and "not known" in found["shop/0"].reason
    assert found["own/0"].state is HEALTHY and overall(found) != "healthy"
    board.others_seen(10.0)
    assert board.partitions()["shop/0"].state is STANDBY


def test_a_drained_instance_does_not_say_that_another_reads_when_none_does() -> None:
    """GIVEN an instance that stands by WHEN no instance is to take its work THEN it says that nobody reads, and that
    nobody delivers; what it reads itself is as it was; and with another instance it stands by again.
    """
    board = HealthBoard()
    for source in ("shop", "chat"):
        board.put(source, 0, STANDBY)
    board.put("own", 0, HEALTHY)
    board.deliver(here=False, standby=True)
    board.left(frozenset({"shop", "own"}), delivery=True)
    found = board.partitions()
    assert [found[f"{name}/0"].state for name in ("shop", "chat", "own")] == [PartitionHealth.STALE, STANDBY, HEALTHY]
    assert "drained" in found["shop/0"].reason and overall(found, board.delivery) != "healthy"
    assert not board.delivery.standby
    board.left(frozenset(), delivery=False)
    assert board.partitions()["shop/0"].state is STANDBY and board.delivery.standby


def test_a_log_in_trouble_degrades_until_it_is_over_or_told_no_more(board: HealthBoard, clock: Clock) -> None:
    """GIVEN a partition that is read WHEN its log is in trouble THEN health is degraded and says what is wrong and what
    to do; once it is over, or nobody here tells it any more, health is healthy. Events are taken meanwhile."""
    board.put("shop", 0, HEALTHY)

    def told() -> dict[str, object]:
        return as_json(board.partitions(), version="1", uptime_s=0.0, log_troubles=board.log_troubles())

    board.log_unwell("shop", "files", "the file x is missing", "put it back")
    board.log_unwell("shop", "maintenance", "no room", "make room")
    assert told()["status"] == "degraded"
    assert told()["log_troubles"] == [
        {"source": "shop", "what": "files", "reason": "the file x is missing", "hint": "put it back"},
        {"source": "shop", "what": "maintenance", "reason": "no room", "hint": "make room"},
    ]
    assert unready(board.partitions()) == {}
    board.log_well("shop", "maintenance")
    assert [trouble.what for trouble in board.log_troubles()] == ["files"]
    clock.now += TROUBLE_TOLD_S - 1
    board.log_unwell("shop", "files", "the file x is missing", "put it back")
    clock.now += TROUBLE_TOLD_S
    assert told()["status"] == "degraded"
    clock.now += 1
    assert (told()["status"], told()["log_troubles"]) == ("healthy", [])


def test_a_partition_whose_lease_is_held_here_does_not_stand_by(board: HealthBoard) -> None:
    """GIVEN a partition that another instance read WHEN this one has its lease, and its log is being opened THEN it is
    not said that another reads it, and it is not ready; one that is read stays healthy while its lane changes."""
    board.put("shop", 0, STANDBY)
    board.put("shop", 1, HEALTHY)
    board.owned("shop", 0)
    board.owned("shop", 1)
    found = board.partitions()
    assert (found["shop/0"].state, found["shop/1"].state) == (STARTING, HEALTHY)
    assert "held here" in found["shop/0"].reason and "held here" in unready(found)["shop/0"]
    assert overall(found) == "degraded"
    board.put("shop", 0, FAILED, "the log is gone", "put it back")
    board.owned("shop", 0)  # it is tried again
    assert partition(board).reason == "the log is gone"
