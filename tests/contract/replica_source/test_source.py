"""Reading a replica: every event of every origin once, whatever is cut off, restored, collected or lost."""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from evermark.errors import ConflictError, GapError, SetupError, StaleError, UnreachableError
from evermark.replicas.ranges import Ranges
from evermark.sources.base import Limit
from evermark.sources.replica import source as replica_source
from evermark.testing.servers import PostgresServer
from tests.contract.replica_source.replica_source_scene import Crash, Pipeline, SourceScene, source_scene

FEW = Limit(rows_max=3, wait_s=0.0)


@pytest.fixture
def scene(pg_server: PostgresServer, tmp_path: Path) -> Iterator[SourceScene]:
    with source_scene(tmp_path, pg_server) as made:
        yield made


def _everything(scene: SourceScene) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(scene.files["north"])) as connection:
        return sorted(connection.execute('select origin_node_id, origin_seq from "orders_Events"').fetchall())


def test_events_come_as_events_of_the_log(scene: SourceScene) -> None:
    """GIVEN a row that is made, changed and deleted THEN the log has its operations, values, origin and numbers."""
    scene.write("north", "insert into orders values (9007199254740993, 'a', 0.1)", "update orders set what = null")
    scene.write("north", "delete from orders")
    pipe = Pipeline(scene)
    pipe.drain()
    assert [row["op"] for row in pipe.rows] == ["insert", "update", "delete"]
    assert [row["origin_seq"] for row in pipe.rows] == [1, 2, 3]
    assert {(row["stream"], row["key"]) for row in pipe.rows} == {("orders", "9007199254740993")}
    assert {row["origin"].partition(".")[0] for row in pipe.rows} == {"north"}
    payloads = [None if row["payload"] is None else json.loads(row["payload"]) for row in pipe.rows]
    assert payloads[:2] == [
        {"id": "9007199254740993", "what": "a", "amount": 0.1},
        {"id": "9007199254740993", "what": None, "amount": 0.1},
    ]
    assert payloads[2] is None


def test_r5_events_of_origins_that_appear_while_it_reads_come_once_whatever_is_cut_off(scene: SourceScene) -> None:
    """GIVEN a reader that is killed at every step in turn, WHEN events of another origin arrive between those of the
    first THEN each is in the log once, and each origin's are in their order."""
    pipe = Pipeline(scene)
    for turn, cut in enumerate(("planned", "read", "logged", "confirmed") * 2):
        scene.insert("north", 10 * turn + 1, 4)
        scene.insert("south", 1000 + 10 * turn, 5)
        if turn % 2:
            scene.meet()
        with pytest.raises(Crash):
            pipe.step(FEW, cut)
        pipe.start()
    pipe.drain(FEW)
    assert sorted(pipe.taken()) == _everything(scene)
    for origin in {origin for origin, _ in pipe.taken()}:
        numbers = [number for each, number in pipe.taken() if each == origin]
        assert numbers == sorted(numbers)
    assert len({row["event_id"] for row in pipe.rows}) == len(pipe.rows) == 72
    positions = [row["position"] for row in pipe.rows]
    assert positions == sorted(set(positions))


def test_a_lost_plan_repeats_nothing(scene: SourceScene) -> None:
    """GIVEN a log with events, WHEN State has lost the plan THEN all is planned anew, and only what is new is taken."""
    scene.insert("north", 1, 7)
    pipe = Pipeline(scene)
    pipe.drain(FEW)
    scene.forget_plan()
    scene.insert("north", 20, 2)
    pipe.start()
    pipe.drain(FEW)
    assert sorted(pipe.taken()) == _everything(scene)


def test_r9_nothing_is_collected_before_the_log_has_it(scene: SourceScene) -> None:
    """GIVEN a reader that is behind THEN the peer may collect what it confirmed, and not one event more."""
    scene.insert("north", 1, 6)
    scene.meet()
    pipe = Pipeline(scene)
    pipe.step(FEW)
    pipe.source.upkeep()
    with scene.nodes["north"].replica() as north:
        origin = north.store.identity()[0]
        assert north.upkeep.floors("orders").by_origin[origin] == 3
    pipe.drain(FEW)
    pipe.source.upkeep()
    with scene.nodes["north"].replica() as north:
        assert north.upkeep.floors("orders").by_origin[origin] == 6
        assert north.upkeep.floors("orders").clock > 0, "tombstones do not wait for a reader that makes no events"


