"""Documents from before the stream, copied beside it: exactly, the same at each reading, in all partitions (X6)."""

from __future__ import annotations

import json
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from bson import Binary, Code, Int64, MaxKey, MinKey, ObjectId, Timestamp
from bson.decimal128 import Decimal128
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from evermark.errors import BusyError, SetupError, StaleError
from evermark.sources.base import Limit
from evermark.sources.copies import ChunkState
from evermark.sources.mongo import copied, copying
from evermark.sources.mongo.hidden import HiddenFields
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.source import MongoChanges
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.until import until
from tests.contract.mongo.copy_scene import copier, copy_scene, is_done

ODD_IDS: tuple[Any, ...] = (
    MinKey(), None, float("nan"), float("-inf"), -5, 0, Int64(2**60), 2.5, Decimal128("7.1"), "a", "B", "5", "",
    {"a": 1}, {"a": {"b": Int64(2**61)}}, Binary(b"xx"), ObjectId(), True, False, datetime(2020, 1, 1, tzinfo=UTC),
    Timestamp(1, 1), Code("x"), MaxKey(),
)  # fmt: skip


@contextmanager
def without_pulse(client: MongoClient[Any]) -> Iterator[None]:
    client.admin.command("setParameter", 1, writePeriodicNoops=False)
    try:
        yield
    finally:
        client.admin.command("setParameter", 1, writePeriodicNoops=True)


@pytest.mark.parametrize("fed", [True, False])
@pytest.mark.parametrize("partitions", [1, 3])
def test_documents_from_before_come_beside_the_stream(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, partitions: int, *, fed: bool
) -> None:
    """GIVEN documents from before WHEN they are copied, and nothing else happens THEN they come as `read`, at once,
    each id once, the same at every reading; a change comes behind them."""
    stream = f"{mongo_database}.orders"
    with (
        mongo_server.client() as client,
        copy_scene(mongo_server, mongo_database, tmp_path, partitions=partitions) as at,
    ):
        orders = client[mongo_database]["orders"]
        orders.insert_many([{"_id": number, "n": number} for number in range(45_000)])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        since = dict(at.at)
        works = at.ask()
        assert len(works) == 3
        with without_pulse(client):  # an idle server's own writes, every ten seconds, are not what moves reading on
            assert at.write(works) == 3
            at.take_all(lambda: at.rows() >= 45_000, fed=fed)
        orders.update_one({"_id": 7}, {"$set": {"n": -1}})
        at.take_all(lambda: at.rows() > 45_000, fed=fed)
        assert len(at.reads()) == 45_000
        assert at.implied(stream) == at.documents(stream)
        at.check(since)
        row = at.reads()[0]
        assert (row["tx"], row["before"], row["flags"]) == (None, None, None)
        assert abs((row["event_time"] - datetime.now(UTC)).total_seconds()) < 60
        ends = {number: at.copying.compare(c.position, min(at.at.values())) for number, c in _ready(at).items()}
        assert ends == {0: True, 1: True, 2: True}


def test_keys_of_all_types_are_cut_and_copied_once(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an `_id` of every type WHEN the collection is cut into chunks of two THEN each document comes once."""
    monkeypatch.setattr(copying, "rows_of_chunk", lambda *_: 2)
    stream = f"{mongo_database}.orders"
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path, partitions=2) as at:
        client[mongo_database]["orders"].insert_many([{"_id": each} for each in ODD_IDS])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        works = at.ask()
        assert len(works) == (len(ODD_IDS) + 1) // 2
        client[mongo_database]["orders"].delete_one({"_id": MaxKey()})
        assert at.write(works) == len(works)
        at.take_all(lambda: len(at.reads()) >= len(ODD_IDS) - 1)
        assert len(at.reads()) == len(ODD_IDS) - 1
        assert at.implied(stream) == at.documents(stream)
        found = {row["key"] for row in at.reads()}
        assert len(found) == len(ODD_IDS) - 1
        assert len(_index_keys(client, stream, works)) == len(works)


def _index_keys(client: Any, stream: str, works: Any) -> list[int]:
    """Keys of the index that the server looks at for each chunk: a few, however many there are."""
    database, _, collection = stream.partition(".")
    found = []
    for work in works:
        find = {"find": collection, "filter": copying._between(work.bounds), "hint": {"_id": 1}}
        said = client[database].command({"explain": find, "verbosity": "executionStats"})
        found.append(said["executionStats"]["totalKeysExamined"])
        assert found[-1] <= 4, work.bounds
    return found


def test_a_cluster_time_is_closed_only_when_the_server_has_looked_through_it(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN streams that begin before, at and after the last cluster time WHEN no event comes THEN only what the server
    was seen to pass is closed: never the time where the stream begins, which may be one to come."""
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path) as at:
        client[mongo_database]["elsewhere"].insert_one({})
        said = client.admin.command("hello")["operationTime"]
        now = said.time << 32 | said.inc
        for start, closed in ((Position(now, 1), now), (Position(now), now - 1), (Position(now + 1), now)):
            with at.source._changes(start) as changes:
                changes.next()
                assert changes.whole_to.closed == closed, start


