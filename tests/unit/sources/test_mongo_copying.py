"""Where copied documents stand in a stream of MongoDB: behind all that was read, the same at every reading (X6)."""

from __future__ import annotations

import base64
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import bson
import pyarrow as pa
import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import BusyError, SetupError, StaleError
from evermark.event import TAKEN
from evermark.ingest.copying.memory import MemoryCopies
from evermark.secrets import Plain
from evermark.sources.chunk_file import write_batches
from evermark.sources.copies import ChunkState, CopyPlace, Mark
from evermark.sources.mongo import copied
from evermark.sources.mongo.copied import SCHEMA, ReadHorizon, Standing, about, chunk_rows, firsts, with_chunks
from evermark.sources.mongo.copying import DocumentsCopying, _between, _literal, condition_of
from evermark.sources.mongo.events import Row, partition_for
from evermark.sources.mongo.hidden import HiddenFields
from evermark.sources.mongo.positions import COPIED, Position, room_for
from evermark.sources.mongo.target import MongoTarget
from evermark.testing.states import owners

TARGET = MongoTarget(Plain("mongodb://db/"), "shop", ("shop.a", "shop.b"), partitions=2)


def test_room_for_copied_rows() -> None:
    """GIVEN a horizon before, in and behind the time that rows show WHEN placed THEN they stand behind both, behind all
    events of a time, and never run out of ordinals."""
    assert room_for(5, 9, Position(7, 3)) == Position(9, COPIED)
    assert room_for(5, 9, Position(9, 3)) == Position(9, COPIED)
    assert room_for(5, 9, Position(9, COPIED + 4)) == Position(9, COPIED + 4)
    assert room_for(5, 9, Position(12, 2)) == Position(12, COPIED)
    assert room_for(1 << 31, 9, Position(9, COPIED + 1)) == Position(10, COPIED)
    assert [Position(9, each).closed for each in (0, COPIED - 1, COPIED, COPIED + 7)] == [8, 8, 9, 9]
    assert Position(9, COPIED + 7).text(2) < Position(10).text(2)


class Scene:
    """Three chunks of ten rows; `at` is where reading stands, `now` the last cluster time."""

    def __init__(self, folder: Path, partitions: int = 2) -> None:
        self._leases = MemoryLeases(is_gone=lambda holder: True)
        self._take_over = owners(self._leases)
        self.copies, self.clock, self.now = MemoryCopies(self._leases), 0.0, 10
        self.place = CopyPlace(lambda: self.copies, folder, "shop")
        self.partitions = range(partitions)
        self.at = dict.fromkeys(self.partitions, self.text(Position(10)))
        self.own()
        self.copy = self.copies.request("shop", "shop.a", "").id
        self.copies.plan(self.copy, [(None, None)] * 3, self.epoch)

    def own(self) -> None:
        self.epoch = self._take_over(source_lease("shop"))
        self.copies.give_up_all("shop", self.epoch)
        self.horizon = ReadHorizon(self.place, self.partitions, lambda: self.clock)

    def begin(self) -> None:
        for partition, position in self.at.items():
            self.horizon.begin(partition, position)

    def text(self, position: Position) -> str:
        return position.text(len(self.partitions))

    def write(self, number: int, *, rows: int = 10, shown_at: int | None = None) -> tuple[Mark, str]:
        mark = Mark(self.copy, number, self.copies.begin(self.copy, number, self.epoch))

        def choose(horizon: str | None) -> tuple[str, str]:
            assert horizon is not None
            at = room_for(rows, self.now if shown_at is None else shown_at, Position.parse(horizon))
            return self.text(at), self.text(at.after(rows))

        position = self.copies.place(mark, choose, self.epoch)
        assert position is not None
        return mark, position

    def cut(self, partition: int, upto: Position) -> list[str]:
        end, chunks = self.horizon.cut(self.at[partition], self.text(upto), upto.closed)
        self.at[partition] = end
        return [chunk.position for chunk in chunks]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_nothing_is_placed_before_reading_has_begun_everywhere(scene: Scene) -> None:
    """GIVEN a new owner WHEN one partition has not begun THEN no chunk may be placed; then behind the furthest of them,
    though the documents were read from a server that is behind."""
    scene.at[1] = scene.text(Position(30, 2))
    scene.horizon.begin(0, scene.at[0])
    assert not scene.horizon.watch(scene.epoch)
    scene.horizon.begin(1, scene.at[1])
    assert scene.horizon.watch(scene.epoch)
    assert scene.write(0, shown_at=5)[1] == scene.text(Position(30, COPIED))
    assert scene.write(1, shown_at=5)[1] == scene.text(Position(30, COPIED + 10))
    scene.own()
    assert not scene.horizon.watch(scene.epoch)