def test_r10_rows_without_events_are_a_gap_and_a_snapshot_repairs_it(scene: SourceScene) -> None:
    """GIVEN a reader, WHEN its peer takes rows by a snapshot, without their events THEN that is a gap, never skipped; a
    repair gives all rows as they are, and reading goes on with the events after them."""
    pipe = _with_gap(scene)
    with pytest.raises(GapError, match="has no events 1 to 5 of west"):
        pipe.step()
    with pytest.raises(GapError):
        scene.source().check({0: pipe.end})
    repair = pipe.source.repair(0)
    gap = repair.begin(lambda: False, pipe.end)
    rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
    assert sorted((row["op"], row["stream"], row["key"]) for row in rows) == [
        ("read", "orders", "1"),
        ("read", "orders", "2"),
    ]
    assert pipe.end <= gap.positions(0, 1)[0].as_py() < gap.position
    repair.finish(gap.position)
    pipe.end = gap.position
    pipe.start()
    scene.insert("north", 3, 2)
    pipe.drain()
    assert [row["key"] for row in pipe.rows] == ["1", "2", "3", "4"]


def _with_gap(scene: SourceScene) -> Pipeline:
    """A reader whose peer has rows without their events, as if it had taken these with a snapshot."""
    scene.insert("north", 1, 2)
    pipe = Pipeline(scene)
    pipe.drain()
    with scene.nodes["north"].replica() as north:
        north.store._raise_floors("orders", {"west.00000000000100000000": 5})  # type: ignore[attr-defined]
        north.store._save_held("orders", {"west.00000000000100000000": Ranges.through(5)})  # type: ignore[attr-defined]
    return pipe


def test_a_repair_that_was_cut_off_is_finished_by_the_next_owner(scene: SourceScene) -> None:
    """GIVEN a gap that was closed, WHEN its owner ends before reading may go on THEN the next one finishes the repair,
    also when it is cut off there, and reading goes on behind the snapshot; the earlier owner can do nothing more."""
    pipe = _with_gap(scene)
    first = pipe.source.repair(0)
    gap = first.begin(lambda: False, pipe.end)
    for epoch in (2, 3):
        source = scene.source()
        source.owned(epoch)
        source.repair(0).finish(gap.position)
    with pytest.raises(StaleError):
        first.finish(gap.position)
    pipe.end, pipe.epoch = gap.position, 3
    pipe.start()
    scene.insert("north", 3, 2)
    pipe.drain()
    assert [row["key"] for row in pipe.rows] == ["1", "2", "3", "4"]


def test_a_second_try_at_a_repair_gives_its_rows_positions_behind_those_of_the_first(scene: SourceScene) -> None:
    """GIVEN a try that may have logged rows, WHEN the repair begins again THEN its rows stand behind them, whoever asks
    for it; and what the first meant to go on with is a gap."""
    pipe = _with_gap(scene)
    first = pipe.source.repair(0).begin(lambda: False, pipe.end)
    second = pipe.source.repair(0).begin(lambda: False)
    assert first.position <= second.positions(0, 1)[0].as_py() < second.position
    with pytest.raises(GapError, match="nobody knows what follows the snapshot"):
        pipe.source.repair(0).finish(first.position)
    pipe.source.repair(0).finish(second.position)


def test_an_owner_that_was_frozen_takes_nothing_from_its_successor(scene: SourceScene) -> None:
    """GIVEN an owner that lost its lease without knowing, WHEN its successor has read on THEN whatever it does next is
    refused at once, and the successor reads every event."""
    scene.insert("north", 1, 6)
    frozen = Pipeline(scene)
    frozen.step(FEW)
    pipe = Pipeline(scene)
    pipe.epoch, pipe.end, pipe.rows = 1, frozen.end, list(frozen.rows)
    pipe.start()
    pipe.step(FEW)
    for late in (
        lambda: frozen.source.latest({0: frozen.end}, FEW),
        lambda: frozen.source.slices(0, frozen.end, pipe.end),
        lambda: frozen.source.confirm(0, pipe.end),
        lambda: frozen.source.begin(0, frozen.end),
        lambda: frozen.source.begin(0, frozen.source.earliest(0)),
    ):
        with pytest.raises(StaleError):
            late()
    scene.insert("north", 7, 2)
    pipe.drain(FEW)
    assert sorted(pipe.taken()) == _everything(scene)