@pytest.mark.parametrize("after", ["changes", "lookup"])
def test_documents_that_change_between_snapshot_and_place_are_as_of_the_place(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, after: str
) -> None:
    """GIVEN changes of all kinds between a chunk's snapshot and its place, without images WHEN it is ready THEN no
    document is older than an event in front of it, none that is gone is told, and every one is whole."""
    stream = f"{mongo_database}.orders"
    with (
        mongo_server.client() as client,
        copy_scene(mongo_server, mongo_database, tmp_path, partitions=2, after=after) as at,
    ):
        orders = client[mongo_database]["orders"]
        orders.insert_many([{"_id": number, "n": 0, "big": "x" * 100} for number in range(8)])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        (work,) = at.ask()
        writer = at.writer()

        def meanwhile() -> None:
            orders.update_one({"_id": 1}, {"$set": {"n": 1}})  # only the change is told
            orders.delete_one({"_id": 2})
            orders.replace_one({"_id": 3}, {"n": 3})
            orders.delete_one({"_id": 4})
            orders.insert_one({"_id": 4, "again": True})
            orders.insert_one({"_id": 9, "new": True})
            orders.update_one({"_id": 5}, {"$set": {"n": 5}})
            orders.delete_one({"_id": 5})
            at.take_all(lambda: at.rows() >= 8)
            orders.update_one({"_id": 6}, {"$set": {"n": 6}})  # behind the place: the stream tells it

        writer._place = _before(writer._place, meanwhile)  # type: ignore[method-assign]
        assert writer.write(work)
        at.take_all(lambda: at.rows() >= 9 + 6)
        assert at.implied(stream) == at.documents(stream)
        reads = {row["key"]: json.loads(row["payload"]) for row in at.reads()}
        assert set(reads) == {"0", "1", "3", "4", "6", "7"}
        assert reads["1"]["n"] == 1 and reads["1"]["big"] and reads["3"] == {"_id": 3, "n": 3}
        assert reads["6"]["n"] == 0


def test_a_reader_waits_for_a_chunk_that_has_its_place_and_gives_it_up(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a task that is slow behind its place WHEN reading comes there THEN it goes as far as the place and no
    further, until it gives the attempt up; nothing stands there for ever, and the chunk is written again."""
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path) as at:
        orders = client[mongo_database]["orders"]
        orders.insert_many([{"_id": number} for number in range(5)])
        at.at = {0: at.source.earliest(0)}
        at.own()
        since = dict(at.at)
        (work,) = at.ask()
        writer = at.writer()

        def slow() -> None:
            orders.insert_one({"_id": "later"})
            until(lambda: at.take(fed=True) or at.source._horizon._waits, "reading has come to the place")
            assert at.rows() == 0, "what comes later stands behind the place"
            monkeypatch.setattr(copied, "WAIT_S", 0.0)
            at.source._horizon._waits.clear()  # type: ignore[union-attr]
            at.take_all(lambda: at.rows() >= 1)

        writer._changed = _before(writer._changed, slow)  # type: ignore[method-assign]
        assert not writer.write(work)
        chunk = at.copies.chunk(work.copy, work.number)
        assert chunk is not None and chunk.state is ChunkState.OPEN
        assert list(at.place.folder.iterdir()) == []
        monkeypatch.undo()
        assert at.write([work]) == 1
        at.take_all(lambda: len(at.reads()) >= 5)
        assert [row["op"] for row in at.log[0]] == ["insert"] + ["read"] * 5  # the stream told the other one
        at.check(since)


def test_chunks_of_a_dead_owner_are_found_by_the_next(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN a chunk ready and one begun when their owner dies WHEN another begins THEN the ready one comes where it
    stands, before its copier has looked, and the other is written again; the old owner's task is refused."""
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path, partitions=2) as at:
        client[mongo_database]["orders"].insert_many([{"_id": number} for number in range(30_000)])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        since = dict(at.at)
        first, second = at.ask()
        assert at.write([first]) == 1
        old = at.writer()
        old._changed = _before(old._changed, at.own)  # type: ignore[method-assign]
        with pytest.raises(StaleError):
            old.write(second)
        client[mongo_database]["orders"].insert_one({"_id": "later"})
        at.take_all(lambda: len(at.reads()) >= 20_000 and at.rows() > 20_000)
        assert at.rows() == 20_001
        assert at.copying.watch(at.epoch)
        assert at.write([second]) == 1
        at.take_all(lambda: len(at.reads()) >= 30_000)
        assert at.implied(f"{mongo_database}.orders") == at.documents(f"{mongo_database}.orders")
        at.check(since)


