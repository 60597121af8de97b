"""Parked deliveries on their way: what is deleted and when, what costs an attempt, and how it ends (D2, D4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.retry import LIMITS
from evermark.delivery.limits import RETRY_WAITS_S
from evermark.delivery.model import Cursor, GroupWork, MadeBy, ParkedEvent, ParkedRow, Subscription, SubscriptionState
from evermark.delivery.run.parked_retries import CLAIM_LEASE_S, ParkedQueue, Tried, after_answer
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook.base import Answer, Try, as_it_is
from evermark.errors import UnreachableError
from evermark.testing.at_once import AtOnce
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, event, spec

SOON = T0 + timedelta(minutes=1)  # the first retry is due
ACCEPTED, REFUSED = Answer(Verdict.ACCEPTED, 204), Answer(Verdict.REFUSED, 422, "HTTP 422")
DOWN = Answer(Verdict.ENDPOINT, 503, "HTTP 503")


class DiedError(BaseException):
    """As kill -9: nothing after it runs."""


@dataclass
class World:
    """A store in memory, a clock that the test moves, and a receiver that says what it is told to."""

    jitter: float = 0.0
    now: datetime = SOON
    answer: Callable[[Try], Answer] = lambda one: ACCEPTED
    sent: list[Try] = field(default_factory=list)
    while_sending: Callable[[], None] = lambda: None
    told: list[tuple[Sequence[Tried], int]] = field(default_factory=list)
    said: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._leases = MemoryLeases(is_gone=lambda holder: True)
        self._owners = 0
        self.store = MemoryDelivery(self._leases, jitter=lambda: 0.0)
        self.take_over()
        begin(self.store, self.epoch, "a")

    def take_over(self) -> None:
        """Another process owns delivery from now on."""
        self._owners += 1
        lease = self._leases.acquire(DELIVER_LEASE, Holder("i", "h", "b", self._owners, "1"), 1e9)
        assert lease is not None
        self.epoch = lease.epoch

    def park(self, *parked: ParkedEvent, at: datetime = T0) -> None:
        self.store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", *parked)], at, self.epoch
        )

    def run(self) -> int:
        sink: Any = self
        runtime = AtOnce(lambda: self.now, lambda: self.jitter)
        log: Any = SimpleNamespace(warning=lambda _event, **about: self.said.append(about))
        return ParkedQueue(self.store, sink, as_it_is, self.epoch, runtime, log, self._on_tried).run()

    def _on_tried(self, tried: Sequence[Tried]) -> None:
        self.told.append((tried, len(self.rows)))

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        self.sent += tries
        self.while_sending()
        return [self.answer(one) for one in tries]

    @property
    def found(self) -> Subscription:
        return self.store.subscription("a")

    @property
    def rows(self) -> list[ParkedRow]:
        return self.store.parked.rows()

    def one(self) -> ParkedRow:
        (row,) = self.rows
        return row


def test_d2_a_row_is_there_until_its_2xx_and_no_other_answer_takes_it_away() -> None:
    """GIVEN one row per answer WHEN all are tried THEN all are kept while sent, and only the taken one goes."""
    world = World()
    answers = [ACCEPTED, *(Answer(verdict) for verdict in Verdict if verdict is not Verdict.ACCEPTED)]
    world.park(*(event(n) for n in range(1, len(answers) + 1)))
    by_event = {event(n).event: answer for n, answer in enumerate(answers, 1)}
    world.answer = lambda one: by_event[one.event]
    during: list[int] = []
    world.while_sending = lambda: during.append(len(world.rows))
    assert world.run() == len(answers)
    assert during == [len(answers)]
    assert [row.event.event_id for row in world.rows] == [f"e{n}" for n in range(2, len(answers) + 1)]


def test_d2_a_crash_between_send_and_delete_sends_again() -> None:
    """GIVEN a row that was sent WHEN the process dies before it is deleted THEN the next owner sends it, once more."""
    world = World()
    world.park(event(1))

    def die() -> None:
        raise DiedError

    world.while_sending = die
    with pytest.raises(DiedError):
        world.run()
    assert world.one().attempts == 1, "a crash spends no attempt"
    world.while_sending = lambda: None
    world.take_over()
    assert world.run() == 1
    assert [one.attempt for one in world.sent] == [2, 2], "the same attempt of the same event"
    assert world.rows == []


def test_d2_a_delete_that_failed_is_made_good_when_the_claim_has_run_out() -> None:
    """GIVEN a 2xx that could not be written down WHEN the lease of the claim ends THEN it is sent and deleted."""
    world = World()
    world.park(event(1))
    real = world.store.parked.delivered

    def unreachable(ids: Sequence[int], epoch: int) -> None:
        raise UnreachableError("state is away")

    world.store.parked.delivered = unreachable  # type: ignore[method-assign]
    assert world.run() == 1
    assert [(about["subscription"], str(about["error"])) for about in world.said] == [("a", "state is away")]
    world.store.parked.delivered = real  # type: ignore[method-assign]
    world.now += timedelta(seconds=CLAIM_LEASE_S - 1)
    assert world.run() == 0, "somebody may still be sending it"
    world.now += timedelta(seconds=1)
    assert world.run() == 1
    assert world.rows == []


@pytest.mark.parametrize("verdict", [Verdict.ENDPOINT, Verdict.BUSY])
def test_d4_an_endpoint_that_is_down_spends_no_attempt_however_long(verdict: Verdict) -> None:
    """GIVEN a parked event WHEN its receiver is down or busy for 50 tries THEN it is as alive as before."""
    world = World(answer=lambda one: Answer(verdict, None, "away"))
    world.park(event(1))
    for _ in range(50):
        assert world.run() == 1
        row = world.one()
        assert (row.attempts, row.event.reason) == (1, "away")
        assert row.next_attempt_at is not None and row.next_attempt_at > world.now
        world.now = max(row.next_attempt_at, world.found.next_attempt_at or world.now)


def test_d4_gone_said_to_a_retry_disables_the_subscription() -> None:
    """GIVEN a parked event WHEN its retry is answered 410 THEN the subscription is disabled, and the row is kept."""
    world = World(answer=lambda one: Answer(Verdict.GONE, 410, "HTTP 410"))
    world.park(event(1))
    world.run()
    assert (world.found.state, world.found.reason) == (SubscriptionState.DISABLED, "HTTP 410")
    assert [row.attempts for row in world.rows] == [1]
    world.now += timedelta(days=30)
    assert world.run() == 0


def test_d4_an_endpoint_that_fails_a_retry_backs_off_as_a_whole() -> None:
    """GIVEN parked events WHEN a retry finds the endpoint down THEN one failure: it leaves the group and waits."""
    world = World(answer=lambda one: Answer(Verdict.ENDPOINT, 503, "HTTP 503", 120.0))
    world.park(event(1), event(2))
    world.run()
    found = world.found
    assert (found.state, found.failures, found.reason) == (SubscriptionState.BEHIND, 1, "HTTP 503")
    assert found.next_attempt_at == SOON + timedelta(seconds=120)
    assert world.store.cursors("a") == {P0: Cursor(1), P1: Cursor(0)}
    assert [row.attempts for row in world.rows] == [1, 1]


def test_d5_failed_retries_suspend_and_one_that_succeeds_brings_it_back() -> None:
    """GIVEN nothing but a parked row WHEN its receiver is down, then up THEN suspended at the tenth, back by itself."""
    world = World(answer=lambda one: DOWN)
    world.park(event(1))
    for failures in range(1, LIMITS.suspend_after + 1):
        assert world.found.state is not SubscriptionState.SUSPENDED
        world.run()
        assert world.found.failures == failures
        world.now += timedelta(minutes=10)
    assert world.found.state is SubscriptionState.SUSPENDED
    world.answer = lambda one: ACCEPTED
    assert world.run() == 1
    assert [one.probe for one in world.sent] == [False, *[True] * LIMITS.suspend_after]
    assert (world.found.state, world.found.failures, world.rows) == (SubscriptionState.BEHIND, 0, [])


@pytest.mark.parametrize("answer", [ACCEPTED, REFUSED])
def test_d5_any_answer_of_a_retry_ends_a_row_of_failures(answer: Answer) -> None:
    """GIVEN five failures WHEN one retry is answered and the next finds it down THEN that is the first of a new row."""
    world = World(answer=lambda one: DOWN)
    world.park(event(1), event(2))
    for _ in range(5):
        world.run()
        world.now += timedelta(minutes=10)
    world.answer = lambda one: answer if one.event == event(1).event else DOWN
    world.run()
    assert world.found.failures == 1


def test_d5_what_this_machine_lacks_is_no_failure_of_the_endpoint() -> None:
    """GIVEN no descriptors left WHEN a retry cannot be sent THEN nobody is blamed, and it is tried again."""
    world = World(answer=lambda one: Answer(Verdict.ENDPOINT, None, "no connection", ours=True))
    world.park(event(1))
    world.run()
    assert (world.found.state, world.found.failures) == (SubscriptionState.LIVE, 0)
    assert world.one().attempts == 1


def test_a_retry_of_a_replay_that_fails_does_not_disturb_live() -> None:
    """GIVEN a row that a replay parked WHEN its retry finds the endpoint down THEN live goes on; 410 ends both."""
    world = World(answer=lambda one: DOWN)
    world.park(replace(event(1), replay_id="r7"))
    world.run()
    assert (world.found.state, world.found.failures) == (SubscriptionState.LIVE, 0)
    world.answer = lambda one: Answer(Verdict.GONE, 410, "HTTP 410")
    world.now += timedelta(minutes=10)
    world.run()
    assert world.found.state is SubscriptionState.DISABLED


def test_d4_a_refused_event_is_tried_on_the_schedule_and_then_dead_until_a_person_acts() -> None:
    """GIVEN an event that is always refused WHEN days pass THEN 5 s to 10 h apart, dead, listed, revivable."""
    world = World(now=T0, answer=lambda one: REFUSED)
    world.park(event(1))
    waits = []
    for _ in range(2 * len(RETRY_WAITS_S)):
        due = world.one().next_attempt_at
        if due is None:
            break
        waits.append((due - world.now).total_seconds())
        world.now = due
        assert world.run() == 1
    assert waits == list(RETRY_WAITS_S) == [5, 300, 1_800, 7_200, 18_000, 36_000, 36_000]
    assert [one.attempt for one in world.sent] == list(range(2, 9))

    world.now += timedelta(days=365)
    assert world.run() == 0
    (dead,) = world.store.parked.rows("a", dead=True)
    assert (dead.attempts, dead.event.status, dead.event.reason) == (8, 422, "HTTP 422")

    assert world.store.parked.release([dead.id], world.now, world.epoch) == 1
    world.answer = lambda one: ACCEPTED
    assert world.run() == 1
    assert world.rows == []


def test_d4_a_subscription_may_have_a_schedule_of_its_own() -> None:
    """GIVEN a subscription with two waits WHEN its event is always refused THEN tried after those, and then dead."""
    world = World(now=T0, answer=lambda one: REFUSED)
    world.store.register([spec("a", retry_waits_s=(60.0, 7.0))], MadeBy.FILE, {}, world.epoch)
    world.park(event(1))
    waits = []
    while (due := world.one().next_attempt_at) is not None:
        waits.append((due - world.now).total_seconds())
        world.now = due
        world.run()
    assert waits == [60.0, 7.0]


@given(st.integers(0, 6), st.sampled_from([REFUSED, DOWN, Answer(Verdict.BUSY, 409)]), st.floats(0, 86_400))
def test_d4_retry_after_is_honoured_by_every_retry(made: int, answer: Answer, asked_s: float) -> None:
    """GIVEN a parked event and an answer with Retry-After WHEN it is put back THEN it is never tried before that."""
    for jitter in (0.0, 1.0):
        _, delay = after_answer(made, replace(answer, retry_after_s=asked_s), jitter)
        assert delay is not None
        assert delay >= asked_s


def test_d4_the_first_retry_waits_as_long_as_the_refusal_asked() -> None:
    """GIVEN an event refused with Retry-After: 600 WHEN it is parked THEN not after five seconds, but after that."""
    world = World(now=T0 + timedelta(seconds=599))
    world.park(replace(event(1), retry_after_s=600.0))
    assert world.run() == 0
    world.now = T0 + timedelta(seconds=600)
    assert world.run() == 1


def test_d4_retries_of_many_are_spread_out() -> None:
    """GIVEN two rows refused at one moment WHEN the dice fall differently THEN they do not come back together."""
    due = []
    for jitter in (0.0, 1.0):
        world = World(jitter=jitter, answer=lambda one: REFUSED)
        world.park(event(1))
        world.run()
        due.append(world.one().next_attempt_at)
    assert due[0] == SOON + timedelta(seconds=300)
    assert due[1] == SOON + timedelta(seconds=375)


def test_d4_what_was_never_sent_has_all_its_attempts() -> None:
    """GIVEN an event parked unsent (too large, or held behind its key) WHEN it is tried THEN that is the first one."""
    world = World(answer=lambda one: REFUSED)
    world.park(event(1, status=None))
    world.run()
    assert [one.attempt for one in world.sent] == [1]
    assert world.one().attempts == 1


def test_d9_a_retry_says_that_it_comes_late_and_keeps_its_delivery_id() -> None:
    """GIVEN one parked by first delivery and one by a replay WHEN retried THEN both historical, each with its id."""
    world = World()
    world.park(event(1), replace(event(2), replay_id="r7"))
    world.run()
    assert [(one.historical, one.replay_id) for one in world.sent] == [(True, None), (True, "r7")]


def test_d7_the_queue_tells_what_came_of_each_retry() -> None:
    """GIVEN two due rows WHEN they are tried THEN each is told with its answer, once all of it is written down."""
    world = World(answer=lambda one: ACCEPTED if one.event == event(1).event else REFUSED)
    world.park(event(1), event(2))
    world.run()
    ((told, rows_left),) = world.told
    assert [(parked.event.event_id, answer) for parked, answer in told] == [("e1", ACCEPTED), ("e2", REFUSED)]
    assert rows_left == 1
    assert world.run() == 0
    assert len(world.told) == 1


def test_d4_a_persons_retry_spends_no_attempt_and_the_schedule_goes_on() -> None:
    """GIVEN an event always refused WHEN a person retries it before each attempt THEN all its own attempts are made."""
    world = World(now=T0, answer=lambda one: REFUSED)
    world.park(event(1))
    own: list[float] = []
    for _ in RETRY_WAITS_S:
        due = world.one().next_attempt_at
        assert due is not None
        own.append((due - world.now).total_seconds())
        world.now += timedelta(seconds=1)
        world.store.parked.release([world.one().id], world.now, world.epoch)
        assert world.run() == 1
        assert world.one().next_attempt_at == due, "the retry left its time as it was"
        world.now = due
        assert world.run() == 1
    assert own == list(RETRY_WAITS_S)
    assert (world.one().is_dead, world.one().attempts) == (True, 8)
    world.store.parked.release([world.one().id], world.now, world.epoch)
    assert world.run() == 1
    assert (world.one().is_dead, world.one().attempts) == (True, 8), "dead as before"


def test_d4_one_that_was_put_off_by_its_endpoint_is_tried_when_a_person_resumes() -> None:
    """GIVEN a retry answered 503 with Retry-After: 24 h WHEN a person resumes the subscription THEN it is tried now."""
    world = World(answer=lambda one: replace(DOWN, retry_after_s=86_400.0))
    world.park(event(1))
    assert world.run() == 1
    world.now += timedelta(minutes=1)
    world.answer = lambda one: ACCEPTED
    assert world.run() == 0
    world.store.resume("a", world.epoch)
    assert (world.run(), world.rows) == (1, [])


def test_d2_a_paused_subscription_keeps_its_rows_and_gets_them_when_resumed() -> None:
    """GIVEN a parked row WHEN a person pauses and resumes THEN nothing is sent meanwhile, and nothing is gone."""
    world = World()
    world.park(event(1))
    world.store.suspend("a", "rest", world.epoch)
    assert (world.run(), len(world.rows)) == (0, 1)
    world.store.resume("a", world.epoch)
    assert world.store.subscription("a").state is SubscriptionState.BEHIND
    assert (world.run(), world.rows) == (1, [])
