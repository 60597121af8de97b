"""A change stream when servers fail and follow one another, played by a server that says what a test wants."""

from __future__ import annotations

from contextlib import closing, nullcontext
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from bson import Int64, Timestamp

from evermark.errors import GapError, IdentityError, SetupError, UnreachableError
from evermark.event import Seen
from evermark.secrets import Plain
from evermark.sources.base import Limit, Whereabouts
from evermark.sources.mongo.changes import Change, Changes
from evermark.sources.mongo.connect import NO_IMAGE, TOO_LARGE, open_client
from evermark.sources.mongo.deployment import Deployment
from evermark.sources.mongo.events import Row, event_id, partition_for
from evermark.sources.mongo.positions import COPIED, Position
from evermark.sources.mongo.repair import DocumentsGap, DocumentsRepair
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from tests.unit.sources.mongo_wire import batch, mongo_wire

T = 1000 << 32 | 5
LIMIT = Limit(wait_s=0.1)


def high_water(time: int) -> str:
    return f"82{time:016X}0229296E04"


def insert(number: int, time: int = T) -> dict[str, Any]:
    return {
        "_id": {"_data": f"82{time:016X}2B042C01{number:04X}29"},
        "operationType": "insert",
        "clusterTime": Timestamp(time >> 32, time & 0xFFFFFFFF),
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": number},
        "fullDocument": {"_id": number},
    }


def in_transaction(number: int) -> dict[str, Any]:
    return {**insert(number), "lsid": {"id": b"\0" * 16, "uid": b""}, "txnNumber": Int64(1)}


class Failover:
    """A transaction of five changes at T. The first server dies when it has given three of them; of the one that
    follows it the majority does not know T at first."""

    def __init__(self) -> None:
        self.events = [in_transaction(number) for number in range(5)]
        self.answers = 0
        self.after = 0  # how many events the stream that is open has given
        self.is_known = True

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        if "getMore" in asked:
            return self._more()
        where = asked["pipeline"][0]["$changeStream"]
        tokens = [event["_id"]["_data"] for event in self.events]
        token = where["resumeAfter"]["_data"] if "resumeAfter" in where else None
        self.after = tokens.index(token) + 1 if token in tokens else 0
        return batch("firstBatch", [], token or high_water(T - 1))

    def _more(self) -> dict[str, Any] | None:
        self.answers += 1
        if self.answers == 1:
            self.after = 3
            return batch("nextBatch", self.events[:3], self.events[2]["_id"]["_data"])
        if self.answers == 2:
            return None
        some, self.after = self.events[self.after :], 5
        return batch("nextBatch", some, high_water(T + 1))


def test_the_rest_of_a_transaction_comes_from_the_server_that_follows_one_that_died() -> None:
    """GIVEN a transaction of which some changes were given WHEN the server dies and the next one knows nothing newer
    yet THEN no change is passed over, and what was given is not called a whole transaction."""
    with mongo_wire(Failover()) as url, closing(open_client(Plain(url))) as client:
        target = MongoTarget(Plain(url), "shop")
        given: list[Change] = []
        errors, whole_to = 0, Position(T)
        changes = Changes(client, "here", target, whole_to, await_ms=10)
        while whole_to.time == T and whole_to.ordinal < COPIED:
            try:
                change = changes.next()
            except UnreachableError:
                errors += 1
                given.clear()  # none of them was taken: their transaction was not whole
                changes = Changes(client, "here", target, whole_to, await_ms=10)
                continue
            given += [change] if change is not None else []
            whole_to = changes.whole_to
            assert whole_to == Position(T) or len(given) == 5, "a half transaction is called whole"
        changes.close()
    assert [change.fields["documentKey"]["_id"] for change in given] == list(range(5))
    assert errors == 1, "the driver may not go on by itself: who answers may be another deployment"