def test_chunks_that_stand_before_the_place_where_reading_begins_anew_are_written_again(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN chunks that are ready and not read WHEN the checkpoint was reset, and the next owner begins with now, since
    the log has nothing, THEN they do not count as told: every document comes."""
    stream = f"{mongo_database}.orders"
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path, partitions=2) as at:
        client[mongo_database]["orders"].insert_many([{"_id": number} for number in range(30)])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        works = at.ask()
        assert at.write(works) == 1
        client[mongo_database]["elsewhere"].insert_one({})
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        with copier(at):
            at.take_all(lambda: is_done(at))
        assert at.implied(stream) == at.documents(stream)
        # The copier makes the copy that the file wants, too.
        assert sum(row["event_id"].startswith(f"copy{works[0].copy}.") for row in at.reads()) == 30


def test_hidden_fields_conditions_and_what_cannot_be_decoded(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path
) -> None:
    """GIVEN fields to hide, a condition and a text that is not UTF-8 WHEN copied THEN the copy shows as little as the
    stream does; WHEN more is to be hidden THEN rows that wait are not shown."""
    stream = f"{mongo_database}.orders"
    hidden = {stream: HiddenFields(("password",), ("mail",))}
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path, hidden=hidden) as at:
        orders = client[mongo_database]["orders"]
        orders.insert_many([{"_id": n, "password": "p", "mail": "m", "n": n} for n in range(6)])
        elements = b"\x10_id\x00\x09\x00\x00\x00" + b"\x02n\x00\x03\x00\x00\x00\xff\xfe\x00" + b"\x00"
        raw = RawBSONDocument(struct.pack("<i", len(elements) + 4) + elements)
        client[mongo_database].command({"insert": "orders", "documents": [raw]})
        at.at = {0: at.source.earliest(0)}
        at.own()
        works = at.ask(condition='{"$or": [{"n": {"$gte": 3}}, {"_id": 9}]}')
        assert at.write(works) == 1
        later = replace(at.target, hidden={stream: HiddenFields(("password", "n"), ("mail",))})
        more = MongoChanges(later, at.place)
        (piece,) = more.slices(0, at.at[0], more.latest(at.at, Limit(wait_s=0.1))[0])
        with pytest.raises(SetupError, match="hidden since"):
            list(more.read(piece))
        more.close()
        at.take_all(lambda: at.rows() >= 4)
        payloads = {row["key"]: json.loads(row["payload"]) for row in at.reads()}
        assert set(payloads) == {"3", "4", "5"}
        assert all("password" not in each and each["mail"].startswith("sha256:") for each in payloads.values())
        (poison,) = (row for row in at.log[0] if row["op"] == "poison")
        assert (poison["key"], poison["bytes"]) == ("9", None) and "decoded" in poison["payload"]


@pytest.mark.parametrize("text", ['{"$where": "1"}', '{"a": {"$function": {}}}', '[1]', "nope", '{"a": {"$code": "x"}}',
                                  '{"$expr": {"$and": [{"$accumulator": {}}]}}'])  # fmt: skip
def test_conditions_that_are_refused(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, text: str
) -> None:
    """GIVEN JavaScript, or no filter at all WHEN asked for THEN it is refused."""
    with (
        copy_scene(mongo_server, mongo_database, tmp_path) as at,
        pytest.raises(ValueError, match=r"JSON|cannot|expected"),
    ):
        at.copying.condition(text)


@pytest.mark.parametrize("how", ["drop", "rename"])
def test_a_collection_that_goes_while_it_is_copied(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, how: str
) -> None:
    """GIVEN chunks ready, and one being written WHEN the collection is dropped or renamed, and made anew THEN the log
    implies what is there; the attempt in between is not taken."""
    stream = f"{mongo_database}.orders"
    with mongo_server.client() as client, copy_scene(mongo_server, mongo_database, tmp_path) as at:
        orders = client[mongo_database]["orders"]
        orders.insert_many([{"_id": number} for number in range(25_000)])
        at.at = {0: at.source.earliest(0)}
        at.own()
        first, second = at.ask()
        assert at.write([first]) == 1
        writer = at.writer()

        def meanwhile() -> None:
            orders.drop() if how == "drop" else orders.rename("elsewhere")
            orders.insert_one({"_id": 24_000, "again": True})
            at.take_all(lambda: any(row["op"] == "insert" for row in at.log.get(0, ())))

        writer._place = _before(writer._place, meanwhile)  # type: ignore[method-assign]
        with pytest.raises(BusyError, match="dropped, renamed"):
            writer.write(second)
        at.copies.give_up_all("shop", at.epoch)
        assert at.write([second]) == 1
        at.take_all(lambda: any(row["op"] == "read" and row["key"] == "24000" for row in at.log[0]))
        assert at.implied(stream) == at.documents(stream) == {"24000": {"_id": 24_000, "again": True}}


@pytest.mark.parametrize("after", ["changes", "stored"])
def test_beside_a_random_workload(
    mongo_server: MongoReplicaSet, mongo_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """GIVEN random changes and transactions WHEN a collection is copied by small chunks, by owners that come and go,
    fed and asked THEN the log implies the collection, and each document came once."""
    seed = random.randrange(10**9)
    rng = random.Random(seed)
    monkeypatch.setattr(copying, "rows_of_chunk", lambda *_: 60)
    stream, rows = f"{mongo_database}.orders", 4000
    with (
        mongo_server.client() as client,
        copy_scene(mongo_server, mongo_database, tmp_path, partitions=3, after=after) as at,
    ):
        orders = client[mongo_database].create_collection(
            "orders", changeStreamPreAndPostImages={"enabled": after == "stored"}
        )
        orders.insert_many([{"_id": number, "n": 0, "pad": "x" * 50} for number in range(rows)])
        at.at = {partition: at.source.earliest(partition) for partition in at.at}
        at.own()
        since = dict(at.at)
        at.copies.want("shop", at.copying.wanted, at.epoch)
        done = threading.Event()
        writer = threading.Thread(target=_writes, args=(client, orders, rows, seed, done), daemon=True)
        writer.start()
        try:
            give_up_at = time.monotonic() + 90
            while not is_done(at):
                assert time.monotonic() < give_up_at, (seed, at.copies.listed("shop"))
                with copier(at):
                    fed = rng.random() < 0.7
                    rounds = rng.randint(5, 60) if fed else rng.randint(1, 5)
                    for _ in range(rounds):
                        at.take(fed=fed)
                        done.wait(0.005)
                at.own()
        finally:
            done.set()
            writer.join()
        wanted = at.documents(stream)
        at.take_all(lambda: at.implied(stream) == wanted, fed=True)
        at.take_all(lambda: at.implied(stream) == wanted, fed=False)
        keys = [row["key"] for row in at.reads()]
        assert len(set(keys)) == len(keys) > rows * 0.5, seed
        changes = [(row["op"], row["key"]) for each in at.log.values() for row in each]
        at.unfeed()
        assert len(changes) > len(keys), seed
        for partition, each in at.log.items():
            positions = [row["position"] for row in each]
            assert positions == sorted(set(positions)), seed
            ids = [row["event_id"] for row in each]
            assert len(set(ids)) == len(ids), seed
            assert partition in since


def _writes(client: Any, orders: Any, rows: int, seed: int, done: threading.Event) -> None:
    rng = random.Random(seed)
    while not done.wait(0.02):
        one, other = rng.randrange(rows), rng.randrange(2 * rows)
        match rng.randrange(5):
            case 0:
                orders.update_one({"_id": other}, {"$setOnInsert": {"n": 1, "new": True}}, upsert=True)
            case 1:
                orders.update_many({"_id": {"$gte": one, "$lt": one + 5}}, {"$inc": {"n": 1}})
            case 2:
                orders.delete_one({"_id": one})
            case 3:
                orders.replace_one({"_id": one}, {"n": other})
            case _:
                with client.start_session() as session, session.start_transaction():
                    orders.delete_one({"_id": one}, session=session)
                    orders.update_many({"_id": {"$in": [one + 1, other]}}, {"$inc": {"n": 1}}, session=session)


def _before(call: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        first()
        return call(*args)

    return both


def _ready(at: Any) -> dict[int, Any]:
    copy = at.copies.listed("shop")[0]
    return {chunk.number: chunk for chunk in at.copies.chunks(copy.id, [ChunkState.READY])}
