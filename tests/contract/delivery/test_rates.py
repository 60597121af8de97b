"""D10: the rate of a subscription holds for all processes of a deployment together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.decide.pace import WAIT_S_MAX, requests_in_stretch
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.store.postgres_rates import PostgresRates, SharedRates
from evermark.delivery.webhook.client import _PROCESS, HttpLoop, close_http_loops, use_rates
from evermark.secrets import Plain
from evermark.state.connection import State
from evermark.testing.contracts.scene import begin
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from evermark.testing.until import until

RATE = 40.0


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


@pytest.fixture
def rates(state: State) -> PostgresRates:
    begin(PostgresDelivery(state), owners(PostgresLeases(state))(DELIVER_LEASE), "a", "b")
    return PostgresRates(state)


@pytest.fixture
def two_processes(rates: PostgresRates) -> Iterator[list[HttpLoop]]:
    """Two loops know nothing of each other, as those of two processes; State is what they share."""
    use_rates(lambda: rates)
    loops = [HttpLoop(), HttpLoop()]
    yield loops
    for loop in loops:
        loop.close()
    close_http_loops()


def taken(rates: PostgresRates, name: str, replay: str = "", span_s: float = 10.0) -> float:
    begins_s = rates.take(name, replay, span_s, WAIT_S_MAX)
    assert begins_s is not None
    return begins_s


async def _turns(http: HttpLoop, count: int) -> list[float]:
    """When each of some requests may be sent, all wanted at once."""

    async def one() -> float:
        assert await http.turn(("a", None), RATE, http.loop.time() + 60)
        return time.monotonic()

    return list(await asyncio.gather(*(one() for _ in range(count))))


def test_d10_two_processes_together_keep_the_rate(two_processes: list[HttpLoop]) -> None:
    """GIVEN a rate of 40 a second WHEN two processes want to send 60 each THEN both do, and together keep it."""
    began = time.monotonic()
    futures = [http.submit(_turns(http, 60)) for http in two_processes]
    sent = sorted(at for future in futures for at in future.result(timeout=120))
    assert len(sent) == 120
    assert sent[-1] - began >= 119 / RATE - 0.05
    firsts = [future.result()[0] for future in futures]
    assert abs(firsts[0] - firsts[1]) < 30, "neither waits for the other's end"


def test_d10_stretches_never_overlap_and_one_subscriptions_are_its_own(rates: PostgresRates) -> None:
    """GIVEN a subscription WHEN stretches are taken one after another THEN each begins where the last one ends; another
    subscription's, and a replay's, begin at once."""
    begins = []
    for _ in range(4):
        asked = time.monotonic()
        begins.append(asked + taken(rates, "a"))
    assert begins == pytest.approx([begins[0] + 10.0 * n for n in range(4)], abs=1.0)
    assert taken(rates, "b") <= 0.01
    assert taken(rates, "a", "r1") <= 0.01


def test_d10_a_stretch_that_begins_too_late_is_left_to_whoever_comes_later(rates: PostgresRates) -> None:
    """GIVEN a rate of one request in 30 seconds WHEN lanes of 2 seconds ask again and again THEN they take nothing away
    from the one that comes when its time is near."""
    taken(rates, "a", span_s=30.0)
    for _ in range(5):
        assert rates.take("a", "", 30.0, wait_s=2.0) is None
    assert taken(rates, "a", span_s=30.0) <= 30.0


def test_d10_a_lane_shorter_than_a_turn_reserves_none(two_processes: list[HttpLoop], rates: PostgresRates) -> None:
    """GIVEN a rate of one request in 30 seconds, and one sent WHEN a process has a second left THEN it gets no turn,
    and the next stretch stays free."""
    first, second = two_processes
    turn = ("a", None)
    assert first.submit(first.turn(turn, 1 / 30, first.loop.time() + 60)).result(timeout=60)
    for http in (first, second):
        assert not http.submit(http.turn(turn, 1 / 30, http.loop.time() + 1)).result(timeout=60)
    assert taken(rates, "a", span_s=30.0) <= 30.0


class _Asked:
    """Rates that note when they were asked, and answer when they are let."""

    def __init__(self) -> None:
        self.times = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def take(self, _subscription: str, _replay_id: str, _span_s: float, _wait_s: float) -> float:
        self.times += 1
        assert self.may_answer.wait(120)
        return 60.0  # far enough ahead that no moment passes while the test looks

    def rest(self) -> None: ...


@pytest.mark.parametrize(("rate", "asked"), [(RATE, 2), (1.0, 1)])
def test_d10_the_next_stretch_is_asked_for_before_it_is_needed(rate: float, asked: int) -> None:
    """GIVEN a State that answers late WHEN the last request of a stretch may be sent THEN the next one was asked for
    already, so that none of it is lost; but not where a stretch is one request, which would be kept from others."""
    state = _Asked()
    use_rates(lambda: state)
    http = HttpLoop()

    async def turns() -> None:
        for _ in range(requests_in_stretch(rate)):
            assert await http._next_turn(("a", None), rate, http.loop.time() + 600)
            state.may_answer.clear()

    try:
        http.submit(turns()).result(timeout=120)
        until(lambda: state.times == asked, "State was not asked")
        assert bool(http._ahead) is (asked == 2)
    finally:
        state.may_answer.set()
        http.close()
        close_http_loops()


def test_d10_a_task_that_has_sent_keeps_no_connection(state: State, pg_server: PostgresServer) -> None:
    """GIVEN a worker of Spark's WHEN its task has asked for turns and ended THEN it has no connection to State, and the
    next task asks as well."""
    begin(PostgresDelivery(state), owners(PostgresLeases(state))(DELIVER_LEASE), "a")
    shared = SharedRates(Plain(pg_server.socket_dsn()), state.schema)
    http = HttpLoop()
    try:
        for _ in range(2):
            with shared.shared():
                assert http.submit(http.turn(("a", None), RATE, http.loop.time() + 60)).result(timeout=60)
            rates = _PROCESS.rates
            assert isinstance(rates, PostgresRates) and not rates._state._idle
    finally:
        http.close()
        close_http_loops()


@pytest.mark.parametrize("was_at", ["1 day", "2 minutes"])
def test_d10_what_was_given_away_far_ahead_does_not_count(rates: PostgresRates, state: State, was_at: str) -> None:
    """GIVEN time given away further ahead than anyone may take: at a lower rate, or before the database's clock was set
    back THEN the next stretch begins at once."""
    taken(rates, "a")
    with state.connection() as conn:
        conn.execute("update rates set free_at = clock_timestamp() + %s::interval", (was_at,))
    assert taken(rates, "a") <= 0.01
    assert 5.0 < taken(rates, "a") <= 10.0
