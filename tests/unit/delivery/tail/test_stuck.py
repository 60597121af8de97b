"""The live tail beside a file of the log that cannot be read: one partition stands still, in the open, and no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.retry import STUCK_REST_S
from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.hub import _HALTS_MAX, Client, Hub, TailLimits
from evermark.delivery.tail.place import Trouble, places_of
from evermark.delivery.tail.wish import Wish
from evermark.errors import FormatError, UnreachableError
from evermark.log.opened import lost
from evermark.log.pieces import LogPiece, PieceReader
from evermark.log.read import LogReader
from tests.unit.delivery.tail.tail_scene import P0, P1, Browser, MemoryLog, Reported, hub_over, taken
from tests.unit.delivery.tail.test_hub import ALL, QUICK, follows, read_on, run

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from([P0, P1]), st.integers(1, 7)),
        st.tuples(st.just("read on"), st.integers(0, 1), st.none()),
        st.tuples(st.just("follow"), st.integers(0, 1), st.sampled_from([1, 3, 10_000])),
        st.tuples(st.just("lose"), st.sampled_from([P0, P1]), st.integers(1, 9)),
        st.tuples(st.just("mend"), st.sampled_from([P0, P1]), st.none()),
        st.tuples(st.just("refuse"), st.booleans(), st.none()),
    ),
    max_size=40,
)


@given(steps=STEPS, rows_max=st.integers(1, 9), chunk=st.sampled_from([1, 600, 100_000]), ring=st.integers(1, 2_000))
def test_d14_files_that_cannot_be_read_for_a_while_cost_a_client_no_event(
    steps: list[tuple[str, Any, Any]], rows_max: int, chunk: int, ring: int
) -> None:
    """GIVEN two instances, a client that goes on with either, and files that go away, or that the disk refuses, and
    come back WHEN it has taken all that there is THEN it has the whole of each partition that can be read; WHEN all
    files are back THEN it has every event once, in the order of each partition (D14).
    """
    # While the clock stands still, nothing may be tried again at once: it would be tried for ever.
    limits = replace(QUICK, rows=rows_max, chunk_bytes=chunk, ring_bytes=ring, retry_s=0.001)
    asyncio.run(_story(steps, limits))


async def _story(steps: list[tuple[str, Any, Any]], limits: TailLimits) -> None:
    log, now, browser = MemoryLog(), [0.0], Browser()
    log.take(P0, 2)
    hubs = [await hub_over(log, limits=limits, clock=lambda: now[0]) for _ in range(2)]
    await follows(hubs[0], browser, 1)
    before = set(log.ids())
    all_of_it = ("follow", 1, 10_000)
    for what, which, more in [*steps, all_of_it, ("mend", P0, None), ("mend", P1, None), all_of_it]:
        now[0] += STUCK_REST_S + 1
        if what == "take":
            log.take(which, more)
        elif what == "read on":
            await hubs[which]._read_on()
        elif what == "lose":
            log.lost.add((which, more))
        elif what == "mend":
            log.lost = {one for one in log.lost if one[0] != which}
        elif what == "refuse":
            log.away = UnreachableError("it cannot be read: Input/output error") if which else None
        else:
            await follows(hubs[which], browser, more)
            for place in {P0, P1} - {place for place, _ in log.lost} if more == 10_000 else ():
                assert set(log.ids(place)) - before <= set(browser.ids)
    for place in (P0, P1):
        assert [i for i in browser.ids if i.startswith(f"shop/{place.partition}/")] == [
            i for i in log.ids(place) if i not in before
        ]
    assert {kind for kind, _ in browser.events} <= {"stuck", "unstuck"}


async def reads_on(client: Client, browser: Browser) -> None:
    async for text in client.pieces():
        browser.read(text)


async def comes_to(wanted: Callable[[], object]) -> None:
    """The event loop goes on until this is so: nothing here waits for a time."""
    for _ in range(1_000):
        if wanted():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to that")


def told_of_p0(kind: str) -> tuple[str, dict[str, Any]]:
    said = "the file shop/p0-b2.parquet of the log is missing"
    return kind, {"source": "shop", "partition": 0, "message": said}


@dataclass
class Standing:
    """Clients that go on by themselves, and a clock that stands still."""

    log: MemoryLog = field(default_factory=MemoryLog)
    report: Reported = field(default_factory=Reported)
    now: float = 0.0
    limits: TailLimits = QUICK

    async def hub(self) -> Hub:
        return await hub_over(self.log, self.report, clock=lambda: self.now, limits=self.limits)

    def passes(self, hub: Hub, seconds: float) -> None:
        self.now += seconds
        hub.tell()

    async def follows(self, hub: Hub, last_id: str = "", wish: Wish = ALL) -> Browser:
        browser = Browser(last_id=last_id)
        client = await hub.client(wish, places_of(last_id) if last_id else None)
        self._tasks.append(asyncio.create_task(reads_on(client, browser)))
        await comes_to(lambda: browser.last_id and (client.is_live or client.waits))
        return browser

    def __post_init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []


def test_a_client_before_a_missing_file_follows_the_other_partitions_live_and_is_told_once() -> None:
    """GIVEN two partitions, a file of the first missing WHEN a client comes back from before it THEN it gets what comes
    before the file, and all of the other partition, is told once that the first stands still, and gets what is taken
    in the other from then on; WHEN the file is back THEN it gets the rest, is told, and is one of the live ones.
    """

    async def story() -> None:
        scene = Standing()
        log = scene.log
        first, second = ([log.take(place, 2) for _ in range(3)] for place in (P0, P1))
        log.lost.add((P0, 2))
        hub = await scene.hub()
        browser = await scene.follows(hub, "1:shop/0@0,shop/1@0")
        have = [*first[0], *(one for batch in second for one in batch)]
        await comes_to(lambda: sorted(browser.ids) == sorted(have))
        for n in range(3):
            have += log.take(P1)
            scene.passes(hub, STUCK_REST_S)
            await read_on(hub)
            await comes_to(lambda have=have: browser.ids[-1] == have[-1])
            assert len(browser.ids) == len(have) and browser.events == [told_of_p0("stuck")], f"batch {n}"
            assert hub._behind == 0, "who reads the log for itself is not waited for"
        again = await scene.follows(hub, browser.last_id)
        assert again.events == [told_of_p0("stuck")] and again.ids == []
        assert scene.report.waits == {P0: told_of_p0("")[1]["message"]} and scene.report.failures == []
        log.lost.clear()
        log.pieces_read = 0
        hub.tell()
        await asyncio.sleep(0)
        assert log.pieces_read == 0, "it is not tried all the time"
        scene.passes(hub, STUCK_REST_S)
        for one in (browser, again):
            await comes_to(lambda one=one: one.ids[-4:] == first[1] + first[2])
            await comes_to(lambda one=one: one.events == [told_of_p0("stuck"), told_of_p0("unstuck")])
        assert scene.report.waits == {}
        await comes_to(lambda: all(client.is_live for client in hub.clients))
        made, log.pieces_read = log.take(P0), 0
        await read_on(hub)
        await comes_to(lambda: browser.ids[-1:] == again.ids[-1:] == made)
        assert log.pieces_read == 1

    run(story)


def test_a_hub_that_meets_a_missing_file_goes_on_for_those_behind_it() -> None:
    """GIVEN a live client WHEN a batch comes whose file is gone at once THEN the client is told, and gets what comes in
    the other partition; a new client is live at once, is told nothing, and gets what comes behind the file; WHEN the
    file was given up THEN the first goes on, too, and each has its events once.
    """

    async def story() -> None:
        scene = Standing()
        log = scene.log
        log.take(P0), log.take(P1)
        hub = await scene.hub()
        old = await scene.follows(hub)
        log.lost.add((P0, 2))
        log.take(P0)
        have = log.take(P1)
        await read_on(hub)
        await comes_to(lambda: old.ids == have and old.events == [told_of_p0("stuck")])
        new = await scene.follows(hub)
        third = log.take(P0)
        have += log.take(P1)
        await read_on(hub)
        await comes_to(lambda: sorted(new.ids) == sorted([*third, have[-1]]) and old.ids == have)
        assert new.events == []
        log.lost.clear()
        log.batches[P0][1].clear()
        scene.passes(hub, STUCK_REST_S)
        await comes_to(lambda: old.ids == have + third and old.events[1:] == [told_of_p0("unstuck")])
        last = log.take(P0)
        await read_on(hub)
        await comes_to(lambda: old.ids[-1:] == new.ids[-1:] == last)
        assert scene.report.waits == {} and new.events == []

    run(story)


def test_the_first_file_of_a_new_partition_holds_up_that_partition_alone_and_is_told() -> None:
    """GIVEN a client of a source with one partition WHEN another begins with a file that is missing THEN the client is
    told, the file is not tried all the time, and the first partition goes on; WHEN the file is back THEN it gets it.
    """

    async def story() -> None:
        scene = Standing()
        log = scene.log
        log.take(P1)
        hub = await scene.hub()
        browser = await scene.follows(hub)
        log.lost.add((P0, 1))
        late, log.pieces_read = log.take(P0), 0
        await read_on(hub)
        for _ in range(200):
            await asyncio.sleep(0)
        said = {"source": "shop", "partition": 0, "message": "the file shop/p0-b1.parquet of the log is missing"}
        assert browser.events == [("stuck", said)] and log.pieces_read <= 2
        have = log.take(P1)
        await read_on(hub)
        await comes_to(lambda: browser.ids == have)
        log.lost.clear()
        scene.passes(hub, STUCK_REST_S)
        await comes_to(lambda: browser.ids == have + late and browser.events[1:] == [("unstuck", said)])
        assert scene.report.waits == {} and all(client.is_live for client in hub.clients)

    run(story)


def test_what_was_given_up_between_others_is_told_once() -> None:
    """GIVEN three batches, a client right before the middle one whose file is missing, one that is live, one that is
    away WHEN the file is given up THEN each is told to resync, once, and has the events of the other batches.
    """

    async def story() -> None:
        scene = Standing()
        log = scene.log
        first = log.take(P0)
        away = Browser(last_id="1:shop/0@1")
        log.take(P0)
        third = log.take(P0)
        log.lost.add((P0, 2))
        hub = await scene.hub()
        before, live = await scene.follows(hub, "1:shop/0@0"), await scene.follows(hub)
        log.gaps[P0] = Trouble(1, "1 files of the log with 1 events were given up")
        log.lost.clear()
        log.batches[P0][1].clear()
        await read_on(hub)
        scene.passes(hub, STUCK_REST_S)
        told = ("resync", {"reason": "stale", "source": "shop", "partition": 0, "message": log.gaps[P0].said})
        await comes_to(lambda: before.ids == first + third and live.events == [told])
        assert before.events.count(told) == 1 and live.ids == []
        for _ in range(2):
            await follows(hub, away)
        assert away.ids == third and away.events == [told]

    run(story)


def test_who_comes_back_while_the_log_is_not_mounted_stands_still_and_is_moved_past_nothing(tmp_path: Path) -> None:
    """GIVEN an instance that started while the folder of the log is empty WHEN a client comes back, and another begins
    at the beginning THEN the first is told that it stands still, and not that events are gone, and keeps its place;
    the other is refused."""

    class Unmounted(MemoryLog):
        def first_batch(self, place: SourcePartition) -> int | None:
            return PieceReader(LogReader(tmp_path)).first_batch(place.partition)

        def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece:
            return PieceReader(LogReader(tmp_path)).next(place.partition, after.batch, "", to, rows_max, bytes_max)

    async def story() -> None:
        scene = Standing(Unmounted(head={P0: 12}))
        hub = await scene.hub()
        browser = await scene.follows(hub, "1:shop/0@3")
        await comes_to(lambda: browser.events)
        ((kind, data),) = browser.events
        assert kind == "stuck" and "is gone" in data["message"] and browser.last_id == "1:shop/0@3"
        with pytest.raises(FormatError):
            await hub.client(ALL, None, "beginning")

    run(story)


def test_a_log_that_is_away_holds_up_no_other_partition() -> None:
    """GIVEN the log of one partition that does not answer WHEN the hub and a client behind come to it THEN the others
    go on, the client is told nothing, and the first goes on within seconds of the answer.
    """

    async def story() -> None:
        scene = Standing()
        log = scene.log
        log.take(P0), log.take(P1)
        hub = await scene.hub()
        behind = await scene.follows(hub, "1:shop/0@0,shop/1@0")
        log.away = UnreachableError("the bucket does not answer")
        log.lost.add((P0, 2))
        made = log.take(P0), log.take(P1)
        await read_on(hub)
        await comes_to(lambda: behind.ids[2:] == made[1])
        log.lost.clear()
        await read_on(hub)
        await comes_to(lambda: behind.ids[3:] == made[0])
        assert behind.events == [] and scene.report.waits == {}

    run(story)


def test_a_file_that_the_disk_refuses_holds_up_its_partition_alone_and_is_told_after_some_seconds() -> None:
    """GIVEN a live client WHEN the disk refuses a file of one partition for long, and much is taken in another THEN the
    other is read on at once; new clients are let in at once, and are live in it; after some seconds health and clients
    are told; WHEN the file can be read THEN each goes on, is told, and has its events once.
    """

    async def story() -> None:
        scene = Standing(limits=replace(QUICK, retry_s=1.0))
        log = scene.log
        log.take(P0), log.take(P1)
        hub = await scene.hub()
        live = await scene.follows(hub)
        log.away = UnreachableError("partition 0 of the log of shop cannot be read: Input/output error")
        log.lost.add((P0, 2))
        late = log.take(P0)
        have = [one for _ in range(20) for one in log.take(P1, 1_000)]
        await read_on(hub)
        assert hub.ring.places[P1].cursor.batch == 21, "as fast as ever"
        await comes_to(lambda: live.ids == have)
        new, ahead = await scene.follows(hub), await scene.follows(hub, "1:shop/0@2,shop/1@21")
        more, log.pieces_read = log.take(P1), 0
        await read_on(hub)
        assert log.pieces_read == 1, "what is refused is not tried all the time"
        await comes_to(lambda: live.ids == have + more and new.ids == ahead.ids == more)
        assert sum(client.is_live for client in hub.clients) == 2
        for _ in range(4):
            assert scene.report.waits == {} and live.events == new.events == []
            scene.passes(hub, 2.0)
            await read_on(hub)
        said = {"source": "shop", "partition": 0, "message": log.away.message}
        assert scene.report.waits == {P0: log.away.message}
        scene.passes(hub, 0.0)
        await comes_to(lambda: live.events == new.events == [("stuck", said)])
        log.lost.clear()
        scene.passes(hub, STUCK_REST_S)
        await read_on(hub)
        await comes_to(lambda: live.ids[-1:] == new.ids[-1:] == late)
        await comes_to(lambda: live.events == new.events == [("stuck", said), ("unstuck", said)])
        assert scene.report.waits == {} and scene.report.failures == [] and ahead.events == []
        last = log.take(P0)
        await read_on(hub)
        await comes_to(lambda: ahead.ids == more + last and live.ids == have + more + late + last)
        assert all(client.is_live for client in hub.clients)

    run(story)


def test_s4_a_gap_is_told_to_a_client_that_reads_the_log_when_it_is_found() -> None:
    """GIVEN a slow client, and one whose predicate only Spark can decide WHEN a gap is let be while they read the log
    THEN each is told of it once, as the live ones are (S4).
    """

    async def story() -> None:
        log = MemoryLog()
        log.take(P0)
        hub = await hub_over(log, limits=replace(QUICK, ring_bytes=1_000), by_spark=lambda *_: set())
        clients = [await hub.client(wish, None) for wish in (ALL, ALL, Wish(where="key rlike '^1$'"))]
        log.gaps[P0] = Trouble(7, "a gap was accepted")
        await read_on(hub)
        browsers = [Browser() for _ in clients]
        await taken(clients[0], browsers[0])
        for _ in range(20):
            log.take(P0, 5)
            await read_on(hub)
        assert hub.ring.first > 1, "the slow client's part is gone"
        for client, browser in zip(clients[1:], browsers[1:], strict=True):
            await taken(client, browser)
        told = {"reason": "stale", "source": "shop", "partition": 0, "message": "a gap was accepted"}
        assert [browser.events for browser in browsers] == [[("resync", told)]] * 3

    run(story)


def test_a_reading_that_was_to_begin_when_another_met_the_file_is_for_nobody_else() -> None:
    """GIVEN a client that is about to read on WHEN the reading of another meets the missing file first THEN it tries
    by itself, and nothing is kept that passed over the partition: with the file back, it goes on."""

    async def story() -> None:
        log, now = MemoryLog(), [0.0]
        ids = log.take(P0, 2)
        log.lost.add((P0, 1))
        hub = await hub_over(log, clock=lambda: now[0])
        client = await hub.client(ALL, places_of("1:shop/0@0"))
        reading = asyncio.ensure_future(client._from_log())
        await asyncio.sleep(0)  # it has looked whether there is something to read, and the reading is to begin
        hub._halted(P0, Cursor(0), lost("shop/p0-b1.parquet"))
        assert await reading == b""
        log.lost.clear()
        now[0] += STUCK_REST_S + 1
        text = await client._from_log()
        assert text and all(one.encode() in text for one in ids)

    asyncio.run(story())


def test_clients_at_many_places_of_a_missing_file_cost_the_others_nothing() -> None:
    """GIVEN clients at as many places of a file as there may be, and more WHEN all are told THEN a client looks at its
    own place alone, what is noted is bounded, the loop is woken once for all, and in the end all is well."""

    async def story() -> None:
        report = Reported()
        hub = await hub_over(log := MemoryLog(), report, clock=lambda: now[0])
        log.take(P0)
        timers = len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]
        for place in range(_HALTS_MAX + 100):
            hub._halted(P0, Cursor(place), lost("shop/p0-b1.parquet"))
        assert len(hub._halts) == _HALTS_MAX and report.waits.keys() == {P0}
        assert len(asyncio.get_running_loop()._scheduled) == timers + 1  # type: ignore[attr-defined]
        mine = places_of("1:shop/0@500,shop/1@7")
        began = time.thread_time()
        for _ in range(1_000):
            assert [stuck.place for stuck in hub.stuck_at(mine)] == [P0] and hub.resting(mine) == {P0}
        assert time.thread_time() - began < 0.5
        now[0] += 1_000
        hub._forget_left()
        assert not hub._halts and not report.waits

    now = [0.0]
    asyncio.run(story())
