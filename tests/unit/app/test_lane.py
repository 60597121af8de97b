"""A lane that is being stopped: which orders of the driver it still heeds."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.app import lane as module
from evermark.app.lane import BEGIN, HURRY, RENEW, STOP, TAKEN, EndTimes, Order, _Lane
from evermark.ingest.reading import SEATS
from evermark.observe.logging import get_logger
from evermark.testing.until import until

LATER = time.monotonic() + 3600.0


class Slow:
    """A part that ends at its third look."""

    looks = 0

    def join(self, _timeout_s: float) -> bool:
        self.looks += 1
        return self.looks >= 3


def stopping(*orders: Order) -> _Lane:
    lane: Any = object.__new__(_Lane)
    lane._orders, lane._hurry = queue.SimpleQueue(), False
    for order in orders:
        lane._orders.put(order)
    return lane  # type: ignore[no-any-return]


def test_a_part_that_comes_too_late_does_not_hurry_a_lane() -> None:
    """GIVEN a lane that stops WHEN it is told to begin with another part THEN it still waits for those it has."""
    part: Any = Slow()
    assert stopping((BEGIN, "source shop"), (BEGIN, "delivery"))._joined(part, LATER)
    assert part.looks == 3


def test_a_lane_that_is_told_to_hurry_waits_for_nothing_more() -> None:
    """And for no later part either."""
    lane, part = stopping((HURRY,)), Slow()
    assert not lane._joined(part, LATER)  # type: ignore[arg-type]
    assert not lane._joined(Slow(), LATER)  # type: ignore[arg-type]
    assert part.looks == 1


class Never:
    """A part that does not end; it says when it was told to."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def stop(self) -> None:
        self.told.append(self.name)

    def join(self, timeout_s: float) -> bool:
        threading.Event().wait(timeout_s)
        return False


@pytest.mark.parametrize(
    ("end", "least_s"),
    [(EndTimes(0.3, 0.0), 0.6), (EndTimes(0.0, 0.4), 0.4), (EndTimes(0.0, 0.0), 0.0)],
    ids=["flush_timeout", "checkpoint_timeout", "none"],
)
def test_s9_an_end_takes_as_long_as_its_time_outs_and_no_longer(end: EndTimes, least_s: float) -> None:
    """GIVEN parts that hang WHEN the lane stops THEN all sources are told first, waited for together, then delivery;
    each time-out is waited for, and no longer."""
    told: list[str] = []
    lane: Any = stopping()
    lane._end_times, lane._log = end, get_logger()
    lane._sources, lane._delivery = [Never("shop", told), Never("chat", told)], Never("delivery", told)
    began = time.monotonic()
    lane._shut_down()
    assert told == ["shop", "chat", "delivery"]
    assert least_s <= time.monotonic() - began < least_s + 5.0
    assert end.in_all_s >= least_s


def passing_on(count: int, *orders: Order) -> tuple[Any, list[str], list[object]]:
    told: list[str] = []
    heard: list[object] = []
    lane: Any = stopping(*orders)
    lane._sources = [Never(f"s{n}", told) for n in range(count)]
    lane._delivery = SimpleNamespace(on_told=heard.append)
    return lane, told, heard