def test_what_was_read_before_anybody_watched_counts(scene: Scene) -> None:
    """GIVEN reading while nothing was copied WHEN a copy begins THEN its chunks stand behind what was read."""
    scene.begin()
    scene.horizon.watch(None)
    assert scene.cut(0, Position(50, 1)) == []
    assert scene.horizon.watch(scene.epoch)
    assert scene.write(0, shown_at=40)[1] == scene.text(Position(50, COPIED))


def test_a_reader_goes_to_a_chunk_that_is_not_ready_and_no_further(scene: Scene) -> None:
    """GIVEN a place without its chunk WHEN reading comes there THEN it waits for a while, and gives it up; what was
    ready first is read, and what is behind waits with it."""
    scene.begin()
    assert scene.horizon.watch(scene.epoch)
    (first, one), (second, two), (third, three) = (scene.write(number) for number in range(3))
    assert scene.copies.ready(first, one, 10, scene.epoch)
    assert scene.copies.ready(third, three, 10, scene.epoch)
    assert scene.cut(0, Position(12, 1)) == [one] and scene.at[0] == two
    scene.clock = copied.WAIT_S - 1
    assert scene.cut(0, Position(12, 1)) == [] and scene.at[0] == two
    scene.clock = copied.WAIT_S + 1
    assert scene.cut(0, Position(12, 1)) == [], "it is given up now"
    assert not scene.copies.ready(second, two, 10, scene.epoch)
    assert scene.cut(0, Position(12, 1)) == [three] and scene.at[0] == scene.text(Position(12, 1))
    assert scene.cut(1, Position(12, 1)) == [one, three]


def test_chunks_behind_events_that_may_still_come_wait(scene: Scene) -> None:
    """GIVEN a chunk behind the events of a time WHEN more of them may come THEN it waits; WHEN the time is closed THEN
    it comes though nothing else does, and reading goes as far as it, no further."""
    scene.begin()
    assert scene.horizon.watch(scene.epoch)
    mark, position = scene.write(0)
    assert scene.copies.ready(mark, position, 10, scene.epoch)
    assert scene.cut(0, Position(10, 3)) == []
    assert scene.cut(0, Position(10, COPIED)) == [position]
    assert scene.at[0] == scene.text(Position(10, COPIED + 10))
    assert scene.write(1)[1] == scene.at[0], "the next one stands right behind it"


def test_a_stale_owner_says_nothing_of_its_reading(scene: Scene) -> None:
    """GIVEN an owner that was replaced WHEN it reads on while copies are under way THEN it is refused."""
    scene.begin()
    old = scene.horizon
    assert old.watch(scene.epoch)
    scene.own()
    with pytest.raises(StaleError):
        old.cut(scene.at[0], scene.text(Position(99)), 98)