class Oplog:
    """Events, of which it cannot send some with their documents."""

    def __init__(self, events: list[dict[str, Any]], lacks: int | None = None, code: int = TOO_LARGE) -> None:
        self.events, self.lacks, self.code = events, lacks, code
        self.left: list[dict[str, Any]] = []
        self.seen_to = ""

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        if "getMore" in asked:
            return self._some("nextBatch", 1000)
        where, *stages = asked["pipeline"]
        where = where["$changeStream"]
        tokens = [event["_id"]["_data"] for event in self.events]
        begin = where.get("startAtOperationTime")
        after = tokens.index(where["resumeAfter"]["_data"]) if begin is None else -1
        self.left = [e for e in self.events[after + 1 :] if begin is None or e["clusterTime"] >= begin]
        self.seen_to = where["resumeAfter"]["_data"] if begin is None else high_water(begin.time << 32 | begin.inc)
        self.is_thin = any("$project" in stage for stage in stages)
        return self._some("firstBatch", asked["cursor"]["batchSize"])

    def _some(self, kind: str, count: int) -> dict[str, Any]:
        some, self.left = self.left[:count], self.left[count:]
        if not self.is_thin and any(event["documentKey"]["_id"] == self.lacks for event in some):
            return {"ok": 0.0, "code": self.code, "codeName": "Location", "errmsg": "it cannot be given"}
        self.seen_to = some[-1]["_id"]["_data"] if some else self.seen_to
        return batch(kind, some, self.seen_to)


@pytest.mark.parametrize("before", [0, 1])
def test_an_event_that_is_too_large_and_was_taken_makes_no_other_poison(before: int) -> None:
    """GIVEN a reader behind the cluster time of an event that is too large WHEN it reads on, and the server begins with
    that event THEN the next event comes as it is."""
    events = [*(insert(number) for number in range(before)), insert(7), insert(8, T + 9)]
    with mongo_wire(Oplog(events, lacks=7)) as url, closing(open_client(Plain(url))) as client:
        start = Position(T + 1, 1)  # where nothing of ours was: the server is asked from the time before on
        with Changes(client, "here", MongoTarget(Plain(url), "shop"), start, await_ms=10) as changes:
            change = changes.next()
    assert change is not None and not change.is_too_large
    assert change.fields["documentKey"]["_id"] == 8


class Upgraded:
    """A server that makes tokens of a new form, and those of the old one when it is asked to, or refuses that."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        if "getMore" in asked:
            return batch("nextBatch", [], high_water(T + 9))
        is_old = asked.get("$_generateV2ResumeTokens") is False
        if is_old and self.refuses:
            return {"ok": 0.0, "code": 6528201, "codeName": "Location6528201", "errmsg": "Invalid request"}
        event = insert(7)
        event["_id"]["_data"] = OLD_TOKEN if is_old else f"82{T:016X}2B04"
        return batch("firstBatch", [event], event["_id"]["_data"])


OLD_TOKEN = f"82{T:016X}2B02"


@pytest.mark.parametrize("code", NO_IMAGE)
def test_an_image_that_expired_after_its_event_was_taken_is_not_missed(code: int) -> None:
    """GIVEN `required` images, and a server without that of an event which was taken WHEN it gives that event again
    THEN the next one comes; WHEN it was not taken THEN that is said, behind all that comes before it."""
    events = [insert(6), insert(7), insert(8, T + 9)]
    with mongo_wire(Oplog(events, lacks=7, code=code)) as url, closing(open_client(Plain(url))) as client:
        target = MongoTarget(Plain(url), "shop", after="required")
        with Changes(client, "here", target, Position(T + 1, 1), await_ms=10) as changes:
            change = changes.next()
            assert change is not None and change.fields["documentKey"]["_id"] == 8
        with Changes(client, "here", target, Position(T), await_ms=10) as changes:
            change = changes.next()
            assert change is not None and change.fields["documentKey"]["_id"] == 6
            with pytest.raises(SetupError, match="no image"):
                changes.next()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_server_that_was_upgraded_is_the_deployment_we_left(refuses: bool) -> None:
    """GIVEN a logged event WHEN the server's tokens have another form since THEN it is known by the former one; a
    deployment without the event is not."""
    now = datetime.now(UTC)
    with (
        mongo_wire(Upgraded(refuses=refuses)) as url,
        closing(MongoChanges(MongoTarget(Plain(url), "shop"))) as source,
    ):
        resume = {0: Position(T, 1).text(1)}
        source.check(resume, {0: Seen(event_id(T, f"82{T:016X}2B04"), now, now)})
        with pytest.raises(IdentityError) if refuses else nullcontext():
            source.check(resume, {0: Seen(event_id(T, OLD_TOKEN), now, now)})
        with pytest.raises(IdentityError):
            source.check(resume, {0: Seen(event_id(T, "another"), now, now)})


def test_what_waits_is_seen_though_another_partition_is_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a partition with more changes than a look comes to WHEN it is asked what waits THEN what waits of another,
    behind all of them, is said, too; and nothing of a partition that has taken all."""
    monkeypatch.setattr("evermark.sources.mongo.source._LOOKED_AT_MAX", 5)
    of = {
        partition: [n for n in range(40) if partition_for("shop.orders", str(n), 3) == partition]
        for partition in range(3)
    }
    keys = [*of[0][:9], of[1][0]]
    events = [insert(key, T + number) for number, key in enumerate(keys)]
    with (
        mongo_wire(Oplog(events)) as url,
        closing(MongoChanges(MongoTarget(Plain(url), "shop", partitions=3))) as source,
    ):
        level = Position(T + 8, 1).text(3)
        found = source.untaken({0: Position(T).text(3), 1: level, 2: level})
    assert {partition: each.upto for partition, each in found.items()} == {
        0: Position(T, 1).text(3), 1: Position(T + 9, 1).text(3)
    }  # fmt: skip


