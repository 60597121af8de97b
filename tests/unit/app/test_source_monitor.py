"""What is warned of while a source is owned, how often, and that watching never stands in its way."""

from __future__ import annotations

import threading
from typing import Any

from structlog.testing import capture_logs

from evermark.app.source_monitor import (
    UPKEEP_AGAIN_S,
    UPKEEP_DUE_S,
    UPKEEP_EVERY_S,
    WARN_AGAIN_S,
    SourceMonitor,
    WarningThrottle,
)
from evermark.errors import UnreachableError
from evermark.observe.health import TROUBLE_TOLD_S, FailingCopy, HealthBoard, PartitionHealth, overall
from evermark.observe.metrics import Metrics
from evermark.sources.base import Condition, Source, StaleStream, StaleStreams, Warned
from evermark.testing.until import until


def test_the_bell_rings_when_it_begins_and_now_and_then_while_it_lasts() -> None:
    """GIVEN something that lasts WHEN heard again and again THEN it is said once per crossing and every ten minutes."""
    bell = WarningThrottle()
    much, more, again = (Warned(said, "") for said in ("much", "more", "again"))
    assert bell.heard({"wal": much}, 0.0) == ([much], [])
    assert bell.heard({"wal": more}, WARN_AGAIN_S - 1) == ([], [])
    assert bell.heard({"wal": more}, WARN_AGAIN_S) == ([more], [])
    assert bell.heard({}, WARN_AGAIN_S + 1) == ([], ["wal"])
    assert bell.heard({}, WARN_AGAIN_S + 2) == ([], [])
    assert bell.heard({"wal": again}, WARN_AGAIN_S + 3) == ([again], [])


