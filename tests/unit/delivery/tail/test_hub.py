"""The live tail: exact for every client, whatever it misses; one reading of the log for all that are live."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.tail import hub as hub_module
from evermark.delivery.tail.catching_up import Reading, SharedReadings, end_of_reading
from evermark.delivery.tail.hub import LINGER_S, Client, Hub, TailLimits
from evermark.delivery.tail.place import Places, Trouble, places_of
from evermark.delivery.tail.wish import Wish
from evermark.errors import BusyError
from tests.unit.delivery.tail.tail_scene import P0, P1, AtOnce, Browser, MemoryLog, Reported, hub_over, taken

ALL = Wish()
QUICK = TailLimits(rest_s=0.0, pace_s=0.0, retry_s=0.0)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from([P0, P1]), st.integers(1, 7)),
        st.tuples(st.just("read on"), st.integers(0, 1)),
        st.tuples(st.just("follow"), st.integers(0, 1), st.integers(1, 6)),
        st.tuples(st.just("restart"), st.integers(0, 1)),
    ),
    max_size=40,
)


async def follows(hub: Hub, browser: Browser, pieces_max: int = 1_000, wish: Wish = ALL) -> None:
    """Connect with the browser's last id, take what there is, hang up."""
    asked = places_of(browser.last_id) if browser.last_id else None
    connecting = asyncio.ensure_future(hub.client(wish, asked))
    while not connecting.done():
        await asyncio.sleep(0)
        await read_on(hub)
    await taken(connecting.result(), browser, pieces_max)


async def read_on(hub: Hub) -> None:
    while await hub._read_on():
        pass


@given(steps=STEPS, rows_max=st.integers(1, 9), chunk=st.sampled_from([1, 600, 100_000]), ring=st.integers(1, 2_000))
def test_d14_a_client_gets_every_event_once_across_restarts_and_instances(
    steps: list[tuple[Any, ...]], rows_max: int, chunk: int, ring: int
) -> None:
    """GIVEN two instances that read on when they like, pieces and rings of any size, a client that hangs up after any
    piece and goes on with either instance by its last id WHEN all is done THEN it has every event since it began, once,
    in the order of each partition (D14).
    """
    limits = replace(QUICK, rows=rows_max, chunk_bytes=chunk, ring_bytes=ring)
    asyncio.run(_story(steps, limits))


async def _story(steps: list[tuple[Any, ...]], limits: TailLimits) -> None:
    log = MemoryLog()
    log.take(P0, 2)
    hubs = [await hub_over(log, limits=limits), await hub_over(log, limits=limits)]
    browser = Browser()
    await follows(hubs[0], browser, 1)
    before = set(log.ids())
    for what, *more in [*steps, ("follow", 1, 10_000)]:
        if what == "take":
            log.take(*more)
        elif what == "read on":
            await hubs[more[0]]._read_on()
        elif what == "restart":
            hubs[more[0]] = await hub_over(log, limits=limits)
        else:
            await follows(hubs[more[0]], browser, more[1])
    wanted = [one for one in log.ids() if one not in before]
    assert Counter(browser.ids) == Counter(wanted)
    for place in ("shop/0/", "shop/1/"):
        assert [i for i in browser.ids if i.startswith(place)] == [i for i in wanted if i.startswith(place)]
    assert browser.events == [], "no resync, nothing omitted"


def run(story: Any) -> None:
    asyncio.run(story())


def test_nothing_beyond_log_head_is_sent() -> None:
    """GIVEN a batch that is committed and not durable yet WHEN clients follow, live and by an old id THEN they do not
    get it; WHEN it is durable THEN they do.
    """

    async def story() -> None:
        log = MemoryLog()
        first = log.take(P0)
        hub, live, old = await hub_over(log), Browser(), Browser(last_id="1:shop/0@0")
        await follows(hub, live)
        late = log.take(P0, durable=False)
        for browser in (live, old):
            await follows(hub, browser)
        assert live.ids == [] and old.ids == first
        log.head[P0] = 2
        for browser in (live, old):
            await follows(hub, browser)
        assert live.ids == late and old.ids == first + late

    run(story)