def test_a_place_that_no_plan_leads_to_is_refused_at_once(scene: SourceScene) -> None:
    """GIVEN a reader, WHEN it asks for what follows a place before its plan, or its plan is gone THEN that is a
    conflict, and nothing is planned."""
    scene.insert("north", 1, 6)
    pipe = Pipeline(scene)
    pipe.step(FEW)
    with pytest.raises(ConflictError, match="no plan leads from 0"):
        pipe.source.latest({0: pipe.source.earliest(0)}, FEW)
    scene.forget_plan()
    with pytest.raises(ConflictError, match="the plan that led to 3 is gone"):
        pipe.source.latest({0: pipe.end}, FEW)
    assert pipe.source.plans.load() is None


def test_r10_a_lost_plan_hides_nothing_that_was_collected(scene: SourceScene) -> None:
    """GIVEN a log with some events of a peer, and a lost plan, WHEN the peer has collected more than these THEN that is
    a gap, and its repair has all rows."""
    scene.insert("north", 1, 3)
    pipe = Pipeline(scene)
    pipe.drain()
    scene.insert("north", 4, 6)
    with scene.nodes["north"].replica() as north:
        north.store._raise_floors("orders", {north.store.identity()[0]: 9})  # type: ignore[attr-defined]
    scene.forget_plan()
    with pytest.raises(GapError, match="has no events 1 to 9"):
        pipe.start()
    gap = pipe.source.repair(0).begin(lambda: False, pipe.end)
    assert sum(batch.num_rows for piece in gap.pieces for batch in gap.read(piece)) == 9


@pytest.mark.parametrize("at", [0, 2])
def test_a_checkpoint_that_is_set_back_repeats_nothing_and_not_for_ever(scene: SourceScene, at: int) -> None:
    """GIVEN a log with events of two origins, WHEN it is read again from an earlier place THEN nothing is logged twice;
    once all that the peer had is passed, ids are not compared any more."""
    scene.insert("south", 100, 3)
    scene.meet()
    pipe = Pipeline(scene)
    pipe.drain(FEW)
    scene.insert("north", 1, 3)
    pipe.drain(FEW)
    pipe.end = f"{at:020d}"
    pipe.start()
    assert pipe.source.may_repeat_from(0, pipe.end) == pipe.source.earliest(0)
    pipe.drain(FEW)
    assert sorted(pipe.taken()) == _everything(scene)
    assert pipe.source.may_repeat_from(0, pipe.end) == pipe.end


def test_events_that_a_restored_peer_lost_are_planned_anew(scene: SourceScene, tmp_path: Path) -> None:
    """GIVEN events that were planned and not read, WHEN the peer lost them in a restore THEN what it has is read."""
    scene.insert("north", 1, 2)
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(scene.files["north"])) as there, closing(sqlite3.connect(backup)) as copy:
        there.backup(copy)
    scene.insert("north", 3, 2)
    pipe = Pipeline(scene)
    with pytest.raises(Crash):
        pipe.step(cut="planned")
    with closing(sqlite3.connect(backup)) as copy, closing(sqlite3.connect(scene.files["north"])) as there:
        copy.backup(there)
    with scene.nodes["north"].replica():
        pass  # it finds out that it was restored
    scene.insert("north", 10, 1)
    pipe.drain()
    assert sorted(row["key"] for row in pipe.rows) == ["1", "10", "2"]


def test_looking_does_not_wait_for_a_peer_that_hangs(scene: SourceScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a peer that takes a connection and never answers THEN who only looks is told so within seconds."""
    monkeypatch.setattr(replica_source, "_GLANCE_S", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as hanging:
        source = scene.source()
        source.target = replace(scene.target, url=f"http://127.0.0.1:{hanging.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            source.untaken({0: source.earliest(0)})
        assert time.monotonic() - began < 30


def test_a_table_that_the_peer_does_not_replicate_is_named(scene: SourceScene) -> None:
    """GIVEN a file that names another table THEN the source says which, and what to run there."""
    source = scene.source()
    source.target = replace(scene.target, tables=("orders", "bills"))
    with pytest.raises(SetupError, match="north does not replicate bills") as raised:
        source.check({})
    assert "evermark replica init --table bills" in raised.value.hint
