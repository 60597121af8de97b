"""Calls, reports and orders between the driver and a lane; and who is not let in."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from evermark.errors import ConflictError, EngineError, UnreachableError
from evermark.spark.channel import Channel, LaneEnd, LaneReport
from evermark.testing.until import until


def refuse() -> None:
    raise ConflictError("not now", hint="later")


class Driver:
    def __init__(self) -> None:
        self.reports: list[tuple[str, LaneReport]] = []
        self.beats = 0
        serves = {"add": lambda a, b: a + b, "refuse": refuse, "fail": lambda: 1 / 0, "wait": time.sleep}
        self.channel = Channel()
        self.channel.serve(serves, self._heard)

    def _heard(self, lane: str, reports: list[LaneReport]) -> None:
        self.beats += not reports
        self.reports += [(lane, one) for one in reports]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.channel.close()


@pytest.fixture
def orders() -> queue.SimpleQueue[tuple[str, ...] | None]:
    return queue.SimpleQueue()


@pytest.fixture
def lane(driver: Driver, orders: queue.SimpleQueue[tuple[str, ...] | None]) -> Iterator[LaneEnd]:
    made = LaneEnd("lane-1", orders.put)
    yield made
    made.close()


def test_a_call_is_answered_and_its_error_is_raised_at_the_lane(lane: LaneEnd) -> None:
    """Answers as they are; our errors with kind and hint; any other as one line."""
    assert lane.call("add", 2, 3) == 5
    with pytest.raises(ConflictError) as refused:
        lane.call("refuse")
    assert refused.value.hint == "later"
    with pytest.raises(EngineError, match="fail: ZeroDivisionError"):
        lane.call("fail")
    with pytest.raises(EngineError, match="KeyError"):
        lane.call("no such call")


def test_calls_of_several_threads_do_not_wait_for_each_other(lane: LaneEnd) -> None:
    """GIVEN a call that takes long WHEN another thread calls THEN it is answered at once."""
    slow = threading.Thread(target=lane.call, args=("wait", 2.0))
    slow.start()
    assert lane.call("add", 1, 1) == 2
    assert slow.is_alive()
    slow.join()


def test_threads_that_called_and_ended_leave_no_connection(lane: LaneEnd) -> None:
    """GIVEN many calls at once WHEN their threads have ended THEN few connections are kept, and serve later calls."""

    def serving() -> int:
        return sum(thread.name == "channel call" for thread in threading.enumerate())

    before = serving()
    callers = [threading.Thread(target=lane.call, args=("wait", 0.2)) for _ in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    until(lambda: serving() <= before + 4, "connections of threads that ended are closed")
    kept = serving()
    for _ in range(20):
        later = threading.Thread(target=lane.call, args=("add", 1, 2))
        later.start()
        later.join()
    assert serving() <= kept  # those of a test before this one may have ended meanwhile


def test_reports_arrive_in_order_and_all_of_them_before_the_end(driver: Driver, lane: LaneEnd) -> None:
    """GIVEN reports told just before the end WHEN the lane closes THEN none is lost."""
    for n in range(100):
        lane.tell("board", "put", n, kind="x")
    lane.close()
    until(lambda: len(driver.reports) == 100, "all reports came")
    assert driver.reports == [("lane-1", ("board", "put", (n,), {"kind": "x"})) for n in range(100)]


def test_orders_reach_the_lane_that_they_are_for(
    driver: Driver, lane: LaneEnd, orders: queue.SimpleQueue[tuple[str, ...] | None]
) -> None:
    """And to no other; of a lane that is gone the driver is told so."""
    assert not driver.channel.tell("lane-2", "stop")
    until(lambda: driver.channel.tell("lane-1", "begin"), "the lane is known")
    assert orders.get(timeout=5) == ("begin",)


def test_a_lane_notices_that_its_driver_is_gone(
    driver: Driver, lane: LaneEnd, orders: queue.SimpleQueue[tuple[str, ...] | None]
) -> None:
    """It is told so at once, and its calls fail instead of waiting."""
    until(lambda: driver.channel.tell("lane-1", "begin"), "the lane is known")
    assert orders.get(timeout=5) == ("begin",)
    driver.channel.close()
    assert orders.get(timeout=5) is None
    with pytest.raises(UnreachableError, match="driver of this lane is gone"):
        lane.call("add", 1, 1)


def test_who_does_not_know_the_key_is_not_let_in(driver: Driver, lane: LaneEnd) -> None:
    """GIVEN a program of the same machine WHEN it connects without the key THEN it is refused, and lanes go on."""
    host, _, port = os.environ["EVERMARK_CHANNEL"].rpartition(":")
    assert host == "127.0.0.1"
    with pytest.raises(AuthenticationError):
        Client((host, int(port)), "AF_INET", authkey=b"a guess")
    with socket.create_connection((host, int(port))) as silent:  # says nothing at all, and holds nobody up
        assert LaneEnd("lane-2", lambda _: None).call("add", 1, 1) == 2
        silent.close()


def test_a_lane_that_has_nothing_to_tell_says_that_it_lives(
    driver: Driver, lane: LaneEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second: its driver knows from that whether its process hangs."""
    until(lambda: driver.beats >= 2, "it is heard of twice", timeout_s=10)
    assert driver.reports == []


