"""Rows that a replica has before it is read: each once, then its changes, whatever is cut off, thrown away or lost."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pytest

from evermark.errors import BusyError, GapError
from evermark.replicas import node as replica_node
from evermark.replicas.node import now_ms
from evermark.replicas.snapshots import Snapshots
from evermark.sources.base import Limit
from evermark.sources.replica import source as replica_source
from evermark.testing.servers import PostgresServer, fresh_database
from tests.contract.replica_source.replica_source_scene import TABLE, Crash, Pipeline, SourceScene, source_scene

TWO = Limit(rows_max=2, wait_s=0.0)  # less than a chunk
FEW = Limit(rows_max=4, wait_s=0.0)
BEFORE = tuple(f"insert into orders values ({number}, 'from before', 0.5)" for number in range(1, 9))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_node, "Snapshots", partial(Snapshots, chunk_rows=3))


@pytest.fixture(params=["sqlite", "postgres"])
def scene(request: pytest.FixtureRequest, pg_server: PostgresServer, tmp_path: Path) -> Iterator[SourceScene]:
    """Rows from before it was replicated, and some with events."""
    with fresh_database(pg_server) as dsn:
        north = dsn if request.param == "postgres" else None
        if north is not None:
            with psycopg.connect(north, autocommit=True) as connection:
                connection.execute(TABLE)
        with source_scene(tmp_path, pg_server, north, BEFORE) as made:
            made.target = replace(made.target, copies=True)
            made.insert("north", 20, 4)
            made.write("north", "delete from orders where id = 3", "update orders set what = 'new' where id = 4")
            yield made


def reads(pipe: Pipeline) -> list[str]:
    return sorted(row["key"] for row in pipe.rows if row["op"] == "read")


def requires_exact(scene: SourceScene, pipe: Pipeline) -> None:
    assert pipe.implied() == scene.table()
    ids = [row["event_id"] for row in pipe.rows]
    assert len(set(ids)) == len(ids)
    assert len(set(reads(pipe))) == len(reads(pipe)), "a row is read once"
    positions = [row["position"] for row in pipe.rows]
    assert positions == sorted(set(positions))


def throw_away(scene: SourceScene) -> None:
    """As a peer does when others have asked for snapshots since."""
    for path in scene.nodes["north"].folder.snapshots.glob("orders-*"):
        shutil.rmtree(path)


def test_r13_rows_that_are_there_come_once_whatever_is_cut_off_and_then_their_changes(scene: SourceScene) -> None:
    """GIVEN rows from before there were events, and others WHEN they are copied by a reader that is killed at every
    step in turn, while rows are made, changed and deleted THEN each row that was there is read once, each later change
    is an event, and the newest of each key is the table."""
    there = scene.table()
    pipe = Pipeline(scene)
    for turn, cut in enumerate(("planned", "read", "logged", "confirmed") * 2):
        with pytest.raises(Crash):
            pipe.step(TWO, cut)
        if not turn:
            assert [part.chunk is not None for part in pipe.source.plans.load().parts] == [True] * 4  # type: ignore[union-attr]
        scene.insert("north", 100 + turn, 1)
        scene.write("north", f"update orders set amount = amount + 1 where id = {turn + 4}")
        pipe.start()
    scene.write("north", "delete from orders where id = 5")
    pipe.drain(TWO)
    assert reads(pipe) == sorted(there)
    requires_exact(scene, pipe)
    assert [row["op"] for row in pipe.rows].count("insert") == 8, "rows that are read are not told as made, too"
    copied = next(row for row in pipe.rows if row["op"] == "read" and row["key"] == "4")
    assert (copied["origin"].partition(".")[0], copied["payload"]) == ("north", '{"amount":0.5,"id":4,"what":"new"}')
    assert pipe.source.condition().gauges == {"copy_rows_left": 0.0}
    assert pipe.source.untaken({0: pipe.end}) == {}


def test_r13_rows_whose_events_were_collected_come_once(scene: SourceScene) -> None:
    """GIVEN a peer that has collected its events, and has rows of another node's events, which it collected, too THEN
    all rows are copied, and nothing is a gap."""
    scene.insert("south", 1000, 5)
    scene.meet()
    with scene.nodes["north"].replica() as north:
        floors = {origin: ranges.highest for origin, ranges in north.store.held("orders").items()}
        assert len(floors) == 2
        north.store._raise_floors("orders", floors)  # type: ignore[attr-defined]
    scene.write("north", 'delete from "orders_Events"')
    pipe = Pipeline(scene)
    pipe.drain(FEW)
    assert reads(pipe) == sorted(scene.table())
    requires_exact(scene, pipe)


def test_a_snapshot_that_goes_while_it_is_read_costs_no_row_and_doubles_none(scene: SourceScene) -> None:
    """GIVEN a copy that was read in part WHEN the peer throws its snapshot away, twice, and rows change and go
    THEN the rest comes of another snapshot, rows that the log has are not read again, and the log is exact."""
    pipe = Pipeline(scene)
    for turn in range(2):
        had = reads(pipe)
        while reads(pipe) == had:
            pipe.step(FEW)
        throw_away(scene)
        gone = (1, 20)[turn]  # one that was read, and one that was not
        assert (str(gone) in reads(pipe)) != bool(turn)
        scene.insert("north", 200 + turn, 1)
        scene.write("north", "update orders set what = 'later'", f"delete from orders where id = {gone}")
        with pytest.raises(BusyError, match="no more"):
            pipe.step(FEW)
        pipe.start()
    pipe.drain(FEW)
    requires_exact(scene, pipe)
    assert {"delete", "insert", "update", "read"} == {row["op"] for row in pipe.rows}
    copies = {row["event_id"].partition(".")[0] for row in pipe.rows if row["op"] == "read"}
    assert len(copies) == 1


def test_a_spoilt_chunk_is_no_end(scene: SourceScene) -> None:
    """GIVEN a chunk that was damaged at the peer, behind others that are sound WHEN they are to be read together THEN
    rows come of another snapshot, though the peer would give a young one again to others."""
    pipe = Pipeline(scene)
    pipe.step(FEW)
    for path in scene.nodes["north"].folder.snapshots.glob("orders-*/000002.parquet"):
        path.write_bytes(path.read_bytes()[:-1])
    scene.insert("north", 300, 1)
    pipe.drain()
    requires_exact(scene, pipe)


def test_a_table_that_is_read_already_is_copied_when_the_file_says_so(scene: SourceScene) -> None:
    """GIVEN a source that began with events WHEN its file says `start: copy` from then on THEN all rows come, behind
    the events that they have seen."""
    scene.target = replace(scene.target, copies=False)
    pipe = Pipeline(scene)
    pipe.drain(FEW)
    assert reads(pipe) == []
    before = len(pipe.rows)
    assert not pipe.source.untaken({0: pipe.end})
    scene.target = replace(scene.target, copies=True)
    pipe.start()
    assert pipe.source.untaken({0: pipe.end}), "its rows"
    scene.insert("north", 400, 2)
    pipe.drain(FEW)
    assert reads(pipe) == sorted(scene.table())
    assert [row["op"] for row in pipe.rows[before : before + 2]] == ["insert", "insert"]
    requires_exact(scene, pipe)
    pipe.start()
    pipe.drain(FEW)
    assert len(reads(pipe)) == len(scene.table()), "a table is copied once"


def test_r10_a_plan_that_is_lost_in_a_copy_is_a_gap_and_its_repair_has_the_rest(scene: SourceScene) -> None:
    """GIVEN a copy that was read in part WHEN State has lost the plan THEN rows without events are a gap, as ever; the
    repair has all rows, and nothing is copied again behind it."""
    pipe = Pipeline(scene)
    pipe.step(FEW)
    scene.forget_plan()
    with pytest.raises(GapError, match="only the rows of orders"):
        pipe.start()
    repair = pipe.source.repair(0)
    gap = repair.begin(lambda: False, pipe.end)
    rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
    assert sorted(row["key"] for row in rows) == sorted(scene.table())
    repair.finish(gap.position)
    pipe.end = gap.position
    pipe.start()
    scene.insert("north", 500, 1)
    before = reads(pipe)
    pipe.drain(FEW)
    assert reads(pipe) == before
    assert pipe.rows[-1]["key"] == "500"


def test_a_peer_that_cannot_make_a_snapshot_now_is_asked_again(
    scene: SourceScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a peer that makes a snapshot for another WHEN rows are to be copied THEN reading waits without an error,
    and says that there is something to take, and which copy waits; then the rows come."""
    monkeypatch.setattr(replica_source, "_COPY_AGAIN_S", 0.0)
    folder = scene.nodes["north"].folder.snapshots
    folder.mkdir(parents=True, exist_ok=True)
    pipe = Pipeline(scene)
    with open(folder / ".making.orders", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not pipe.step(FEW)
        assert pipe.source.untaken({0: pipe.end})
        assert not pipe.step(FEW)
        tries, error = pipe.source.condition().failing_copies["orders"]
        assert tries >= 2 and "snapshot" in error
    pipe.drain(FEW)
    assert pipe.source.condition().failing_copies == {}
    assert reads(pipe) == sorted(scene.table())


def with_bills(scene: SourceScene) -> None:
    """Another table, of rows from before."""
    rows = (f"insert into bills values ({number})" for number in range(9001, 9006))
    scene.write("north", "create table bills (id bigint primary key)", *rows)
    with scene.nodes["north"].replica() as north:
        north.store.install("bills", None, now_ms())
    scene.target = replace(scene.target, tables=("bills", "orders"))


def snapshots_of(scene: SourceScene) -> set[str]:
    return {path.name.partition("-")[0] for path in scene.nodes["north"].folder.snapshots.glob("[!.]*")}


def test_tables_are_copied_one_after_another(scene: SourceScene) -> None:
    """GIVEN two tables WHEN they are copied THEN the peer makes the snapshot of the second when the first was read, and
    each row of both is read once."""
    with_bills(scene)
    pipe = Pipeline(scene)
    assert pipe.step(FEW)
    assert snapshots_of(scene) == {"bills"}
    scene.insert("north", 700, 1)
    pipe.drain(FEW)
    assert snapshots_of(scene) == {"bills", "orders"}
    assert reads(pipe) == sorted([*scene.table(), *map(str, range(9001, 9006))])


def test_a_table_that_is_named_later_is_copied_then(scene: SourceScene) -> None:
    """GIVEN a source that has copied its table WHEN the file names another one THEN that is copied, and no other."""
    pipe = Pipeline(scene)
    pipe.drain(FEW)
    before = reads(pipe)
    with_bills(scene)
    scene.insert("north", 800, 1)
    pipe.start()
    pipe.drain(FEW)
    assert reads(pipe) == sorted([*before, *map(str, range(9001, 9006))])
    assert "800" in pipe.implied()
