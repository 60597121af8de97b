"""A lane that is being stopped: which orders of the driver it still heeds."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.app import lane as module
from evermark.app.lane import BEGIN, HURRY, STOP, TAKEN, EndTimes, Order, _Lane
from evermark.ingest.reading import SEATS
from evermark.observe.logging import get_logger

LATER = time.monotonic() + 3600.0


class Slow:
    """A part that ends at its third look."""

    looks = 0

    def join(self, _timeout_s: float) -> bool:
        self.looks += 1
        return self.looks >= 3


def stopping(*orders: Order) -> _Lane:
    lane: Any = object.__new__(_Lane)
    lane._orders, lane._stop, lane._hurry = queue.SimpleQueue(), False, False
    lane._parts = {}
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


class Reading:
    """A source that is in the middle of a large batch; its thread ends when the batch is taken."""

    name, hangs = "shop", None

    def __init__(self, looks: int) -> None:
        self.looks_left = looks

    def stop(self) -> None: ...

    def join(self, _timeout_s: float) -> bool:
        self.looks_left -= 1
        return self.looks_left <= 0


class Delivery:
    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def join(self, _timeout_s: float) -> bool:
        return self.stopped


def ending(source: Any, *orders: Order) -> Any:
    lane: Any = stopping(*orders)
    lane._end_times, lane._log = EndTimes(0.0, 0.0), get_logger()
    lane._sources, lane._delivery = [source], Delivery()
    return lane


def test_a_lane_that_is_renewed_waits_for_the_batch_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source whose batch takes longer than an end may take WHEN its lane is renewed THEN delivery is passed on,
    and the lane lives until the batch is taken; WHEN the lane is stopped THEN it does not wait."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    renewed = ending(Reading(50))
    renewed._shut_down(renewed=True)
    assert renewed._sources[0].looks_left <= 0 and renewed._delivery.stopped
    stopped = ending(Reading(50))
    stopped._shut_down()
    assert stopped._sources[0].looks_left > 0


@pytest.mark.parametrize("order", [STOP, HURRY])
def test_a_lane_that_waits_for_a_batch_heeds_an_end(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """GIVEN a lane that is renewed, with a batch that never ends WHEN the driver stops THEN the lane ends, too."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    lane = ending(Reading(10**9), (order,))
    lane._shut_down(renewed=True)
    assert lane._sources[0].looks_left > 0


def test_a_lane_that_waits_for_a_batch_sees_a_loop_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a lane that is renewed, and waits WHEN the loop of a part hangs THEN its process ends, as at any time."""
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    lane = ending(Reading(10**9))
    lane._parts = {"source shop": SimpleNamespace(hangs="its loop hangs")}
    lane._end = SimpleNamespace(close=lambda: None)
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr(module.os, "_exit", end)
    with pytest.raises(SystemExit):
        lane._shut_down(renewed=True)
    assert codes == [module._LOOP_HANGS]