class Told(Source):
    """A source of which only the gauges and the upkeep matter."""

    def __init__(self, *answers: Condition | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.kept_up = 0
        self.upkeep_fails = False

    def condition(self) -> Condition:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def upkeep(self) -> None:
        self.kept_up += 1
        if self.upkeep_fails:
            raise UnreachableError("away")

    def partitions(self) -> Any: ...
    def earliest(self, partition: int) -> Any: ...
    def latest(self, after: Any, limit: Any) -> Any: ...
    def slices(self, partition: int, start: str, end: str) -> Any: ...
    def read(self, piece: Any) -> Any: ...


def value(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value("evermark_source_gauge", {"source": "shop", "name": name})


def test_gauges_are_metrics_until_they_cannot_be_asked_for() -> None:
    """GIVEN gauges, then a failure WHEN watched THEN they are shown, then gone: an old value is no good one."""
    metrics = Metrics()
    source = Told(Condition({"wal_retained_bytes": 7.0}), RuntimeError("no answer"))
    watching = SourceMonitor(source, "shop", HealthBoard(), metrics)
    watching._look()
    assert value(metrics, "wal_retained_bytes") == 7.0
    watching._look()
    assert value(metrics, "wal_retained_bytes") is None


def test_a_warning_names_what_it_is_about_and_stays_rare() -> None:
    """GIVEN too much WAL at every look WHEN watched THEN one warning is logged, with the source's own hint."""
    much = Condition({"wal_retained_bytes": 5.0}, {"wal_retained_bytes": Warned("5.0 GiB", "see the playbook")})
    watching = SourceMonitor(Told(much, much, much, Condition()), "shop", HealthBoard(), Metrics())
    with capture_logs() as lines:
        for _ in range(4):
            watching._look()
    (said,) = [line for line in lines if line["log_level"] == "warning"]
    assert "5.0 GiB" in said["event"] and "playbook" in said["hint"]


def test_stale_streams_stand_on_the_board_by_name_until_they_are_read_again() -> None:
    """GIVEN a healthy partition with stale streams WHEN watched THEN health counts them and names some; later none."""
    board = HealthBoard()
    board.put("chat", 1, PartitionHealth.HEALTHY)
    stale = Condition(stale={1: StaleStreams(2, [StaleStream("room", "block 9 is forged")])})
    watching = SourceMonitor(Told(stale, Condition()), "chat", board, Metrics())
    watching._look()
    found = board.partitions()["chat/1"]
    assert (found.state, found.stale_streams) == (PartitionHealth.HEALTHY, 2)
    assert found.stale_first == {"room": "block 9 is forged"}
    assert overall(board.partitions()) == "degraded"
    watching._look()
    assert overall(board.partitions()) == "healthy"


def test_upkeep_runs_at_start_and_every_hour_though_nothing_happens() -> None:
    """GIVEN an idle source WHEN time goes by THEN upkeep is called at once, hourly, and sooner after a failure."""
    now = [0.0]
    source = Told(Condition())
    watching = SourceMonitor(source, "shop", HealthBoard(), Metrics(), clock=lambda: now[0])
    for now[0] in (0.0, UPKEEP_EVERY_S - 1, UPKEEP_EVERY_S):
        watching._keep_up()
    assert source.kept_up == 2
    source.upkeep_fails = True
    for now[0] in (2 * UPKEEP_EVERY_S, 2 * UPKEEP_EVERY_S + UPKEEP_AGAIN_S):
        watching._keep_up()
    assert source.kept_up == 4


def test_upkeep_comes_within_a_minute_when_the_source_asks_for_it() -> None:
    """GIVEN something for upkeep to see to WHEN looked at THEN it comes, and not again at every look while it lasts."""
    now = [0.0]
    source = Told(Condition(), Condition(upkeep_due=True))
    watching = SourceMonitor(source, "shop", HealthBoard(), Metrics(), clock=lambda: now[0])
    seen = []
    for now[0] in (0.0, UPKEEP_DUE_S, UPKEEP_DUE_S + 15, UPKEEP_DUE_S + 30, 2 * UPKEEP_DUE_S + 15):
        watching._keep_up()
        watching._look()
        seen.append(source.kept_up)
    assert seen == [1, 1, 2, 2, 3]
    # AND a failure is waited out as ever
    source.upkeep_fails = True
    seen.clear()
    for now[0] in (1000.0, 1000.0 + UPKEEP_DUE_S, 1000.0 + UPKEEP_AGAIN_S):
        watching._keep_up()
        watching._look()
        seen.append(source.kept_up)
    assert seen == [4, 4, 5]


def test_copies_that_a_source_makes_by_itself_are_named_while_they_fail() -> None:
    """GIVEN a source whose copy cannot begin WHEN watched THEN health names it, and is degraded, until it goes on; it
    also ends what the lane before has said."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    board.copies_wait("shop", {"bills": (1, "said by the lane before")})
    board.copies = [FailingCopy("0a", "other", "t", 1, "State has it")]
    failing = Condition(failing_copies={"orders": (3, "no snapshot")})
    watching = SourceMonitor(Told(failing, Condition()), "shop", board, Metrics())
    watching._look()
    assert [(each.source, each.stream, each.tries, each.error) for each in board.failing_copies()] == [
        ("other", "t", 1, "State has it"),
        ("shop", "orders", 3, "no snapshot"),
    ]
    assert overall(board.partitions(), copies=board.failing_copies()) == "degraded"
    watching._look()
    assert [each.source for each in board.failing_copies()] == ["other"]


def test_a_copy_that_failed_in_a_lane_that_died_is_not_said_for_ever() -> None:
    """GIVEN a source whose copy fails WHEN its lane dies, and another instance reads it THEN health says so as long as
    it is told, and not much longer."""
    now = [1000.0]
    board = HealthBoard(lambda: now[0])
    watching = SourceMonitor(
        Told(*[Condition(failing_copies={"orders": (3, "no snapshot")})] * 20), "shop", board, Metrics()
    )
    for _ in range(20):
        watching._look()
        assert len(board.failing_copies()) == 1
        now[0] += watching.every_s
    now[0] += TROUBLE_TOLD_S
    assert board.failing_copies() == []


def test_stopping_clears_the_gauges_and_does_not_wait_for_a_silent_server() -> None:
    """GIVEN a source that answers, and one that hangs WHEN stopped THEN gauges are gone, and nobody waits."""
    metrics = Metrics()
    watching = SourceMonitor(Told(Condition({"wal_retained_bytes": 7.0})), "shop", HealthBoard(), metrics, every_s=60.0)
    watching.start()
    until(lambda: value(metrics, "wal_retained_bytes") == 7.0, "the gauge is shown")
    watching.stop()
    until(lambda: value(metrics, "wal_retained_bytes") is None, "the gauge is gone")

    release = threading.Event()

    class Silent(Told):
        def condition(self) -> Condition:
            release.wait(30)
            return Condition()

    hanging = SourceMonitor(Silent(Condition()), "shop", HealthBoard(), Metrics())
    hanging.start()
    hanging.stop()
    release.set()


def test_an_answer_that_comes_after_the_end_is_not_shown() -> None:
    """GIVEN a source that is asked WHEN it is let go of, taken again, and answers the first question then THEN what was
    said since stays: health would be well, and is not."""
    stale = Condition({"streams": 1.0}, stale={0: StaleStreams(1, [StaleStream("room", "forked")])})
    asked, answers = threading.Event(), threading.Event()

    class Late(Told):
        def condition(self) -> Condition:
            asked.set()
            answers.wait(10)
            return Condition()

    board, metrics = HealthBoard(), Metrics()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    first, second = SourceMonitor(Late(), "shop", board, metrics), SourceMonitor(Told(stale), "shop", board, metrics)
    looking = threading.Thread(target=first._look)
    looking.start()
    assert asked.wait(10)
    first.stop()
    second._look()
    answers.set()
    looking.join()
    assert value(metrics, "streams") == 1.0
    assert board.partitions()["shop/0"].stale_first == {"room": "forked"}
