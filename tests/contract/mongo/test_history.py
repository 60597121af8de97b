"""What a source says when the oplog does not reach back to it, or when the deployment is not the one it left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pymongo
import pytest
from pymongo.monitoring import CommandListener, CommandStartedEvent

from evermark.errors import BusyError, EvermarkError, GapError, IdentityError, SetupError, UnreachableError
from evermark.event import Seen
from evermark.sources.base import Limit
from evermark.sources.mongo.changes import Changes
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.values import Document
from evermark.testing import mongods
from evermark.testing.mongods import MongoReplicaSet, mongo_replica_set
from evermark.testing.until import until
from tests.contract.mongo.mongo_scene import fed, read_all, source_of


@pytest.fixture(scope="module")
def forgetful(mongod: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoReplicaSet]:
    """A deployment whose oplog holds a megabyte."""
    with mongo_replica_set(tmp_path_factory.mktemp("forgetful"), oplog_mb=1, arguments=mongods.FORGETFUL) as servers:
        yield servers


def forget(servers: MongoReplicaSet, position: str) -> None:
    mongods.forget(servers, Position.parse(position).time)


def seen(event_id: str) -> Seen:
    now = datetime.now(UTC)
    return Seen(event_id, now, now)


def test_history_that_is_lost_is_a_gap_of_the_partitions_that_need_it(forgetful: MongoReplicaSet) -> None:
    """GIVEN two partitions, one of them behind WHEN the oplog forgets its place THEN it alone has a gap."""
    with source_of(forgetful, "shop", partitions=2) as source, forgetful.client() as client:
        behind = source.earliest(1)
        client["shop"]["orders"].insert_one({"_id": 1})
        forget(forgetful, behind)
        after = {0: source.earliest(0), 1: behind}
        doors: list[Callable[[], object]] = [
            lambda: source.check(after),
            lambda: source.latest(after, Limit(wait_s=0.0)),
            lambda: source.untaken(after),
        ]
        for door in doors:
            with pytest.raises(GapError, match="oplog does not hold") as gap:
                door()
            assert gap.value.partition == 1
            assert "source recover" in gap.value.hint
        with pytest.raises(GapError):
            fed(source, after, 1)
        with pytest.raises(GapError):
            list(source.read(source.slices(1, behind, after[0])[0]))
        source.check({0: after[0]})


def test_a_batch_that_was_read_stands_though_the_oplog_has_forgotten_where_it_began(
    forgetful: MongoReplicaSet,
) -> None:
    """GIVEN a batch behind a long silence WHEN the oplog forgets its beginning before it is taken THEN nothing is said
    to be missing in it; a deployment without the last event is another one all the same."""
    with source_of(forgetful, "shop") as source, forgetful.client() as client:
        start = source.earliest(0)
        client["shop"]["orders"].insert_one({"_id": "before"})
        rows, end = read_all(source, 0, start)
        forget(forgetful, start)
        last = {0: seen(rows[-1]["event_id"])}
        with pytest.raises(GapError):
            source.check({0: start}, last)
        source.require_whole(0, start, end, last)
        _, later = read_all(source, 0, source.earliest(0))
        id_ = f"{Position.parse(later).time:016x}{'0' * 24}"
        with pytest.raises(IdentityError):
            source.require_whole(0, later, later, {0: seen(id_)})


def test_a_feed_that_the_oplog_overtakes_ends_and_the_next_look_finds_the_gap(
    forgetful: MongoReplicaSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a full feed that nobody takes from WHEN the oplog passes it THEN it gives what it has, fails, and there is
    a gap: it never goes on behind it."""
    monkeypatch.setattr("evermark.sources.mongo.feed.ROWS_MAX", 5)
    with source_of(forgetful, "shop") as source, forgetful.client() as client:
        end = source.earliest(0)
        news = threading.Event()
        feed = source.follow(0, end, news.set)
        rows = 0
        try:
            until(lambda: feed.next() is None, "the stream is open")
            client["shop"]["orders"].insert_many([{"pad": "x" * 500_000} for _ in range(80)])
            assert news.wait(20), "it wakes its reader"

            def taken() -> bool:
                nonlocal end, rows
                if (some := feed.next()) is not None:
                    rows, end = rows + sum(batch.num_rows for batch in some.batches()), some.end()
                return rows > 0

            # It may have woken its reader before for a position alone. Now it reads on until it is full once more.
            until(taken, "the first rows come")
            forget(forgetful, source.earliest(0))

            def ended() -> EvermarkError | None:
                try:
                    taken()
                except EvermarkError as error:
                    return error
                return None

            assert isinstance(until(ended, "the feed ends"), BusyError)
        finally:
            feed.close()
        assert 0 < rows < 80
        with pytest.raises(GapError):
            source.latest({0: end}, Limit(wait_s=0.0))