def test_live_clients_share_one_reading_and_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN 50 clients with three wishes WHEN ten batches come THEN each batch is read once and each event rendered
    once, and each client has what it wants.
    """
    rendered: list[int] = []
    events = hub_module.events
    monkeypatch.setattr(
        hub_module, "events", lambda rows, *a, **k: rendered.append(rows.num_rows) or events(rows, *a, **k)
    )

    async def story() -> None:
        log = MemoryLog()
        log.take(P0)
        hub = await hub_over(log)
        wishes = [ALL, Wish(where="data.n = 1"), Wish(streams=("public.users",))]
        clients = [await hub.client(wishes[n % 3], None) for n in range(50)]
        made = [log.take(P0, 2, stream="public.users" if n % 2 else "public.orders") for n in range(10)]
        log.pieces_read = 0
        for n in range(10):
            log.head[P0] = n + 2
            await read_on(hub)
        assert log.pieces_read == 10 and sum(rendered) == 20
        for number, client in enumerate(clients):
            browser = Browser()
            await taken(client, browser)
            wanted = [[i for b in made for i in b], [b[1] for b in made], [i for b in made[1::2] for i in b]]
            assert browser.ids == wanted[number % 3]
        assert log.pieces_read == 10 and sum(rendered) == 20

    run(story)


def test_a_slow_client_reads_the_log_and_meets_the_others_again() -> None:
    """GIVEN a client that takes nothing while more comes than the ring keeps WHEN it goes on THEN it reads the log,
    which is counted, has every event once, and is live again; nothing was kept for it.
    """

    async def story() -> None:
        log, report = MemoryLog(), Reported()
        log.take(P0)
        hub = await hub_over(log, report, limits=replace(QUICK, ring_bytes=5_000))
        client, browser = await hub.client(ALL, None), Browser()
        pieces = client.pieces()
        browser.read(await anext(pieces))
        made: list[str] = []
        for _ in range(20):
            made += log.take(P0, 5)
            await read_on(hub)
        assert hub.ring._bytes <= 5_000 + 3_000 and hub.ring.first > 0
        while len(browser.ids) < len(made):
            browser.read(await anext(pieces))
        assert browser.ids == made and report.fallbacks == 1
        read = log.pieces_read
        more = log.take(P0)
        await read_on(hub)
        browser.read(await anext(pieces))
        assert browser.ids == made + more and log.pieces_read == read + 1, "by the ring"
        await pieces.aclose()
        client.close()
        assert report.now == 0 and hub.ring.wishes == ()

    run(story)


def test_slow_clients_read_the_log_together() -> None:
    """GIVEN ten clients of one wish that take nothing, from different places, and one of another wish, while more comes
    than the ring keeps WHEN they go on THEN each has its events once and in order, and the log is hardly read more
    often than for one of each wish; what is kept for them is bounded.
    """
    other = Wish(where="data.n = 1")

    async def story() -> None:
        log, report = MemoryLog(), Reported()
        log.take(P0)
        hub = await hub_over(log, report, limits=replace(QUICK, ring_bytes=1, chunk_bytes=3_000, shared_bytes=50_000))
        made: list[list[str]] = []
        clients: list[tuple[AsyncIterator[bytes], Browser, int]] = []
        for number in range(11):
            client = await hub.client(other if number == 10 else ALL, None)
            pieces, browser = client.pieces(), Browser()
            browser.read(await anext(pieces))
            clients.append((pieces, browser, len(made)))
            made.append(log.take(P0, 3))
            await read_on(hub)
        made += [log.take(P0, 3) for _ in range(200)]
        await read_on(hub)
        log.pieces_read = 0
        last = {made[-1][-1], made[-1][1]}
        # Each in its turn takes a piece, as clients of the same slowness do.
        while some := [one for one in clients if not last & set(one[1].ids)]:
            for pieces, browser, _ in some:
                browser.read(await anext(pieces))
            assert hub.readings._bytes <= 50_000
        for pieces, browser, began in clients[:10]:
            assert browser.ids == [one for batch in made[began:] for one in batch]
            await pieces.aclose()
        assert clients[10][1].ids == [batch[1] for batch in made[10:]]
        alone = len(made)  # of one reader of each wish: a batch at a time
        assert log.pieces_read < 2 * alone, "and not as often as there are clients"

    run(story)


@pytest.mark.parametrize("places", ["1:shop/0@7", "1:" + ",".join(f"shop/{n}@7" for n in range(100))])
def test_readings_without_text_are_bounded_too(places: str) -> None:
    """GIVEN clients that few events are for WHEN they read far more than is kept THEN what was read last is kept, what
    was read first is not, and the memory that is taken is about as much as there may be."""
    at = places_of(places)

    async def story() -> None:
        readings, read = SharedReadings(200_000), 0

        async def one() -> Reading:
            nonlocal read
            read += 1
            return Reading(b"", dict(at), 0, (), None)

        def key(n: int) -> tuple[int, Places]:
            return n, frozenset(at.items())

        tracemalloc.start()
        began = tracemalloc.get_traced_memory()[0]
        for n in range(1_000):
            await readings.get(key(n), one)
        assert tracemalloc.get_traced_memory()[0] - began < 2 * 200_000
        tracemalloc.stop()
        await readings.get(key(999), one)
        assert read == 1_000
        await readings.get(key(0), one)
        assert read == 1_001

    run(story)


@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    bytes_max=st.integers(1, 2_000),
    data=st.data(),
)
def test_a_reading_ends_with_a_batch_where_it_can(sizes: list[int], bytes_max: int, data: st.DataObject) -> None:
    """GIVEN events of any size in batches of any size THEN a reading has at least one, never more than one beyond its
    size, and not less than half of what fits where that has the end of a batch."""
    batches = sorted(data.draw(st.lists(st.integers(1, 20), min_size=len(sizes), max_size=len(sizes))))
    kept = end_of_reading(sizes, batches, bytes_max)
    fits = next((n for n in range(1, len(sizes)) if sum(sizes[:n]) >= bytes_max), len(sizes))
    assert 1 <= kept <= fits
    if kept < len(sizes):
        ends = [n for n in range(max(1, fits // 2), fits + 1) if batches[n] != batches[n - 1]]
        assert kept == fits if not ends else kept in ends


def test_a_wish_that_came_while_a_batch_was_matched_misses_nothing() -> None:
    """GIVEN a batch that is being matched WHEN a client comes with a wish nobody had THEN it gets its part of the
    batch.
    """

    async def story() -> None:
        log = MemoryLog()
        log.take(P0)
        hub = await hub_over(log)
        first = await hub.client(ALL, None)
        made = log.take(P0, 3)
        chunks, _ = hub._made(hub.ring.wishes, hub.ring.places, frozenset())
        late = await _joined(hub, Wish(where="data.n = 2"))
        for chunk in chunks:
            hub.ring.add(chunk)
        browser = Browser()
        await taken(late, browser)
        assert browser.ids == made[2:]
        first.close()

    run(story)


async def _joined(hub: Hub, wish: Wish) -> Client:
    """A client that stands where the ring ends now."""
    return Client(hub, wish, hub.ring.places, [])


def test_s4_a_gap_is_told_once_live_and_to_those_who_come_back() -> None:
    """GIVEN clients, one of them away WHEN a gap of a partition is let be THEN the live one is told to resync at once
    and the other when it comes back, each once, by any instance (S4).
    """

    async def story() -> None:
        log = MemoryLog()
        log.take(P0)
        hub, live, away = await hub_over(log), Browser(), Browser()
        await follows(hub, live)
        await follows(hub, away)
        client = await hub.client(ALL, places_of(live.last_id))
        log.gaps[P0] = Trouble(7, "a gap was accepted: the slot is gone")
        await read_on(hub)
        await taken(client, live)
        for browser in (live, away):
            await follows(await hub_over(log), browser)
            await follows(hub, browser)
            assert browser.events == [
                ("resync", {"reason": "stale", "source": "shop", "partition": 0, "message": log.gaps[P0].said})
            ]

    run(story)


def test_a_gap_that_another_instance_told_of_first_is_no_other_log() -> None:
    """GIVEN a client that one instance told of a gap WHEN it goes on at once with another, which has not looked since
    THEN that one looks again, and tells it nothing."""

    async def story() -> None:
        log = MemoryLog()
        log.take(P0)
        late, browser = await hub_over(log), Browser()
        log.gaps[P0] = Trouble(7, "a gap was accepted")
        await follows(await hub_over(log), browser)
        browser.events.clear()
        log.heard = {}
        await follows(late, browser)
        assert browser.events == []
        log.gaps.clear()
        await follows(late, browser)
        assert [said["reason"] for _, said in browser.events] == ["ahead"]

    run(story)


def test_a_client_whose_place_retention_has_passed_is_told_and_goes_on() -> None:
    """GIVEN an id older than what the log still has, and one from a log that had more WHEN they connect THEN each is
    told to resync, gets all that there is after its place, and is not told again.
    """

    async def story() -> None:
        log = MemoryLog()
        made = [log.take(P0) for _ in range(5)]
        log.removed[P0] = 3
        hub = await hub_over(log)
        for last_id, reason, wanted in (
            ("1:shop/0@1", "gone", made[3] + made[4]),
            ("1:shop/0@3", None, made[3] + made[4]),
            ("1:shop/0@9", "ahead", []),
        ):
            browser = Browser(last_id=last_id)
            for _ in range(2):
                await follows(hub, browser)
            assert browser.ids == wanted and [d["reason"] for _, d in browser.events] == ([reason] if reason else [])

    run(story)


def test_an_idle_client_is_moved_past_what_it_did_not_want_and_told_at_the_end() -> None:
    """GIVEN a client that wants nothing of what comes WHEN it is quiet for a while THEN a heartbeat moves its id past
    it; WHEN the instance stops THEN it is told when to connect again.
    """

    async def story() -> None:
        log, now = MemoryLog(), [0.0]
        log.take(P0)
        hub = await hub_over(log, clock=lambda: now[0])
        client, browser = await hub.client(Wish(streams=("other",)), None), Browser()
        pieces = client.pieces()
        browser.read(await anext(pieces))
        log.take(P0)
        await read_on(hub)
        now[0] += hub.limits.heartbeat_s
        browser.read(await anext(pieces))
        assert places_of(browser.last_id)[P0].cursor.batch == 2 and browser.ids == []
        browser.retry_ms = None
        hub.close()
        browser.read(await anext(pieces))
        assert browser.retry_ms is not None
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)

    run(story)


def test_a_doubt_is_left_to_spark_and_holds_up_no_other() -> None:
    """GIVEN a predicate without exact steps, and one that a payload leaves in doubt WHEN events come THEN Spark is
    asked for these two alone, and until it answers they wait; a third client has its events.
    """

    async def story() -> None:
        log, asked, runs = MemoryLog(), [], [False]
        log.take(P0)

        def by_spark(place: Any, piece: Any, wish: Wish) -> set[tuple[int, str]]:
            if not runs[0]:
                raise BusyError("Spark does not run")
            asked.append(wish)
            return {(row["batch"], row["position"]) for row in piece.rows.to_pylist() if row["key"] == "1"}

        hub = await hub_over(log, by_spark=by_spark)
        wishes = [Wish(where="key rlike '^1$'"), Wish(where="data.n = 1"), ALL]
        clients = [await hub.client(wish, None) for wish in wishes]
        made = log.take(P0, 3)
        log.batches[P0][-1][1]["payload"] = '{"n": 1, "n": 2}'
        await read_on(hub)
        browsers = [Browser(), Browser(), Browser()]
        await taken(clients[2], browsers[2])
        assert browsers[2].ids == made and asked == []
        runs[0] = True
        for client, browser in zip(clients[:2], browsers[:2], strict=True):
            await taken(client, browser)
            assert browser.ids == made[1:2]
        assert set(asked) == set(wishes[:2])

    run(story)


class Held(AtOnce):
    """Runs nothing until it may."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append(lambda: future.set_result(fn(*args, **kwargs)))
        return future

    def go_on(self) -> None:
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            one()


