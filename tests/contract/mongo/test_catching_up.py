"""A source that is far behind reads side by side what it would have read in one piece (S3)."""

from __future__ import annotations

import pytest

from evermark.errors import BusyError
from evermark.sources.base import Limit
from evermark.sources.mongo.positions import Position
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.until import until
from tests.contract.mongo.mongo_scene import WAIT_S, fed, read_all, source_of


@pytest.mark.parametrize("partitions", [1, 2])
def test_what_is_far_behind_is_read_in_pieces_and_is_the_same(
    mongo_server: MongoReplicaSet, mongo_database: str, partitions: int
) -> None:
    """GIVEN changes over some seconds, with transactions WHEN they are asked for from far behind THEN there are several
    pieces, of the same rows as one piece has, in the same order."""
    servers, database = mongo_server, mongo_database
    with servers.client() as client, source_of(servers, database, partitions=partitions) as near:
        items = client[database]["items"]
        items.insert_one({"_id": -1})
        starts = {partition: near.earliest(partition) for partition in near.partitions()}
        begun = Position.parse(starts[0]).seconds
        n = 0
        while Position.parse(near.earliest(0)).seconds - begun < 6:
            n += 1
            with client.start_session() as session, session.start_transaction():
                items.insert_one({"_id": n}, session=session)
                items.update_one({"_id": n}, {"$set": {"v": n}}, session=session)
            items.replace_one({"_id": -1}, {"v": n})
        with source_of(servers, database, partitions=partitions, far_s=2) as far:
            assert far.latest(starts, Limit(wait_s=0.3))  # there may be little: it is read as one piece
            assert far._has_much(Position.parse(starts[0]))
            ends = far.latest(starts, Limit(wait_s=0.3))
            for partition, start in starts.items():
                assert len(far.slices(partition, start, ends[partition])) >= 2
                wanted, _ = read_all(near, partition, start)
                rows, _ = read_all(far, partition, start)
                assert [row["event_id"] for row in rows] == [row["event_id"] for row in wanted]
                assert [row["position"] for row in rows] == sorted(row["position"] for row in wanted)
                for row, other in zip(rows, wanted, strict=True):
                    assert {**row, "flags": None, "payload": None} == {**other, "flags": None, "payload": None}


def test_a_feed_that_is_full_of_old_changes_gives_way_to_tasks(
    mongo_server: MongoReplicaSet, mongo_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN more old changes than a feed holds WHEN they are followed THEN those at hand come, then it says that the
    rest is to be asked for; GIVEN as many young ones THEN it goes on."""
    monkeypatch.setattr("evermark.sources.mongo.feed.ROWS_MAX", 50)
    with mongo_server.client() as client, source_of(mongo_server, mongo_database) as near:
        start = near.earliest(0)
        client[mongo_database]["items"].insert_many([{"_id": n} for n in range(300)])
        assert len(fed(near, {0: start}, 300)[0][0]) == 300
        with source_of(mongo_server, mongo_database, far_s=0) as far:
            feed, given = far.follow(0, start, lambda: None), [0]

            def takes_all() -> bool:
                if (some := feed.next()) is not None:
                    given.append(sum(batch.num_rows for batch in some.batches()))
                return False

            try:
                with pytest.raises(BusyError, match="side by side"):
                    until(takes_all, "it gives way", timeout_s=WAIT_S)
            finally:
                feed.close()
            assert 0 < sum(given) < 300
