"""Slices of the log as Spark finds them and tasks read them: exactly the window, in order, bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evermark.delivery.model import Fate, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice, next_slice, readable
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef, SecretBox
from evermark.testing.listener import Failing, Listener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
SEED = 20261115


def at(ms: int) -> datetime:
    return NOON + timedelta(milliseconds=ms)


class Filled:
    """A log of some batches whose times overlap and tie, with rows nobody may get."""

    def __init__(self, folder: Path, batches: int = 36, rows: int = 20) -> None:
        self.folder = folder / "shop"
        self.events: list[dict[str, Any]] = []
        log = DeltaLog(self.folder)
        rng = random.Random(SEED)
        for batch in range(1, batches + 1):
            made = [self._event(rng, batch) for _ in range(rows)]
            columns: dict[str, object] = {n: [e[n] for e in made] for n in made[0] if n != "batch"}
            file = BatchWriter(self.folder, "shop", 0, batch).write_all([taken_batch(columns, rows)])
            assert file is not None
            log.commit(Append(0, batch, 1, "", "", (file,)))
            self.events += made
        self.reader = LogReader(self.folder)

    def _event(self, rng: random.Random, batch: int) -> dict[str, Any]:
        number = rng.randrange(10**9)
        return {
            "event_id": f"{number:09}-{batch}",
            "batch": batch,
            "position": f"{batch:04}{number:09}",
            "stream": rng.choice(["public.orders", "public.users"]),
            "op": rng.choice(["insert", "insert", "update", "control"]),
            "key": str(number % 7),
            "event_time": None if number % 50 == 0 else at(batch * 100 + rng.randrange(0, 200, 10)),
            "payload": f'{{"n": {number % 10}}}',
        }

    def wanted(self, since: datetime, until: datetime, **more: Any) -> list[str]:
        """What a replay must give, in its order, found without Spark."""
        found = [
            e
            for e in self.events
            if e["event_time"] is not None
            and since <= e["event_time"] <= until
            and e["op"] != "control"
            and e["batch"] <= more.get("head", 10**9)
            and e["stream"] in more.get("streams", ("public.orders", "public.users"))
            and more.get("matches", lambda _: True)(e)
        ]
        return [e["event_id"] for e in sorted(found, key=lambda e: (e["event_time"], e["event_id"]))]


def _ids(
    spark: SparkSession, piece: TimeSlice, heads: dict[int, int], spec: SubscriptionSpec, **more: Any
) -> list[str]:
    """The ids of the rows of a slice, read as a task reads them; without a predicate, found in both ways."""
    from evermark.spark.replay import places, places_here, rows_at

    asked = {"streams": (), "where": None, **more}
    work = ReplayWork("r", piece, spec, heads=heads, rows_max=10**9, budget_s=1, probe=False, parked_room=1, **asked)
    codes, numbers = (column.to_numpy() for column in places(spark, work).toArrow().columns)
    ids = [i for rows in rows_at(codes, numbers, piece.paths) for i in rows.column("event_id").to_pylist()]
    if spec.where is None and "where" not in more:
        here = [one.tolist() for one in places_here(work)]
        assert here == [codes.tolist(), numbers.tolist()]
        few = [one.tolist() for one in places_here(replace(work, rows_max=7))]
        assert few == [codes.tolist()[:7], numbers.tolist()[:7]]
    return ids


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path)


def _read(spark: SparkSession, filled: Filled, since: datetime, until: datetime, rows: int, **more: Any) -> list[str]:
    """The window slice by slice, as the replayer cuts it."""
    head = more.pop("head", 36)
    files = readable(filled.reader.files(), {0: head})
    spec = SubscriptionSpec("a", "http://a.example", where=more.pop("own", None))
    seen: list[str] = []
    piece = next_slice(Mark(since), until, files, rows)
    while piece is not None:
        seen += _ids(spark, piece, {0: head}, spec, **more)
        piece = next_slice(piece.end, until, files, rows)
    return seen


def test_slices_give_exactly_the_window_in_order(spark: SparkSession, filled: Filled) -> None:
    """GIVEN overlapping batches WHEN a window is read in slices THEN each event comes once, by (time, id)."""
    since, until = at(300), at(2500)
    wanted = filled.wanted(since, until)
    assert len(wanted) > 100
    assert _read(spark, filled, since, until, 120) == wanted
    # WHEN files were merged meanwhile THEN nothing changes
    assert Maintenance(filled.folder).run().compacted
    assert _read(spark, filled, since, until, 10_000) == wanted


def test_streams_predicates_and_heads_narrow_it(spark: SparkSession, filled: Filled) -> None:
    """GIVEN a subscription's predicate, the request's own, a stream and heads THEN all of them hold at once."""
    got = _read(
        spark,
        filled,
        at(0),
        at(5_000),
        10_000,
        head=20,
        own="data.n < 8",
        where="data.n > 2",
        streams=["public.orders"],
    )
    wanted = filled.wanted(
        at(0),
        at(5_000),
        head=20,
        streams=("public.orders",),
        matches=lambda e: 2 < int(e["payload"].split(": ")[1].rstrip("}")) < 8,
    )
    assert wanted
    assert got == wanted
    # WHEN there is no predicate THEN streams and heads hold all the same
    got = _read(spark, filled, at(0), at(5_000), 10_000, head=20, streams=["public.users"])
    assert got == filled.wanted(at(0), at(5_000), head=20, streams=("public.users",))
    # WHEN a merged file reaches beyond the heads THEN what is beyond them is not there
    assert Maintenance(filled.folder).run().compacted
    piece = TimeSlice(Mark(at(0)), at(5_000), tuple(file.path for file in filled.reader.files()), 1)
    spec = SubscriptionSpec("a", "http://a.example")
    assert _ids(spark, piece, {0: 20}, spec) == filled.wanted(at(0), at(5_000), head=20)


def test_a_mark_inside_an_instant_goes_on_after_its_event(spark: SparkSession, filled: Filled) -> None:
    """GIVEN ties at one instant WHEN reading goes on after one of them THEN the rest of the instant comes, no more."""
    wanted = filled.wanted(at(0), at(5_000))
    times = {e["event_id"]: e["event_time"] for e in filled.events}
    middle = next(n for n in range(200, len(wanted)) if times[wanted[n]] == times[wanted[n + 1]])
    mark = Mark(times[wanted[middle]], wanted[middle])
    paths = tuple(f.path for f in filled.reader.files())
    spec = SubscriptionSpec("a", "http://a.example")
    piece = TimeSlice(mark, at(5_000), paths, 1)
    assert _ids(spark, piece, {0: 36}, spec) == wanted[middle + 1 :]


@pytest.fixture
def box(tmp_path: Path) -> SecretBox:
    key = tmp_path / "key"
    key.write_text("a key for tests, long enough")
    key.chmod(0o600)
    return SecretBox(KeyRef("file", str(key)))


def _work(filled: Filled, url: str, rows_max: int, **more: Any) -> ReplayWork:
    paths = tuple(f.path for f in filled.reader.files())
    spec = SubscriptionSpec("a", url, allow_networks=("127.0.0.0/8",), **more)
    return ReplayWork(
        replay="abcdefghijkl",
        slice=TimeSlice(Mark(at(0)), at(5_000), paths, 600),
        spec=spec,
        streams=(),
        where=None,
        heads={0: 36},
        rows_max=rows_max,
        budget_s=30.0,
        probe=False,
        parked_room=100,
    )


def test_a_replay_posts_under_its_own_ids_and_stops_at_its_limit(
    spark: SparkSession, filled: Filled, box: SecretBox
) -> None:
    """GIVEN a slice denser than its limit WHEN it is posted THEN the mark is at the last event that was sent."""
    from evermark.spark.replay import SparkReplays

    wanted = filled.wanted(at(0), at(5_000))
    times = {e["event_id"]: e["event_time"] for e in filled.events}
    with Listener() as listener:
        some = SparkReplays(spark.sparkContext, box).replay(_work(filled, listener.url, 100))
        assert some.mark == Mark(times[wanted[99]], wanted[99])
        got = {r.event.delivery_id for r in listener.records}
        assert got == {f"{event_id}.abcdefghijkl" for event_id in wanted[:100]}
        assert all(r.event.historical for r in listener.records)
        whole = SparkReplays(spark.sparkContext, box).replay(_work(filled, listener.url, 10_000))
        assert whole.mark == Mark(at(5_000) + timedelta(microseconds=1))
        assert whole.outcome.accepted == len(wanted)


def test_what_was_prepared_is_used_and_never_taken_for_more_than_it_is(
    spark: SparkSession, filled: Filled, box: SecretBox
) -> None:
    """GIVEN a slice prepared with a limit WHEN more is asked for THEN only what was found counts as done."""
    from evermark.spark.replay import SparkReplays

    wanted = filled.wanted(at(0), at(5_000))
    times = {e["event_id"]: e["event_time"] for e in filled.events}
    with Listener() as listener:
        replays = SparkReplays(spark.sparkContext, box)
        first = _work(filled, listener.url, 10, where="data.n >= 0")
        following = replace(first, slice=replace(first.slice, mark=Mark(times[wanted[9]], wanted[9])), rows_max=50)
        assert replays.replay(first, following).mark == following.slice.mark
        some = replays.replay(replace(following, rows_max=10_000))
        assert some.mark == Mark(times[wanted[59]], wanted[59])
        # WHEN the subscription wants something else by now THEN it is looked for anew
        replays.replay(first, following)
        other = replays.replay(replace(following, spec=replace(following.spec, where="data.n > 100"), rows_max=10_000))
        assert (other.mark, other.outcome.accepted) == (first.slice.end, 0)


def test_a_receiver_that_fails_leaves_the_mark_at_what_was_done(
    spark: SparkSession, filled: Filled, box: SecretBox
) -> None:
    """GIVEN refusals and then a failing endpoint WHEN a slice is posted THEN what is before the mark was done."""
    from evermark.spark.replay import SparkReplays

    wanted = filled.wanted(at(0), at(5_000))
    with Listener(failing=Failing.parse("422:3")) as listener:
        refused = SparkReplays(spark.sparkContext, box).replay(_work(filled, listener.url, 10_000, concurrency=1))
        assert refused.outcome.fate is Fate.DONE
        assert [p.event_id for p in refused.outcome.parked] == wanted[:3]
        assert {p.replay_id for p in refused.outcome.parked} == {"abcdefghijkl"}
    with Listener(failing=Failing.parse("503:100%")) as listener:
        failed = SparkReplays(spark.sparkContext, box).replay(_work(filled, listener.url, 10_000))
        assert (failed.outcome.fate, failed.mark) == (Fate.ENDPOINT_FAILED, Mark(at(0)))