def test_a_second_attempt_is_told_though_the_end_of_the_first_is_seen_late(
    driver: Driver, orders: queue.SimpleQueue[tuple[str, ...] | None]
) -> None:
    """GIVEN a lane whose task is tried again WHEN its first connection ends after the second began THEN orders come."""
    first = LaneEnd("lane-1", lambda _: None)
    until(lambda: driver.channel.tell("lane-1", "begin"), "the first attempt is known")
    second = LaneEnd("lane-1", orders.put)
    second.tell_now("board", "ready")
    until(lambda: driver.reports, "the second attempt is known")
    first.close()
    until(lambda: len(driver.channel._open) == 1, "the end of the first was seen")
    assert driver.channel.tell("lane-1", "begin")
    assert orders.get(timeout=5) == ("begin",)
    second.close()


def test_nothing_is_left_of_a_lane_that_ended(
    driver: Driver, orders: queue.SimpleQueue[tuple[str, ...] | None]
) -> None:
    """GIVEN a process that runs one lane after another WHEN a lane ends THEN its threads do; the driver sees it."""
    before = set(threading.enumerate())
    lane = LaneEnd("lane-1", orders.put)
    assert lane.call("add", 1, 1) == 2
    lane.close()
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"channel reports", "channel orders"}
    until(lambda: not driver.channel._open, "the driver has closed its connections")
    assert not driver.channel.tell("lane-1", "begin")
    assert orders.empty(), "a lane that ended by itself was told that its driver is gone"


def test_a_lane_that_does_not_listen_holds_up_no_other(
    driver: Driver, lane: LaneEnd, orders: queue.SimpleQueue[tuple[str, ...] | None]
) -> None:
    """GIVEN a lane whose process stands still, with more orders than its socket holds, WHEN another is told something
    THEN it hears it at once.
    """
    host, _, port = os.environ["EVERMARK_CHANNEL"].rpartition(":")
    deaf = Client((host, int(port)), "AF_INET", authkey=os.environ["EVERMARK_CHANNEL_KEY"].encode())
    deaf.send(("lane", "lane-2"))
    until(lambda: driver.channel.tell("lane-2", "hello"), "the lane is known")
    flood = threading.Thread(target=driver.channel.tell, args=("lane-2", b"x" * 64_000_000), daemon=True)
    flood.start()
    flood.join(0.5)
    assert flood.is_alive()
    assert driver.channel.tell("lane-1", "stop")
    assert orders.get(timeout=5) == ("stop",)
    deaf.close()
    flood.join(5)
    assert not flood.is_alive()
