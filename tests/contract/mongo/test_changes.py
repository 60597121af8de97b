"""What each operation of a real server becomes in the log, asked for and as it is sent."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo.database import Database

from evermark.sources.mongo import feed
from evermark.sources.mongo.events import partition_for
from evermark.sources.mongo.hidden import HiddenFields
from evermark.sources.mongo.positions import COPIED, Position
from evermark.testing.mongods import MongoReplicaSet
from tests.contract.mongo.mongo_scene import IMAGES, fed, read_all, source_of, told

Db = Database[dict[str, Any]]


@pytest.fixture
def database(mongo_server: MongoReplicaSet, mongo_database: str) -> Iterator[Db]:
    with mongo_server.client() as client:
        client[mongo_database].create_collection("orders", **IMAGES)
        yield client[mongo_database]


def test_documents_come_with_their_images(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN stored images WHEN a document is inserted, changed and deleted THEN each row has before and after."""
    with source_of(mongo_server, database.name, after="stored", before="stored") as source:
        start = source.earliest(0)
        orders = database["orders"]
        orders.insert_one({"_id": "a", "n": 1})
        orders.update_one({"_id": "a"}, {"$set": {"n": 2}})
        orders.replace_one({"_id": "a"}, {"n": 3})
        orders.delete_one({"_id": "a"})
        rows, _ = read_all(source, 0, start)
    assert [told(row) for row in rows] == [
        ("insert", "a", {"_id": "a", "n": 1}),
        ("update", "a", {"_id": "a", "n": 2}),
        ("update", "a", {"_id": "a", "n": 3}),
        ("delete", "a", None),
    ]
    befores = [row["before"] and json.loads(row["before"]) for row in rows]
    assert befores == [None, {"_id": "a", "n": 1}, {"_id": "a", "n": 2}, {"_id": "a", "n": 3}]
    assert [row["flags"] for row in rows] == [None, None, ["replaced"], None]
    assert {row["stream"] for row in rows} == {f"{database.name}.orders"}
    assert all(row["event_time"] is not None for row in rows)


def test_an_update_without_a_document_tells_its_changes_and_says_so(
    mongo_server: MongoReplicaSet, database: Db
) -> None:
    """GIVEN no stored images WHEN a document changes THEN the row is flagged: what it holds is not the document."""
    plain = database["plain"]
    plain.insert_one({"_id": 1, "n": 1, "old": 1})
    with (
        source_of(mongo_server, database.name, after="stored") as stored,
        source_of(mongo_server, database.name, after="lookup") as looking,
    ):
        start = stored.earliest(0)
        plain.update_one({"_id": 1}, {"$set": {"n": 2}, "$unset": {"old": ""}})
        plain.update_one({"_id": 1}, {"$set": {"n": 3}})
        (first, _), _ = read_all(stored, 0, start)
        looked_up, _ = read_all(looking, 0, start)
    assert first["flags"] == ["partial"]
    assert json.loads(first["payload"])["updatedFields"] == {"n": 2}
    assert json.loads(first["payload"])["removedFields"] == ["old"]
    assert [row["flags"] for row in looked_up] == [["looked_up"]] * 2
    assert [json.loads(row["payload"])["n"] for row in looked_up] == [3, 3], "looked up afterwards: both are the newest"