def test_of_many_sources_a_few_at_a_time_pass_on_to_the_next_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane with many sources WHEN the next lane takes over THEN they are let go of in groups, with pauses in
    which it begins with them, and batches that others took are delivered meanwhile; few sources pass on together."""
    monkeypatch.setattr(module, "_PASS_ON_EVERY_S", 0.01)
    lane, told, heard = passing_on(SEATS + 5, (TAKEN, "a span"))
    began = time.monotonic()
    lane._pass_on()
    assert told == [f"s{n}" for n in range(SEATS + 5)] and heard == ["a span"]
    assert time.monotonic() - began >= (SEATS + 5) // module._PASSED_ON_AT_ONCE * 0.01
    few, told, _ = passing_on(SEATS)
    few._pass_on()
    assert told == []


def test_a_lane_that_is_told_to_stop_while_it_passes_on_lets_go_of_all_at_once() -> None:
    """GIVEN sources that pass on WHEN the lane is told to stop THEN it does not go on group by group."""
    lane, told, _ = passing_on(SEATS + 5, (STOP,))
    lane._pass_on()
    assert told == [] and not lane._hurry


class Part:
    """A source, or delivery: what it was told, and whether it has ended. One that is busy does not end when told to."""

    hangs = None
    repairs = False

    def __init__(self, name: str, busy_s: float = 0.0) -> None:
        self.name, self.busy_for_s, self.told, self.ended = name, busy_s, [], False

    def is_repairing(self) -> bool:
        return self.repairs

    def busy_s(self) -> float:
        return self.busy_for_s

    def join(self, _timeout_s: float) -> bool:
        return self.ended

    def __getattr__(self, what: str) -> Any:
        def told(*_: object) -> bool:
            self.told.append(what)
            self.ended = self.ended or (what == "stop" and not self.busy_for_s)
            return True

        return told


def at_work(*sources: Part) -> Any:
    lane: Any = stopping()
    lane._end_times, lane._log = EndTimes(0.0, 0.0), get_logger()
    lane._sources, lane._delivery = list(sources), Part("delivery")
    lane._parts = {part.name: part for part in (*sources, lane._delivery)}
    lane._begun, lane._said_busy, lane._said_repairing = set(lane._parts), False, False
    return lane


def test_a_lane_that_is_renewed_goes_on_until_a_long_batch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source in the middle of a long batch WHEN its lane is renewed THEN that source alone is told to stop, all
    else goes on, until another source has a long batch, which is waited for, too; WHEN the batches are taken THEN
    delivery is drained, and the lane ends in order."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "_BUSY_LOOK_S", 0.001)
    long, short, later = Part("long", busy_s=2.1), Part("short", busy_s=0.1), Part("later")
    lane, dead = at_work(long, short, later), []
    lane._orders.put((RENEW,))
    lane._orders.put((RENEW,))
    obeying = threading.Thread(target=lane._obey, args=(dead,))
    obeying.start()
    until(lambda: long.told == ["stop"], "it is told to stop behind its batch")
    lane._orders.put((TAKEN, "a span"))
    until(lambda: lane._delivery.told == ["on_told"], "delivery goes on")
    later.busy_for_s = 2.1
    until(lambda: later.told == ["stop"], "it is told to stop behind its batch")
    long.ended = True
    lane._orders.put((TAKEN, "a span"))
    until(lambda: len(lane._delivery.told) == 2, "delivery goes on")
    assert short.told == [] and obeying.is_alive()
    short.busy_for_s, later.ended = 0.0, True
    obeying.join(5.0)
    assert not obeying.is_alive() and dead == []
    assert short.told == ["stop"] and lane._delivery.told[2:] == ["drain", "drained", "stop"]


def test_a_lane_does_not_wait_for_a_source_that_is_told_to_stop_and_is_busy_no_more() -> None:
    """GIVEN a source that was told to stop behind its batch WHEN it waits for its repair to end, without a bound THEN
    the lane goes on to its end, which has one."""
    lane, waiting = at_work(Part("shop", busy_s=2.1)), {}
    assert lane._is_any_busy(waiting)
    lane._sources[0].busy_for_s = 0.0
    assert not lane._is_any_busy(waiting) and not lane._sources[0].ended


def test_a_lane_that_waits_for_a_long_batch_heeds_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that is renewed, and a batch that never ends WHEN the driver stops THEN the lane ends."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    lane = at_work(Part("long", busy_s=2.1))
    lane._orders.put((RENEW,))
    lane._orders.put((STOP,))
    lane._obey([])
    assert lane._delivery.told == ["stop"]


def test_a_lane_that_is_renewed_goes_on_until_a_gap_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source that closes a gap while other partitions of it have long batches WHEN its lane is renewed THEN no
    source is told to stop, for that would have the repair begin anew; WHEN the gap is closed THEN the lane ends."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(module, "_BUSY_LOOK_S", 0.001)
    shop, other = Part("shop", busy_s=2.1), Part("other")
    shop.repairs = True
    lane = at_work(shop, other)
    lane._orders.put((RENEW,))
    obeying = threading.Thread(target=lane._obey, args=([],))
    obeying.start()
    for number in (1, 2):
        lane._orders.put((TAKEN, "a span"))
        until(lambda number=number: len(lane._delivery.told) == number, "delivery goes on")
    assert shop.told == other.told == [] and lane._said_repairing
    shop.repairs, shop.busy_for_s = False, 0.0
    obeying.join(5.0)
    assert not obeying.is_alive() and shop.told == other.told == ["stop"]
    assert lane._delivery.told[2:] == ["drain", "drained", "stop"]


def test_a_lane_waits_an_hour_for_a_repair_and_not_for_one_that_begins_when_delivery_is_drained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a repair that never ends WHEN an hour has passed, and WHEN it began after delivery was drained, THEN the
    lane ends, for its work would stand still."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    shop = Part("shop")
    shop.repairs = True
    lane = at_work(shop)
    assert lane._is_any_repairing(time.monotonic())
    assert not lane._is_any_repairing(time.monotonic() - 3601.0)
    late = Part("late")
    lane = at_work(late)
    monkeypatch.setattr(lane, "_delivery", _Begins(late))
    lane._parts["delivery"] = lane._delivery
    lane._orders.put((RENEW,))
    lane._obey([])
    assert late.repairs and late.told == ["stop"]


class _Begins(Part):
    """Delivery: when it is drained, a source begins with a repair."""

    def __init__(self, source: Part) -> None:
        super().__init__("delivery")
        self.source = source

    def drain(self) -> None:
        self.source.repairs = True