def test_an_idle_partition_moves_on_with_the_oplog(forgetful: MongoReplicaSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a collection where nothing happens WHEN the oplog forgets THEN its position has moved on."""
    monkeypatch.setattr("evermark.sources.mongo.feed.IDLE_EVERY_S", 0.2)
    with source_of(forgetful, "quiet") as source:
        start = source.earliest(0)
        feed = source.follow(0, start, lambda: None)
        try:
            until(lambda: feed.next() is None, "the stream is open")
            time_before = source.earliest(0)
            forget(forgetful, time_before)
            forgotten = source.earliest(0)  # the oplog may have forgotten more than it was to
            moved = until(
                lambda: next((s.end() for s in [feed.next()] if s and s.end() > forgotten), None),
                "it moves on",
                timeout_s=60,
            )
        finally:
            feed.close()
        source.check({0: moved})
        with pytest.raises(GapError):
            source.check({0: start})


def test_the_deployment_we_left_is_known_by_the_last_event_we_took(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN the last logged event WHEN the deployment has it THEN it is accepted, under other collections too."""
    with source_of(mongo_server, mongo_database) as source, mongo_server.client() as client:
        start = source.earliest(0)
        client[mongo_database]["orders"].insert_many([{"_id": 1}, {"_id": 2}])
        client[mongo_database]["orders"].rename("sales")
        rows, end = read_all(source, 0, start)
        for row in rows:
            source.check({0: end}, {0: seen(row["event_id"])})
        with source_of(mongo_server, mongo_database, collections=(f"{mongo_database}.other",)) as other:
            other.check({0: end}, {0: seen(rows[-1]["event_id"])})


def test_a_deployment_that_lacks_our_last_event_is_another_one(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN an event that this deployment never had WHEN it is looked for THEN nothing is read from it unasked."""
    with source_of(mongo_server, mongo_database) as source, mongo_server.client() as client:
        start = source.earliest(0)
        client[mongo_database]["orders"].insert_one({"_id": 1})
        (row,), end = read_all(source, 0, start)
        with pytest.raises(IdentityError, match="does not have the last change") as refused:
            source.check({0: end}, {0: seen(row["event_id"][:-1] + "!")})
        assert refused.value.partition == 0


def test_a_server_that_is_silent_is_not_another_one(
    mongo_server: MongoReplicaSet, mongo_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a server that says nothing WHEN the last event is looked for THEN it is asked again later."""
    with source_of(mongo_server, mongo_database) as source, mongo_server.client() as client:
        start = source.earliest(0)
        client[mongo_database]["orders"].insert_one({"_id": 1})
        (row,), end = read_all(source, 0, start)
        monkeypatch.setattr("evermark.sources.mongo.changes._SILENCE_S_MAX", 0.0)
        monkeypatch.setattr(Changes, "next", lambda _: None)
        with pytest.raises(UnreachableError, match="gave nothing"):
            source.check({0: end}, {0: seen(row["event_id"])})


def test_the_last_event_is_found_at_the_end_of_a_large_transaction(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN a transaction of thousands WHEN its last event is looked for THEN not every one costs an answer."""
    with source_of(mongo_server, mongo_database) as source, mongo_server.client() as client:
        start = source.earliest(0)
        with client.start_session() as session, session.start_transaction():
            documents = [{"_id": number} for number in range(3000)]
            client[mongo_database]["orders"].insert_many(documents, session=session)
        rows, end = read_all(source, 0, start)
        asked = _Asked()
        monitored = pymongo.MongoClient(mongo_server.url, document_class=Document, event_listeners=[asked])
        source._opened = monitored
        source.check({0: end}, {0: seen(rows[-1]["event_id"])})
    assert asked.answers < 100


class _Asked(CommandListener):
    answers = 0

    def started(self, event: CommandStartedEvent) -> None:
        self.answers += event.command_name == "getMore"

    def succeeded(self, event: object) -> None: ...

    def failed(self, event: object) -> None: ...


def test_a_deployment_behind_its_checkpoint_is_another_one(mongo_server: MongoReplicaSet) -> None:
    """GIVEN a checkpoint of tomorrow WHEN reading is to go on there THEN it is refused: a backup was restored."""
    tomorrow = Position(int(time.time() + 86_400) << 32).text(1)
    with (
        source_of(mongo_server, None) as source,
        pytest.raises(IdentityError, match="is behind its checkpoint"),
    ):
        source.check({0: tomorrow})


def test_falling_behind_the_oplog_is_warned_of_before_it_is_a_gap(mongo_server: MongoReplicaSet) -> None:
    """GIVEN a reader two hours behind WHEN the oplog reaches back less than that twice THEN it is a warning."""
    with source_of(mongo_server, None) as source:
        now = Position.parse(source.earliest(0))
        source.confirm(0, now.text(1))
        assert not source.condition().warnings
        assert source.condition().gauges["oplog_span_s"] >= 0
        source.confirm(0, Position(now.time - (7200 << 32)).text(1))
        found = source.condition()
        assert found.gauges["oplog_behind_s"] >= 7200
        assert "replSetResizeOplog" in found.warnings["oplog_behind_s"].hint


def test_another_number_of_partitions_is_refused(mongo_server: MongoReplicaSet, mongo_database: str) -> None:
    """GIVEN a checkpoint of one partition WHEN there are two THEN nothing is read: the second would begin too late."""
    with (
        source_of(mongo_server, mongo_database) as one,
        source_of(mongo_server, mongo_database, partitions=2) as two,
    ):
        start = one.earliest(0)
        one.check({0: start})
        with pytest.raises(SetupError, match=r"`partitions` was 1 .* is 2 now"):
            two.check({0: start, 1: two.earliest(1)})
