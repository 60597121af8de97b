"""The contract of sources: a small source in memory keeps it, and each way of breaking it is caught."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

import evermark as em
from evermark.event import Op, taken_batch
from evermark.sources.base import Untaken
from evermark.testing.contracts import source as source_contract

EVENTS = 23


def at(number: int) -> str:
    return f"{number:06d}"


class Tickets(em.Source):
    """Two partitions: one with events, one that is always empty. Positions are the events' own numbers."""

    def partitions(self) -> Sequence[int]:
        return [0, 1]

    def earliest(self, partition: int) -> str:
        return at(0)

    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        return {p: at(min(EVENTS, int(start) + limit.rows_max)) if p == 0 else start for p, start in after.items()}

    def slices(self, partition: int, start: str, end: str) -> Sequence[em.Slice]:
        if start == end:
            return []
        middle = at((int(start) + int(end)) // 2)
        cuts = sorted({start, middle, end})
        return [em.Slice(partition, a, b) for a, b in itertools.pairwise(cuts)]

    def numbers(self, piece: em.Slice) -> list[int]:
        return list(range(int(piece.start), int(piece.end)))

    def event_id(self, number: int) -> str:
        return f"ticket-{number}"

    def read(self, piece: em.Slice) -> Iterator[pa.RecordBatch]:
        for number in self.numbers(piece):
            columns: dict[str, object] = {
                "event_id": [self.event_id(number)],
                "position": [self.position(number)],
                "stream": ["tickets"],
                "op": [str(Op.INSERT)],
            }
            yield taken_batch(columns, 1)

    def position(self, number: int) -> str:
        return at(number)


class TestTickets(em.testing.SourceContract):
    source = Tickets()


class Rests(Tickets):
    """After every look that found something it offers nothing for a while: the look was expensive."""

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks
        self.rests = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.looks,)

    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        if self.rests:
            self.rests -= 1
            return dict(after)
        found = super().latest(after, limit)
        self.rests = self.looks if found != dict(after) else 0
        return found

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        return Tickets().untaken(after)


class TestTicketsOfASourceThatRests(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def _made(self) -> None:
        self.source = Rests()


def test_a_source_that_rests_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a source that offers nothing after its first batch WHEN the contract runs THEN that is no end."""
    monkeypatch.setattr(source_contract, "_REST_S_MAX", 0.1)
    suite = em.testing.SourceContract()
    suite.source = Rests(looks=10**9)
    with pytest.raises(AssertionError, match="offers nothing after 000004, though in another process it does"):
        suite.test_however_a_range_is_cut_it_holds_the_same_events()


class ReadsItsEnd(Tickets):
    def numbers(self, piece: em.Slice) -> list[int]:
        return list(range(int(piece.start), int(piece.end) + 1))


class LosesTheLast(Tickets):
    def numbers(self, piece: em.Slice) -> list[int]:
        return list(range(int(piece.start), int(piece.end)))[: 4 if int(piece.end) - int(piece.start) > 4 else None]


class NewIdAtEachReading(Tickets):
    readings = itertools.count()

    def event_id(self, number: int) -> str:
        return f"ticket-{number}-{next(self.readings)}"


class OneIdForAll(Tickets):
    def event_id(self, number: int) -> str:
        return "ticket"


class LeavesAGap(Tickets):
    def slices(self, partition: int, start: str, end: str) -> Sequence[em.Slice]:
        return super().slices(partition, start, end)[:1]


class GoesBack(Tickets):
    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        return {p: at(0) if int(start) == EVENTS else end for (p, start), end in self._ahead(after, limit)}

    def _ahead(self, after: Mapping[int, str], limit: em.Limit) -> Any:
        return zip(after.items(), super().latest(after, limit).values(), strict=True)


class AnswersTooMuch(Tickets):
    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        return {1: at(0), **super().latest(after, limit)}


class GrowingPositions(Tickets):
    def position(self, number: int) -> str:
        return at(number) if number < 10 else f"{at(number)}0"


class Unsorted(Tickets):
    def numbers(self, piece: em.Slice) -> list[int]:
        return super().numbers(piece)[::-1]


class RepeatsFromLater(Tickets):
    def may_repeat_from(self, partition: int, position: str) -> str:
        return at(int(position) + 1)


class StaysAtHome(Tickets):
    def __init__(self) -> None:
        self.connection = lambda: None


class ConfirmsOnce(Tickets):
    def __init__(self) -> None:
        self.confirmed: list[str] = []

    def confirm(self, partition: int, end: str) -> None:
        if end in self.confirmed:
            raise ValueError(f"{end} was confirmed before")
        self.confirmed.append(end)


class DropsWhatItOffered(Tickets):
    def __init__(self) -> None:
        self.offered = self.begun = 0

    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        found = super().latest(after, limit)
        self.offered = max(self.offered, *map(int, found.values()), 0)
        return found

    def begin(self, partition: int, position: str) -> None:
        self.begun = self.offered

    def numbers(self, piece: em.Slice) -> list[int]:
        return [number for number in super().numbers(piece) if number >= self.begun]


class NothingInIt(Tickets):
    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        return dict(after)


@pytest.mark.parametrize(
    "broken",
    [
        ReadsItsEnd, LosesTheLast, NewIdAtEachReading, OneIdForAll, LeavesAGap, GoesBack, AnswersTooMuch,
        GrowingPositions, Unsorted, RepeatsFromLater, StaysAtHome, ConfirmsOnce,
        DropsWhatItOffered, NothingInIt,
    ],
)  # fmt: skip
def test_a_source_that_breaks_its_word_is_caught(broken: type[Tickets]) -> None:
    """GIVEN a source with one fault WHEN the contract runs over it THEN at least one of its tests fails."""
    suite = em.testing.SourceContract()
    suite.source = broken()
    failed: list[str] = []
    for name in (name for name in dir(suite) if name.startswith("test_")):
        try:
            getattr(suite, name)()
        except Exception:  # noqa: BLE001 - what a fault leads to is not for this test to say
            failed.append(name)
    assert failed


def test_the_contracts_are_exported_and_load_neither_spark_nor_pytest_before_they_are_named() -> None:
    """GIVEN a fresh process WHEN evermark.testing is imported THEN it is light, and every suite can be named."""
    code = """
import sys
import evermark as em
em.testing
assert not {"pyspark", "pytest", "psycopg", "pyarrow"} & set(sys.modules), sorted(sys.modules)
assert all(hasattr(em.testing, name) for name in em.testing.__all__)
assert "pyspark" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