def test_a_hub_does_not_end_while_a_client_joins_it() -> None:
    """GIVEN a hub without clients, and one that asks to join it while State is slow WHEN the time of the hub is over
    THEN it goes on, and the client gets what comes."""

    async def story() -> None:
        log, now, browser = MemoryLog(), [0.0], Browser()
        log.take(P0)
        hub = await hub_over(log, clock=lambda: now[0])
        hub.others = held = Held()
        running, joining = asyncio.create_task(hub.run()), asyncio.create_task(hub.client(ALL, None))
        for passed in (LINGER_S - 1, LINGER_S + 1, 3 * LINGER_S):
            now[0] = passed
            hub.wake()
            for _ in range(20):
                await asyncio.sleep(0)
        assert held.waiting and not joining.done()
        while not joining.done():
            held.go_on()
            await asyncio.sleep(0)
        assert not running.done()
        made = log.take(P0)
        hub.wake()
        pieces = joining.result().pieces()
        while not browser.ids:
            browser.read(await asyncio.wait_for(anext(pieces), 20))
        assert browser.ids == made
        await pieces.aclose()
        joining.result().close()
        now[0] += 2 * LINGER_S
        hub.wake()
        await asyncio.wait_for(running, 20)

    run(story)


def test_a_hub_that_ends_tells_its_clients_to_connect_again() -> None:
    """GIVEN a client of a hub WHEN the hub ends, however THEN the client is told to connect again."""

    async def story() -> None:
        hub, browser = await hub_over(MemoryLog()), Browser()
        client = await hub.client(ALL, None)
        running = asyncio.create_task(hub.run())
        following = asyncio.create_task(takes_all(client, browser))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait_for(following, 20)
        assert browser.retry_ms == 2_000

    run(story)


async def takes_all(client: Client, browser: Browser) -> None:
    async for text in client.pieces():
        browser.read(text)
