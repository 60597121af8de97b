"""Rows that are copied from a replica: where they stand in its plan, whatever snapshot they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import FormatError
from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.ranges import Held, Ranges, lacking
from evermark.sources.replica import plan as planning
from evermark.sources.replica.plan import EVERYTHING, Copied, Part, Plan
from evermark.sources.replica.settings import ReplicaSourceSettings
from tests.unit.config.config_file import MINIMAL, read, refused

TABLES = ("bills", "orders")


def snapshot(table: str, held: Held, rows: int, name: str = "s1", chunk_rows: int = 3) -> Manifest:
    sizes = [min(chunk_rows, rows - at) for at in range(0, rows, chunk_rows)]
    chunks = tuple(Chunk(size, 100 + number, f"digest {number}") for number, size in enumerate(sizes))
    return Manifest(name, table, {}, held, 1, 7, chunks)


def told(plan: Plan) -> list[tuple[str, str, int, int]]:
    return [(part.table, "rows" if part.chunk else "events", part.first, part.last) for part in plan.parts]


def test_a_table_that_is_first_read_is_told_by_its_rows_and_then_by_later_events() -> None:
    """GIVEN a table that was not read yet, with events WHEN it is copied THEN no event that its rows have seen is
    planned, and every later one behind them; other tables go on as they do."""
    plan = planning.grown(planning.begun("r", ["bills"], {}), ["bills"], {"bills": {"a": Ranges.through(2)}})
    assert planning.uncopied(plan, ["orders"]) == ["orders"]
    plan = planning.with_copy(plan, snapshot("orders", {"a": Ranges.through(9)}, 4), "c1")
    assert planning.uncopied(plan, ["orders"]) == []
    plan = planning.grown(plan, TABLES, {"bills": {"a": Ranges.through(2)}, "orders": {"a": Ranges.through(11)}})
    assert told(plan) == [
        ("bills", "events", 1, 2),
        ("orders", "rows", 0, 2),
        ("orders", "rows", 0, 0),
        ("orders", "events", 10, 11),
    ]
    assert [part.origin for part in plan.parts if part.chunk] == ["c1", "c1"]
    assert [plan.rows_left(since) for since in (0, 2, 4, 6)] == [4, 4, 2, 0]
    assert plan.repeats_to == 0, "nothing of it can be in the log"
    done = planning.confirmed(plan, plan.end)
    assert done.done["orders"] == {"a": Ranges.through(11)}, "rows are no numbers of events"
    assert done.rows_left() == 0


def test_a_table_that_is_read_already_has_its_events_in_front_of_its_rows() -> None:
    """GIVEN a table that is being read WHEN its rows are copied, too THEN events that they have seen come before them:
    no row is older than an event in front of it."""
    plan = planning.grown(planning.begun("r", ["orders"], {}), ["orders"], {"orders": {"a": Ranges.through(3)}})
    plan = planning.with_copy(plan, snapshot("orders", {"a": Ranges.through(5)}, 2), "c1")
    assert told(plan) == [("orders", "events", 1, 3), ("orders", "events", 4, 5), ("orders", "rows", 0, 1)]


def test_a_snapshot_that_is_gone_is_replaced_from_where_reading_is() -> None:
    """GIVEN a copy of which the first chunk was read WHEN the peer has its snapshot no more THEN what was to follow is
    dropped, the events since come first, and the rows of the next snapshot are told by the same copy; ids that the log
    has are looked up until they are passed."""
    plan = planning.with_copy(Plan("r"), snapshot("orders", {"a": Ranges.through(9)}, 6), "c1")
    plan = planning.grown(plan, ["orders"], {"orders": {"a": Ranges.through(10)}})
    plan = planning.confirmed(plan, 3)
    held = {"orders": {"a": Ranges.through(12)}}
    assert planning.without_vanished(plan, 3, held, {"s0"}) == plan
    left = planning.without_vanished(plan, 3, held, {"s1"})
    assert (left.start, left.end, left.copies) == (3, 3, {"orders": Copied("c1", whole=False)})
    assert planning.uncopied(left, TABLES[1:]) == ["orders"]
    again = planning.with_copy(left, snapshot("orders", held["orders"], 6, "s2"), "c2")
    assert told(again) == [("orders", "events", 10, 12), ("orders", "rows", 0, 2), ("orders", "rows", 0, 2)]
    assert {part.origin for part in again.parts if part.chunk} == {"c1"}
    assert again.repeats_to == again.end
    assert planning.uncopied(again, ["orders"]) == []


def test_a_copy_that_was_read_stays_whole_when_what_follows_is_dropped() -> None:
    """GIVEN a table that was copied, and another that is being WHEN an event behind the first vanishes THEN only the
    second is to be planned anew."""
    plan = planning.with_copy(Plan("r"), snapshot("bills", {}, 2), "c1")
    plan = planning.grown(plan, ["bills"], {"bills": {"a": Ranges.through(2)}})
    plan = planning.with_copy(plan, snapshot("orders", {}, 2, "s2"), "c2")
    left = planning.without_vanished(plan, 2, {"bills": {"a": Ranges.through(1)}})
    assert planning.uncopied(left, TABLES) == ["orders"]


def test_what_was_lost_at_the_peer_and_may_come_back_is_still_looked_up() -> None:
    """GIVEN a plan made anew, of which anything may be in the log WHEN rows are planned again THEN that is not
    forgotten for the events that follow."""
    plan = Plan("r", 5, {"orders": {}}, repeats_to=EVERYTHING, copies={"orders": Copied("c1", whole=False)})
    plan = planning.with_copy(plan, snapshot("orders", {"a": Ranges.through(2)}, 2), "c2")
    assert plan.repeats_to == EVERYTHING


def test_what_is_planned_anew_is_not_copied_again() -> None:
    """GIVEN a log whose plan is lost THEN no table is copied: its events are read again, or a repair has its rows."""
    assert planning.uncopied(planning.anew("r", 7, TABLES, TABLES), TABLES) == []
    assert planning.uncopied(planning.anew("r", 7, TABLES), TABLES) == list(TABLES)


def test_a_chunk_is_one_slice_and_a_batch_ends_before_one_that_does_not_fit() -> None:
    """GIVEN events and chunks THEN slices end where chunks do, and have at most so many events; a batch splits a chunk
    only if it begins with it."""
    held = {"bills": {"a": Ranges.through(5)}, "orders": {"a": Ranges.through(9)}}
    plan = planning.grown(planning.begun("r", ["bills"], {}), ["bills"], held)
    plan = planning.with_copy(plan, snapshot("orders", {"a": Ranges.through(9)}, 7), "c1")
    plan = planning.grown(plan, TABLES, {"bills": {"a": Ranges.through(7)}, "orders": {"a": Ranges.through(9)}})
    assert plan.cuts(0, plan.end, 2) == [0, 2, 4, 5, 8, 11, 12, 14]
    assert plan.cuts(6, 10, 2) == [6, 8, 10]
    assert plan.cuts(4, 4, 2) == [4]
    assert [plan.batch_end(at, 7) for at in (0, 5, 6, 11)] == [5, 12, 13, 14]
    assert plan.batch_end(5, 2) == 7
    assert plan.batch_end(0, 100) == plan.end


def test_a_plan_with_copies_is_of_another_version() -> None:
    """GIVEN a plan with copies THEN it survives being written down, and a program that knows none refuses it; one
    without is written as before."""
    plan = planning.with_copy(Plan("r", epoch=4), snapshot("orders", {"a": Ranges.through(9)}, 4), "c1")
    assert planning.from_json(planning.as_json(plan)) == plan
    assert planning.as_json(plan)["v"] == 2
    assert planning.as_json(planning.begun("r", TABLES, {}))["v"] == 1
    with pytest.raises(FormatError, match="newer version"):
        planning.from_json({**planning.as_json(plan), "v": 3})


@dataclass
class Model:
    """A peer with one table, in which each event makes one row, and a log that takes what is planned."""

    held: dict[str, Ranges] = field(default_factory=dict)
    snapshots: dict[str, tuple[Held, list[str]]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    plan: Plan = field(default_factory=lambda: Plan("r"))
    at: int = 0
    log: list[str] = field(default_factory=list)  # ids: of an event, or of a row

    def write(self, origin: str, numbers: frozenset[int]) -> None:
        self.held[origin] = self.held.get(origin, Ranges()) | Ranges.of(numbers)

    def keys(self) -> list[str]:
        return [f"{o}{n}" for o, ranges in self.held.items() for first, last in ranges for n in range(first, last + 1)]

    def copy(self) -> None:
        if not planning.uncopied(self.plan, ["orders"]):
            return
        name, rows = f"s{len(self.snapshots)}", self.keys()
        self.snapshots[name] = (dict(self.held), rows)
        assert not lacking(self.held, self.plan.known("orders")), "all that was planned is in the snapshot"
        self.plan = planning.with_copy(self.plan, snapshot("orders", dict(self.held), len(rows), name), f"of {name} ")

    def begin(self) -> None:
        self.plan = planning.without_vanished(self.plan, self.at, {"orders": self.held}, self.lost)
        assert planning.from_json(planning.as_json(self.plan)) == self.plan

    def take(self, most: int) -> None:
        if "orders" in self.plan.done:
            self.plan = planning.grown(self.plan, ["orders"], {"orders": self.held})
        end = self.plan.batch_end(self.at, most)
        known = set(self.log) if self.at < self.plan.repeats_to else set()
        for first, last in pairwise(self.plan.cuts(self.at, end, 2)):
            for part in self.plan.between(first, last):
                self.log += [each for each in self._read(part) if each not in known]
        self.at = end

    def _read(self, part: Part) -> list[str]:
        if part.chunk is None:
            return [f"{part.origin}{number}" for number in range(part.first, part.last + 1)]
        seen, rows = self.snapshots[part.chunk.snapshot]
        events = {each for each in self.log if "." not in each}
        assert not {e for e in events if int(e[1:]) not in seen.get(e[0], Ranges())}, "a row is older than an event"
        first = 3 * part.chunk.number
        return [f"{part.origin}.{rows[first + number]}" for number in range(part.first, part.last + 1)]


_writes = st.tuples(st.sampled_from("ab"), st.frozensets(st.integers(1, 20), min_size=1, max_size=4))
_steps = st.one_of(_writes, st.sampled_from(["copy", "begin", "lose", "confirm"]), st.integers(1, 9))


@given(st.lists(_steps, max_size=25))
def test_every_row_is_told_once_and_none_is_lost_whatever_snapshots_go(steps: list[object]) -> None:
    """GIVEN writes, snapshots that the peer throws away, restarts and batches of any size THEN in the end each row is
    in the log: by its event or by the copy, once by each; by one of them alone if no snapshot was lost."""
    model = Model()
    for step in (*steps, "begin", "copy", 1000):
        if isinstance(step, tuple):
            model.write(*step)
        elif isinstance(step, int):
            model.take(step)
        elif step == "confirm":
            model.plan = planning.confirmed(model.plan, model.at)
        elif step == "lose":
            model.lost |= set(model.snapshots)
            model.begin()
        elif step == "begin":
            model.begin()
        else:
            model.copy()
    assert len(set(model.log)) == len(model.log)
    assert {each.rpartition(".")[2] for each in model.log} == set(model.keys())
    assert len({each.partition(".")[0] for each in model.log if "." in each}) <= 1, "it is one copy"
    if not model.lost:
        assert len(model.log) == len(model.keys())


def _file(more: str) -> str:
    key = "k" * 43
    where = f"url: 'http://north:8440', peer: north, node: us, cluster: shop-1, key: {key}, tables: [orders, bills]"
    return f"{MINIMAL}sources: {{shop: {{type: replica, {where}{more}}}}}\n"


def test_the_file_says_whether_rows_are_copied(tmp_path: Path) -> None:
    """GIVEN `start` in the file THEN all its tables are copied, or none; anything else is refused, and it is shown."""
    for more, copied in (("", ()), (", start: oldest", ()), (", start: copy", TABLES)):
        settings = read(tmp_path, _file(more)).sources["shop"]
        assert isinstance(settings, ReplicaSourceSettings)
        assert settings.target().copied == copied
        assert settings.listed()["start"] == ("copy" if copied else "oldest")
    assert "start" in str(refused(tmp_path, _file(", start: now")))