class Interleaving:
    """Readers, tasks and owners, each at any step of theirs."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.took: dict[int, list[tuple[str, str, list[str]]]] = {partition: [] for partition in scene.partitions}
        self.shown_at: dict[str, int] = {}
        self._writing: list[tuple[Mark, str, int]] = []
        self.own()

    def read(self, partition: int, upto: Position) -> None:
        start = self.scene.at[partition]
        chunks = self.scene.cut(partition, max(Position.parse(start), upto))
        assert self.scene.at[partition] >= start
        self.took[partition].append((start, self.scene.at[partition], chunks))

    def read_some(self) -> None:
        upto = Position(self.scene.now, self.rng.choice((0, 2, COPIED)))
        self.read(self.rng.choice(self.scene.partitions), upto)

    def write(self) -> None:
        scene, opened = self.scene, self.scene.copies.chunks(self.scene.copy, [ChunkState.OPEN])
        if opened and scene.horizon.watch(scene.epoch):
            shown_at = scene.now - self.rng.randint(0, 3)
            mark, position = scene.write(opened[0].number, shown_at=shown_at)
            self.shown_at[position] = shown_at
            self._writing.append((mark, position, scene.epoch))

    def finish(self) -> None:
        if self._writing:
            mark, position, epoch = self._writing.pop(self.rng.randrange(len(self._writing)))
            with nullcontext() if epoch == self.scene.epoch else pytest.raises(StaleError):
                self.scene.copies.ready(mark, position, 10, epoch)

    def pass_time(self) -> None:
        self.scene.now += self.rng.randint(0, 2)
        self.scene.clock += self.rng.choice((0.1, copied.WAIT_S))

    def own(self) -> None:
        self.scene.own()
        self.scene.begin()


@pytest.mark.parametrize("seed", range(30))
def test_a_range_that_was_read_has_the_same_chunks_for_ever(tmp_path: Path, seed: int) -> None:
    """GIVEN readers, tasks and owners in any order WHEN ranges are read again THEN they have the chunks they had, each
    chunk comes once in every partition, and stands behind the time that its documents show."""
    rng = random.Random(seed)
    scene = Scene(tmp_path, rng.randint(1, 3))
    run = Interleaving(scene, rng)
    steps = [run.read_some, run.read_some, run.read_some, run.write, run.finish, run.finish, run.pass_time, run.own]
    for _ in range(300):
        rng.choice(steps)()
    run.own()
    for partition in scene.partitions:  # what is ready comes
        run.read(partition, Position(scene.now + 10, COPIED))
    ready = [chunk.position for chunk in scene.copies.placed("shop", "")]
    for found in run.took.values():
        assert [position for *_, chunks in found for position in chunks] == ready
        for start, end, chunks in found:
            assert [each.position for each in scene.horizon.standing(start, end)] == chunks
    assert all(Position.parse(position).closed >= run.shown_at[position] for position in ready)


# rows


def _file(folder: Path, rows: int, hidden: HiddenFields | None = None) -> Standing:
    keys = [str(number) for number in range(rows)]
    of = [partition_for("shop.a", key, 2) for key in keys]
    columns = [keys, ["shop.a"] * rows, keys, ["read"] * rows, ["{}"] * rows, [None] * rows, of]
    arrays = [pa.array(each, field.type) for each, field in zip(columns, SCHEMA, strict=True)]
    schema = SCHEMA.with_metadata(about("shop.a", hidden))
    batches = [
        pa.RecordBatch.from_arrays([each.slice(n, 7) for each in arrays], schema=schema) for n in range(0, rows, 7)
    ]
    write_batches(folder / "chunk", schema, batches)
    return Standing(Position(5, COPIED + 3).text(2), "chunk", rows)


def _event(position: Position) -> Row:
    return Row("e", position.text(2), "shop.a", "k", "update", None, None, "{}", None, None, None)


def test_rows_of_a_chunk_stand_between_events_each_in_its_partition(tmp_path: Path) -> None:
    """GIVEN events on both sides WHEN merged THEN all is in order, and the partitions together have the chunk once."""
    chunk = _file(tmp_path, 20)
    positions = []
    for partition in (0, 1):
        rows = iter([_event(Position(5, 2)), _event(Position(6)), _event(Position(7))])
        found = pa.Table.from_batches(with_chunks(rows, [chunk], partition, tmp_path, TARGET), TAKEN).to_pylist()
        assert [row["position"] for row in found] == sorted(row["position"] for row in found)
        assert [row["op"] for row in found] == ["update", *["read"] * (len(found) - 3), "update", "update"]
        mine = [row for row in found if row["op"] == "read"]
        assert {partition_for("shop.a", row["key"], 2) for row in mine} == {partition}
        assert firsts(chunk, tmp_path)[partition] == mine[0]["position"]
        positions += [row["position"] for row in mine]
    assert sorted(positions) == [Position(5, COPIED + 3 + n).text(2) for n in range(20)]
    assert chunk.end == Position(5, COPIED + 23)


def test_fields_that_are_to_be_hidden_since_are_not_shown(tmp_path: Path) -> None:
    """GIVEN a chunk that waits WHEN more is to be hidden THEN none of it comes; less, or the same, is no trouble."""
    chunk = _file(tmp_path, 3, HiddenFields(("a",), ("b",)))
    for hidden in (HiddenFields(("a",), ("b",)), HiddenFields(), HiddenFields((), ("a", "b"))):
        list(chunk_rows(chunk, 0, tmp_path, replace(TARGET, hidden={"shop.a": hidden})))
    for hidden in (HiddenFields(("b",)), HiddenFields((), ("c",))):
        with pytest.raises(SetupError, match="hidden since"):
            list(chunk_rows(chunk, 0, tmp_path, replace(TARGET, hidden={"shop.a": hidden})))


# what a person types


def test_names_of_collections(tmp_path: Path) -> None:
    """GIVEN names with and without their database WHEN typed THEN they are found; what is not read is refused."""
    found = DocumentsCopying(TARGET, CopyPlace(lambda: MemoryCopies(MemoryLeases(lambda holder: True)), tmp_path))
    assert found.stream("a") == found.stream("shop.a") == "shop.a"
    with pytest.raises(ValueError, match=r"shop\.a, shop\.b"):
        found.stream("c")
    whole = DocumentsCopying(replace(TARGET, database=None, collections=()), found._place)
    assert whole.stream("x.y") == "x.y" and whole.streams == ()
    with pytest.raises(ValueError, match=r"database\.collection"):
        whole.stream("x")


def test_conditions() -> None:
    """GIVEN a filter in Extended JSON WHEN typed THEN it is what it says; code for the server is refused anywhere."""
    assert condition_of('{"_id": {"$gt": {"$oid": "6553f1000000000000000001"}}}')["_id"]["$gt"].binary
    for text in ('{"a": [{"$where": "1"}]}', '{"$expr": {"$function": {}}}', '{"a": {"$code": "f"}}', "[]", "1", "{"):
        with pytest.raises(ValueError, match=r"cannot have|expected|JSON"):
            condition_of(text)


def test_bounds_keep_every_byte_of_a_key() -> None:
    """GIVEN a key WHEN it is a bound THEN the server is given its bytes as they came."""
    raw = bson.encode({"_id": {"a": bson.Int64(1), "b": bson.Decimal128("1.0")}})
    key = (base64.b64encode(raw).decode(),)
    assert bson.decode(_literal(key).raw) == {"$literal": bson.decode(raw)["_id"]}
    assert _between((None, None)) == {} and len(_between((key, key))["$expr"]["$and"]) == 2


def test_a_chunk_cannot_be_read_before_it_is_decided(scene: Scene) -> None:
    """GIVEN a range with a chunk that is not ready WHEN its rows are asked for THEN that is an error."""
    scene.begin()
    assert scene.horizon.watch(scene.epoch)
    scene.write(0)
    with pytest.raises(BusyError):
        scene.horizon.standing(scene.text(Position(0)), scene.text(Position(99)))