class Others:
    """An oplog in which others write, and nothing is of ours: all that comes is how far the server has looked."""

    def __init__(self, moves: bool) -> None:
        self.seen_to, self.moves = T, moves

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.seen_to += self.moves
        return batch("nextBatch" if "getMore" in asked else "firstBatch", [], high_water(self.seen_to))


@pytest.mark.parametrize(
    ("moves", "stopped", "said"), [(True, False, ""), (False, False, "nothing"), (True, True, "stopped")]
)
def test_a_server_that_looks_through_what_others_wrote_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, moves: bool, stopped: bool, said: str
) -> None:
    """GIVEN a repair that looks for collections that went WHEN the server gives nothing for long THEN it is waited for
    as long as it says how far it has looked, and no longer; nor when we are stopped."""
    monkeypatch.setattr("evermark.sources.mongo.changes._SILENCE_S_MAX", 0.0)
    with mongo_wire(Others(moves)) as url, closing(open_client(Plain(url))) as client:
        repair = DocumentsRepair(MongoTarget(Plain(url), "shop"), 0)
        with pytest.raises(UnreachableError, match=said) if said else nullcontext():
            assert repair._ends(client, "here", Position(T), T + 30, lambda: stopped) == []


class Shortened(Oplog):
    """An oplog that does not reach back before a time."""

    def __init__(self, events: list[dict[str, Any]], oldest: int) -> None:
        super().__init__(events)
        self.oldest = oldest

    def __call__(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        if "pipeline" in asked:
            begin = asked["pipeline"][0]["$changeStream"]["startAtOperationTime"]
            if begin.time << 32 | begin.inc < self.oldest:
                return {"ok": 0.0, "code": 286, "codeName": "ChangeStreamHistoryLost", "errmsg": "it was forgotten"}
        elif not self.left:
            self.seen_to = high_water(1 << 62)
        return super().__call__(asked)


def drop(time: int) -> dict[str, Any]:
    kept = {name: each for name, each in insert(0, time).items() if name != "fullDocument"}
    return {**kept, "operationType": "drop", "documentKey": {"_id": None}}


def test_ends_of_collections_are_told_though_an_older_repair_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN partitions that were repaired at different times, and an oplog that reaches back to the later one alone
    WHEN collections that went are looked for THEN those that went behind the later one are found."""
    monkeypatch.setattr("evermark.sources.mongo.repair.look_at", lambda *_: Deployment(T + 50, "rs", is_sharded=False))
    texts = {time: Position(time).text(3) for time in (T - 9, T + 10, T + 20, T + 90)}
    known = Whereabouts({0: texts[T - 9], 1: texts[T + 90]}, [texts[T + 10], texts[T + 20]])
    with mongo_wire(Shortened([drop(T + 30), drop(T + 40)], T + 15)) as url, closing(open_client(Plain(url))) as client:
        repair = DocumentsRepair(MongoTarget(Plain(url), "shop", partitions=3), 0)
        found, upto = repair._gone(client, "here", known, T + 35, lambda: False)
        assert [Position.parse(row.position).time for row in found] == [T + 30, T + 40] and upto == T + 50
        known = Whereabouts({0: texts[T - 9]})
        assert repair._gone(client, "here", known, T + 35, lambda: False) == ([], T + 35)


def invalidate(time: int) -> dict[str, Any]:
    return {**drop(time), "operationType": "invalidate"}


def test_nothing_from_before_is_read_where_a_dropped_database_lies_in_front() -> None:
    """GIVEN a database that was dropped right before a transaction which was read in part WHEN reading goes on inside
    the transaction, and the server begins with the drop THEN only the rest of the transaction comes."""
    events = [invalidate(T - 1), *(insert(number) for number in range(3))]
    with mongo_wire(Oplog(events)) as url, closing(open_client(Plain(url))) as client:
        with Changes(client, "here", MongoTarget(Plain(url), "shop"), Position(T, 2), await_ms=10) as changes:
            given = [changes.next(), changes.next()]
        assert [change and change.fields["documentKey"]["_id"] for change in given] == [2, None]
        assert given[0] is not None and given[0].position == Position(T, 2)


def test_history_is_asked_for_where_reading_opens_its_stream() -> None:
    """GIVEN an oplog whose first entry has the cluster time that two partitions stand in WHEN one stands inside it, and
    the other behind all of its events, among copied rows THEN the first alone has a gap, and the other is read."""
    inside, behind = Position(T, 1).text(2), Position(T, COPIED + 7).text(2)
    with (
        mongo_wire(Shortened([insert(number, T + number) for number in range(40)], T)) as url,
        closing(MongoChanges(MongoTarget(Plain(url), "shop", partitions=2))) as source,
    ):
        for ask in (lambda: source.check({0: inside, 1: behind}), lambda: source.latest({0: inside, 1: behind}, LIMIT)):
            with pytest.raises(GapError) as gap:
                ask()
            assert gap.value.partition == 0
        source.check({1: behind})
        (piece,) = source.slices(1, behind, source.latest({1: behind}, LIMIT)[1])
        keys = [row["key"] for batch in source.read(piece) for row in batch.to_pylist()]
        assert keys == [str(n) for n in range(1, 40) if partition_for("shop.orders", str(n), 2) == 1]


def test_collections_are_told_anew_whose_end_another_partition_is_yet_to_tell() -> None:
    """GIVEN collections that went WHEN a partition is repaired THEN it tells its own ends, and tells anew the documents
    of those whose end stands where another partition has not come to; of that which it has told it does not."""
    target = MongoTarget(Plain("mongodb://here"), "shop", partitions=3)
    names = {partition_for(f"shop.c{n}", None, 3): f"shop.c{n}" for n in range(40)}
    gone = [
        row._replace(stream=names[teller], position=Position(time).text(3))
        for teller, time in ((0, T + 5), (1, T + 5), (2, T + 5))
        for row in [Row("e", "", "", None, "truncate", None, None, None, None, None, None)]
    ]
    known = Whereabouts({0: Position(T).text(3), 1: Position(T + 5, 1).text(3), 2: Position(T + 5).text(3)})
    mine, told_anew = DocumentsRepair(target, 0)._told(gone, known)
    assert [row.stream for row in mine] == [names[0]] and told_anew == [names[2]]
    assert DocumentsRepair(target, 0)._told(gone, Whereabouts({}))[1] == sorted([names[1], names[2]])


def test_differences_stand_behind_the_truncates_of_their_time() -> None:
    """GIVEN a collection that was renamed at the very time that documents are compared at WHEN the differences are
    placed THEN none has the position of the truncate."""
    target = MongoTarget(Plain("mongodb://here"), "shop", partitions=2)
    told = Position(T, 1).text(2)
    truncates = pa.Table.from_pylist([{"position": Position(T - 1, 9).text(2)}, {"position": told}])
    placed = DocumentsGap(target, 0, T, [], truncates).positions(2, 3).to_pylist()
    assert len({told, *placed}) == 4 and told < min(placed) and max(placed) < Position(T + 1).text(2)
    assert DocumentsGap(target, 0, T, []).positions(0, 1).to_pylist() == [Position(T).text(2)]


def test_differences_stand_behind_what_was_copied_at_their_time() -> None:
    """GIVEN a deployment where nothing happens WHEN it is compared at the time of rows that were copied, and of an end
    that another partition tells, THEN the differences stand behind them, and before the place where reading goes on."""
    target, after = MongoTarget(Plain("mongodb://here"), "shop"), Position(T, COPIED + 7).text(1)
    gap = DocumentsGap(target, 0, T, [], after=[Position.parse(after), Position(T, 1), Position(T - 1, COPIED + 9)])
    assert after == gap.positions(0, 1)[0].as_py() < gap.positions(9, 1)[0].as_py() < gap.position
    later = DocumentsGap(target, 0, T + 1, [], after=[Position.parse(after)])
    assert later.positions(0, 1).to_pylist() == [Position(T + 1).text(1)]