def test_a_transaction_is_whole_and_shares_its_tx(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN a transaction larger than one answer of the server WHEN it is fed THEN it comes in one piece."""
    with source_of(mongo_server, database.name) as source:
        start = source.earliest(0)
        database["orders"].insert_one({"_id": "before"})
        client = database.client
        with client.start_session() as session, session.start_transaction():
            for number in range(6):
                database["orders"].insert_one({"_id": number, "pad": "x" * 4_000_000}, session=session)
        asked, _ = read_all(source, 0, start)
        rows, _ = fed(source, {0: start}, 2)
        several = rows[0] if len(rows[0]) > 1 else fed(source, {0: start}, 7)[0][0]
    assert [row["key"] for row in several] == ["before", *map(str, range(6))]
    assert several == asked
    assert several[0]["tx"] is None
    assert len({row["tx"] for row in several[1:]}) == 1 and several[1]["tx"] is not None
    assert len({row["position"][:16] for row in several[1:]}) == 1, "one cluster time"


def test_a_transaction_larger_than_a_feed_may_hold_is_asked_for(
    mongo_server: MongoReplicaSet, database: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a small feed WHEN a transaction does not fit THEN the feed ends, and asking gives all of it."""
    monkeypatch.setattr(feed, "BYTES_MAX", 100_000)
    monkeypatch.setattr(feed, "TRANSACTION_BYTES_MAX", 300_000)
    with source_of(mongo_server, database.name) as source:
        start = source.earliest(0)
        with database.client.start_session() as session, session.start_transaction():
            for number in range(10):
                database["orders"].insert_one({"_id": number, "pad": "x" * 50_000}, session=session)
        with pytest.raises(feed.BusyError, match="a transaction is larger than"):
            fed(source, {0: start}, 1)
        rows, _ = read_all(source, 0, start)
    assert len(rows) == 10


def test_changes_of_a_document_stay_in_its_partition_in_their_order(
    mongo_server: MongoReplicaSet, database: Db
) -> None:
    """GIVEN three partitions at three places WHEN they are fed by one stream THEN none misses or doubles a change."""
    with source_of(mongo_server, database.name, partitions=3, after="stored") as source:
        starts = {p: source.earliest(p) for p in source.partitions()}
        orders = database["orders"]
        orders.insert_many([{"_id": number, "n": 0} for number in range(30)])
        mine = sum(partition_for(f"{database.name}.orders", str(number), 3) == 0 for number in range(30))
        first, ends = fed(source, {0: starts[0]}, mine)  # one partition is ahead of the others
        for _ in range(4):
            orders.update_many({}, {"$inc": {"n": 1}})
        more, _ = fed(source, {**starts, **ends}, 150 - len(first[0]))
        asked = {p: read_all(source, p, starts[p])[0] for p in starts}
    rows = {p: [*first.get(p, []), *more[p]] for p in starts}
    assert rows == asked
    assert all(rows.values()), "every partition has some"
    seen: dict[str, list[int]] = defaultdict(list)
    for row in (row for mine in rows.values() for row in mine):
        seen[row["key"]].append(json.loads(row["payload"])["n"])
    assert seen == {str(number): [0, 1, 2, 3, 4] for number in range(30)}
    ids = [row["event_id"] for mine in rows.values() for row in mine]
    assert len(set(ids)) == len(ids) == 150


def test_collections_and_databases_that_go_are_told(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN a rename, a drop and a dropped database WHEN events follow THEN they are read on, and nothing is lost."""
    with source_of(mongo_server, database.name) as source:
        start = source.earliest(0)
        database["orders"].insert_one({"_id": 1})
        database["orders"].rename("sales")
        database["sales"].drop()
        database.client.drop_database(database.name)
        database["orders"].insert_one({"_id": 2})
        asked, _ = read_all(source, 0, start)
        rows, _ = fed(source, {0: start}, len(asked))
    assert rows[0] == asked
    name = database.name
    assert [(row["op"], row["stream"], row["flags"]) for row in asked] == [
        ("insert", f"{name}.orders", None),
        ("truncate", f"{name}.orders", ["renamed"]),
        ("truncate", f"{name}.sales", ["renamed"]),
        ("truncate", f"{name}.sales", ["dropped"]),
        ("schema", name, None),
        ("schema", "", None),
        ("insert", f"{name}.orders", None),
    ]
    assert [json.loads(row["payload"]).get("kind") for row in asked[1:6]] == [
        "rename", "rename", "drop", "dropDatabase", "invalidate",
    ]  # fmt: skip


def test_reading_goes_on_behind_a_dropped_database(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN a batch that ends with the end of a stream WHEN reading begins there THEN it goes on behind it."""
    with source_of(mongo_server, database.name) as source:
        start = source.earliest(0)
        database["orders"].insert_one({"_id": 1})
        database.client.drop_database(database.name)
        rows, end = read_all(source, 0, start)
        assert json.loads(rows[-1]["payload"]) == {"kind": "invalidate"}
        assert read_all(source, 0, end) == ([], end)
        database["orders"].insert_one({"_id": 2})
        asked, _ = read_all(source, 0, end)
        sent, _ = fed(source, {0: end}, 1)
    assert [row["key"] for row in asked] == ["2"]
    assert sent[0] == asked


def test_changes_that_come_again_under_another_choice_are_known_by_their_ids(
    mongo_server: MongoReplicaSet, database: Db
) -> None:
    """GIVEN a logged transaction WHEN a collection is added to the choice THEN what comes again of it is looked for."""
    name = database.name
    with source_of(mongo_server, name, collections=(f"{name}.orders",)) as before:
        start = before.earliest(0)
        with database.client.start_session() as session, session.start_transaction():
            for number in range(3):
                database["users"].insert_one({"_id": number}, session=session)
                database["orders"].insert_one({"_id": number}, session=session)
        logged, end = read_all(before, 0, start)
    assert len(logged) == 3
    with source_of(mongo_server, name, collections=(f"{name}.orders", f"{name}.users")) as source:
        assert source.may_repeat_from(0, end) == end, "only where reading began"
        source.begin(0, end)
        database["orders"].insert_one({"_id": "later"})
        rows, later = read_all(source, 0, end)
        again = {row["event_id"] for row in rows} & {row["event_id"] for row in logged}
        assert again, "it comes again, at other positions"
        since = source.may_repeat_from(0, end)
        assert again <= {row["event_id"] for row in logged if row["position"] >= since}
        assert source.may_repeat_from(0, later) == later
        source.begin(0, later)
        assert source.may_repeat_from(0, later) <= later


def test_only_chosen_collections_are_read(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN collections of two databases WHEN some are chosen THEN the others' changes do not come."""
    name = database.name
    chosen = (f"{name}.orders", f"{name}.a.b")
    with (
        source_of(mongo_server, name, collections=chosen) as by_database,
        source_of(mongo_server, None, collections=chosen) as by_deployment,
    ):
        start = by_database.earliest(0)
        for collection in ("orders", "a.b", "other"):
            database[collection].insert_one({"_id": collection})
        mine, _ = read_all(by_database, 0, start)
        same, _ = read_all(by_deployment, 0, start)
    assert [row["stream"] for row in mine] == [f"{name}.orders", f"{name}.a.b"]
    assert same == mine


def test_an_event_larger_than_the_server_can_send_is_poison_and_the_stream_goes_on(
    mongo_server: MongoReplicaSet, database: Db
) -> None:
    """GIVEN both images of a large document WHEN it changes THEN key and reason are logged, nothing else is lost."""
    with source_of(mongo_server, database.name, after="stored", before="stored") as source:
        start = source.earliest(0)
        orders = database["orders"]
        orders.insert_one({"_id": "large", "pad": "x" * 9_000_000, "n": 1})
        orders.insert_one({"_id": "small"})
        orders.update_one({"_id": "large"}, {"$set": {"n": 2}})
        orders.update_one({"_id": "large"}, {"$set": {"n": 3}})
        orders.update_one({"_id": "small"}, {"$set": {"n": 4}})
        rows, _ = fed(source, {0: start}, 5)
        asked, _ = read_all(source, 0, start)
        by_one = [row for at in rows[0] for row in fed(source, {0: at["position"]}, 1)[0][0][:1]]
        behind = [f"{row['position'][:24]}1:01" for row in asked[:-1]]  # where a reader stands that has taken the row
        following = [fed(source, {0: at}, 1)[0][0][0] for at in behind]
    assert rows[0] == asked == by_one
    assert following == asked[1:]
    assert [(row["op"], row["key"]) for row in asked] == [
        ("insert", "large"), ("insert", "small"), ("poison", "large"), ("poison", "large"), ("update", "small"),
    ]  # fmt: skip
    assert "larger than 16 MB" in json.loads(asked[2]["payload"])["reason"]
    assert asked[2]["stream"] == f"{database.name}.orders"
    assert bson.decode(asked[2]["bytes"])["operationType"] == "update"


def test_who_has_taken_what_is_too_large_takes_no_other_event_for_it(
    mongo_server: MongoReplicaSet, database: Db
) -> None:
    """GIVEN an event that is too large and was logged WHEN reading begins right behind its cluster time, where the
    server gives it again THEN the next event comes with its document."""
    chosen = (f"{database.name}.orders",)
    with source_of(mongo_server, database.name, collections=chosen, after="stored", before="stored") as source:
        orders = database["orders"]
        orders.insert_one({"_id": "large", "pad": "x" * 9_000_000, "n": 1})
        start = source.earliest(0)
        orders.update_one({"_id": "large"}, {"$set": {"n": 2}})
        database["other"].insert_one({})
        orders.insert_one({"_id": "small"})
        poison, after = fed(source, {0: start}, 2)[0][0]
        behind = Position(Position.parse(poison["position"]).time + 1, COPIED).text(1)
        assert behind < after["position"]
        rows, _ = fed(source, {0: behind}, 1)
        asked, _ = read_all(source, 0, behind)
    assert rows[0] == asked == [after]
    assert [(row["op"], row["key"]) for row in (poison, after)] == [("poison", "large"), ("insert", "small")]


def test_a_document_that_is_no_text_is_poison_with_its_bytes(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN bytes that are not UTF-8 in a text WHEN it is read THEN it is logged raw, and the stream goes on."""
    broken = bson.encode({"_id": 7, "s": "AAAA"}).replace(b"AAAA", b"\xff\xfe\xfd\xfc")
    with source_of(mongo_server, database.name, partitions=2) as source:
        starts = {p: source.earliest(p) for p in source.partitions()}
        database.get_collection("orders").insert_one(RawBSONDocument(broken))
        database["orders"].update_one({"_id": 7}, {"$set": {"s": "well"}})
        rows, _ = fed(source, starts, 2)
    (mine,) = [some for some in rows.values() if some]
    assert [(row["op"], row["key"]) for row in mine] == [("poison", "7"), ("update", "7")]
    assert broken in mine[0]["bytes"]
    assert "cannot be decoded" in json.loads(mine[0]["payload"])["reason"]


def test_hidden_fields_reach_neither_the_log_nor_a_repair(mongo_server: MongoReplicaSet, database: Db) -> None:
    """GIVEN fields to hide WHEN documents change, unreadable ones too THEN no column of any row holds their values."""
    stream = f"{database.name}.orders"
    hidden = {stream: HiddenFields(exclude=("password",), hash=("email",))}
    broken = bson.encode({"_id": 2, "password": "s3cret", "s": "AAAA"}).replace(b"AAAA", b"\xff\xfe\xfd\xfc")
    for after in ("stored", "changes"):
        with source_of(mongo_server, database.name, after=after, before="stored", hidden=hidden) as source:
            start, orders = source.earliest(0), database["orders"]
            orders.insert_one({"_id": 1, "password": "s3cret", "email": "s3cret@x"})
            orders.update_one({"_id": 1}, {"$set": {"password": "s3cret2", "email": "s3cret@y", "n": 1}})
            orders.insert_one(RawBSONDocument(broken))
            rows, _ = read_all(source, 0, start)
            gap = source.repair(0).begin(lambda: False)
            rows += [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
            orders.delete_many({})
        assert [row["op"] for row in rows] == ["insert", "update", "poison", "read", "poison"]
        assert "s3cret" not in str(rows)
        assert "sha256:" in rows[0]["payload"] and "sha256:" in rows[1]["payload"]
