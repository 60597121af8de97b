"""What the sink sets aside, and how what was set aside is sent again (D4, D10): over real connections."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import BotSpec, Cursor, Fate, GroupWork, MadeBy
from evermark.delivery.run.parked_retries import ParkedQueue
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook import body, dispatch
from evermark.delivery.webhook.base import Job, Try, as_it_is
from evermark.delivery.webhook.body import Rendering, render_column
from evermark.delivery.webhook.bundles import prepared
from evermark.delivery.webhook.parked_json import row_from_json, row_json
from evermark.delivery.webhook.sink import WebhookSink
from evermark.errors import FormatError
from evermark.event import EVENT
from evermark.runtime import Threads
from evermark.testing.contracts.scene import P0, done, event
from evermark.testing.states import owners
from evermark.testing.until import until
from tests.contract.webhook.webhook_receiver import Got, Receiver, events, one_outcome, spec_for

LINE = ("shop", "public.orders", "0")


@pytest.mark.parametrize("bundle", [1, 4])
def test_d10_the_bound_of_held_events_counts_those_of_earlier_work(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch, bundle: int
) -> None:
    """GIVEN a bound of 5 held events a key WHEN they come in several pieces of work THEN no more than 5 are held."""
    monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", 5)
    spec = spec_for(receiver.url, ordered=True, bundle=bundle)
    fates, parked = [], 1
    for _ in range(4):  # as four batches would bring them
        outcome = one_outcome(sink.deliver([Job(spec, events(2, keys=1), held={LINE: parked})], 5))
        fates.append(outcome.fate)
        parked += len(outcome.parked) if outcome.fate is Fate.DONE else 0
    assert fates == [Fate.DONE, Fate.DONE, Fate.FULL, Fate.FULL]
    assert (parked, receiver.got) == (5, [])


def test_d10_the_bound_counts_the_refused_one_and_those_behind_it_alike(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one refused event WHEN just as many follow as may be held THEN all are parked; one more is too many."""
    monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", 5)
    receiver.answer = lambda got: 400
    spec = spec_for(receiver.url, ordered=True)
    assert one_outcome(sink.deliver([Job(spec, events(6, keys=1))], 5)).fate is Fate.DONE
    assert one_outcome(sink.deliver([Job(spec, events(7, keys=1))], 5)).fate is Fate.FULL


def test_d10_a_parked_event_knows_its_stream(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a refused event WHEN it is parked THEN with the stream its key belongs to."""
    receiver.answer = lambda got: 400
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1, stream="public.users"))], 5))
    assert [(one.stream, one.key) for one in outcome.parked] == [("public.users", "0")]


def test_d6_what_a_bot_refuses_in_one_stream_stops_that_stream_alone(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a bot that refuses one room WHEN its limit is met THEN that room's are parked unasked, others are sent."""
    bad, good = events(5, stream="bad"), events(5, stream="good")
    rows = pa.concat_tables([bad, good.set_column(0, good.schema.field(0), pa.array([f"g{n}" for n in range(5)]))])

    receiver.answer = lambda got: 400 if b"bad" in got.body else 204
    spec = spec_for(receiver.url, bot=BotSpec("shop", "u"), parked_max=2, concurrency=1)
    (outcome,) = [result.outcome for result in sink.deliver([Job(spec, rows)], 5)]
    assert (outcome.fate, outcome.accepted, len(outcome.parked)) == (Fate.DONE, 5, 5)
    assert [event.status for event in outcome.parked] == [400, 400, None, None, None]
    before = len(receiver.got)
    (again,) = [result.outcome for result in sink.deliver([Job(spec, rows, stopped=frozenset({"bad"}))], 5)]
    assert (again.fate, again.accepted, {event.status for event in again.parked}) == (Fate.DONE, 5, {None})
    assert len(receiver.got) - before == 5


def _tries(receiver: Receiver, count: int, **settings: object) -> list[Try]:
    spec = spec_for(receiver.url, **settings)
    return [Try(spec, row_json(events(count), n), 2) for n in range(count)]


def test_d10_retries_keep_the_rate_together_with_first_deliveries(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN 20 a second WHEN five are retried after five first deliveries THEN all ten are spaced, without a burst."""
    begun = time.monotonic()
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url, rate_per_s=20.0), events(5))], 10)).fate is Fate.DONE
    answers = sink.attempt(_tries(receiver, 5, rate_per_s=20.0), 10)
    assert {answer.verdict for answer in answers} == {Verdict.ACCEPTED}
    assert time.monotonic() - begun >= 9 / 20


def test_d10_retries_that_find_no_turn_before_the_deadline_are_left_unsent(
    receiver: Receiver, sink: WebhookSink
) -> None:
    """GIVEN 10 a second and one second WHEN 50 are retried THEN what has no turn by then answers busy, unsent."""
    tries = _tries(receiver, 50, rate_per_s=10.0)  # made before: the first array of a process loads pandas
    begun = time.monotonic()
    answers = sink.attempt(tries, 1.0)
    assert time.monotonic() - begun < 2.0
    sent = [answer for answer in answers if answer.sent]
    # At most the rate; a busy machine misses some turns, which go to nobody else.
    assert 4 <= len(sent) == len(receiver.got) <= 11
    assert {(answer.verdict, answer.sent) for answer in answers if not answer.sent} == {(Verdict.BUSY, False)}


def test_a_replay_that_finds_the_endpoint_down_stops_nobody_else(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN rows of a replay and others WHEN the replay's find the endpoint down THEN the others are asked for."""
    receiver.answer = lambda got: 503 if b'"delivery"' in got.body else 200
    own = _tries(receiver, 3)
    of_replay = [replace(one, replay_id="r1") for one in own]
    answers = sink.attempt([*of_replay, *own], 5)
    assert [answer.verdict for answer in answers] == [Verdict.ENDPOINT] * 3 + [Verdict.ACCEPTED] * 3


def test_a_receiver_that_hangs_holds_up_no_retry_of_another(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a receiver that hangs at a retry WHEN a retry of another is due THEN it is sent and settled meanwhile; what
    the first one answers at last is settled, too.
    """
    answers = threading.Event()

    async def answer(got: Got) -> int:
        if got.raw.path == "/hook/slow":
            await asyncio.to_thread(answers.wait, 60)
        return 204

    receiver.answer = answer
    leases = MemoryLeases()
    epoch = owners(leases)(DELIVER_LEASE)
    store = MemoryDelivery(leases, jitter=lambda: 0.0)
    store.open_partition(P0, 0, epoch)
    names = frozenset({"slow", "well"})
    specs = [spec_for(f"{receiver.url}/{name}", name=name, timeout_s=60.0) for name in names]
    store.register(specs, MadeBy.FILE, {}, epoch)
    log: Any = None
    queue = ParkedQueue(store, sink, as_it_is, epoch, Threads(), log)

    at = datetime.now(UTC) - timedelta(minutes=1)
    for n in (1, 2):
        parked = replace(event(n), event=row_json(events(3), n))
        work = GroupWork(P0, Cursor(n - 1), Cursor(n), names)
        store.settle_group(work, [done(name, parked) for name in names], at, epoch)
        until(lambda: queue.run() == 0 and not store.parked.rows("well"), "the other's retry is settled")
        assert (receiver.under_way, len(store.parked.rows("slow"))) == (1, n)
    assert sorted(got.raw.path for got in receiver.got) == ["/hook/slow", "/hook/well", "/hook/well"]

    answers.set()
    until(lambda: queue.run() == 0 and not store.parked.rows(), "all is settled")
    assert sorted(got.raw.path for got in receiver.got) == ["/hook/slow", "/hook/slow", "/hook/well", "/hook/well"]


def test_d4_a_hiccup_fails_no_retry(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a receiver that fails once WHEN a row is retried THEN it is asked again shortly, as in a first delivery."""
    answers = iter([503, 200])
    receiver.answer = lambda got: next(answers)
    (answer,) = sink.attempt(_tries(receiver, 1), 5)
    assert (answer.verdict, len(receiver.got)) == (Verdict.ACCEPTED, 2)


def test_d5_retries_that_probe_go_one_at_a_time_until_one_is_accepted(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN an endpoint that failed WHEN it still does THEN one request; WHEN it works THEN all, side by side."""
    probes = [replace(one, probe=True) for one in _tries(receiver, 12)]
    receiver.answer = lambda got: 503
    assert {answer.verdict for answer in sink.attempt(probes, 5)} == {Verdict.ENDPOINT}
    assert len(receiver.got) == 1

    receiver.got.clear()
    others = asyncio.Event()

    async def wait_for_the_others(got: object) -> int:
        if len(receiver.got) == 1:
            return 200
        if receiver.under_way == 11:
            others.set()
        await others.wait()
        return 200

    receiver.answer = wait_for_the_others
    assert {answer.verdict for answer in sink.attempt(probes, 5)} == {Verdict.ACCEPTED}
    assert receiver.under_way_max == 11


# events that cannot be rendered


@pytest.fixture
def choosy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering fails for whatever has the word "bad" in it."""

    def render(events: pa.Table, how: Rendering, after: str = "") -> pa.Array:
        if any("bad" in text for text in events.column("payload").to_pylist()):
            raise FormatError("it is bad")
        return render_column(events, how, after)

    monkeypatch.setattr(body, "render_column", render)


def _some_bad(count: int, *bad: int, keys: int = 0) -> pa.Table:
    table = events(count, keys=keys)
    payloads = [json.dumps("bad" if n in bad else n) for n in range(count)]
    at = EVENT.get_field_index("payload")
    return table.set_column(at, EVENT.field("payload"), pa.array(payloads))


@pytest.mark.usefixtures("choosy")
@pytest.mark.parametrize("bundle", [1, 3, 100])
@pytest.mark.parametrize("bad", [(), (0,), (19,), (4, 5, 11), range(20)])
def test_d4_an_event_that_cannot_be_rendered_is_parked_and_the_others_are_delivered(
    receiver: Receiver, sink: WebhookSink, bundle: int, bad: tuple[int, ...]
) -> None:
    """GIVEN some unserialisable events WHEN all are sent THEN those are parked, without an attempt; no other is."""
    spec = spec_for(receiver.url, bundle=bundle)
    for job in ([Job(spec, _some_bad(20, *bad))], prepared([Job(spec, _some_bad(20, *bad))])):
        receiver.got.clear()
        outcome = one_outcome(sink.deliver(job, 10))
        assert (outcome.fate, outcome.accepted) == (Fate.DONE, 20 - len(bad))
        assert [one.event_id for one in outcome.parked] == [f"e{n}" for n in bad]
        assert {(one.reason, one.status) for one in outcome.parked} <= {("unserialisable: it is bad", None)}
        assert sorted(receiver.ids) == sorted(f"e{n}" for n in range(20) if n not in bad)


@pytest.mark.usefixtures("choosy")
@pytest.mark.parametrize("bundle", [1, 3])
def test_d10_an_unserialisable_event_holds_back_what_follows_and_nothing_before_it(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN order per key WHEN the third of a key is bad THEN the first two are sent and the later ones are held."""
    spec = spec_for(receiver.url, ordered=True, bundle=bundle)
    outcome = one_outcome(sink.deliver([Job(spec, _some_bad(10, 4, keys=2))], 10))
    assert [(one.event_id, one.reason) for one in outcome.parked] == [
        ("e4", "unserialisable: it is bad"),
        ("e6", "held behind e4"),
        ("e8", "held behind e4"),
    ]
    assert sorted(receiver.ids) == ["e0", "e1", "e2", "e3", "e5", "e7", "e9"]


def _not_utf8() -> pa.Table:
    """Three rows, of which the second has a key that is no text, and the first one that needs escapes."""
    table = events(3)
    keys = pa.array([b'with "quotes"', b"\xff\xfe", b"plain"], pa.binary()).view(pa.string())
    return table.set_column(EVENT.get_field_index("key"), EVENT.field("key"), keys)


@pytest.mark.parametrize("bundle", [1, 10])
def test_d4_bytes_that_are_no_text_fail_their_event_and_no_other(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN a key that is not UTF-8 WHEN it is sent THEN its event never stops the others, and can still be parked."""
    receiver.answer = lambda got: 400 if b"\xff" in got.body else 200
    job = Job(spec_for(receiver.url, bundle=bundle, ordered=True), _not_utf8(), held={LINE: 1})
    outcome = one_outcome(sink.deliver([job], 10))
    assert (outcome.fate, outcome.accepted) == (Fate.DONE, 2)
    (parked,) = outcome.parked
    assert (parked.event_id, parked.key) == ("e1", "\ufffd\ufffd")
    with pytest.raises(FormatError):
        row_from_json(parked.event)
    (answer,) = sink.attempt([Try(job.spec, parked.event, 2)], 5)
    assert (answer.verdict, answer.sent) == (Verdict.REFUSED, False)


def test_events_without_the_columns_of_the_log_are_nobodys_fault(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN rows without a position WHEN they are sent THEN nothing is parked: it is not the events that are wrong."""
    for bundle in (1, 5):
        job = Job(spec_for(receiver.url, bundle=bundle), events(3).drop_columns(["op"]))
        outcome = one_outcome(sink.deliver([job], 5))
        assert (outcome.fate, outcome.parked) == (Fate.UNFINISHED, ())


@pytest.mark.usefixtures("choosy")
def test_d4_a_retry_that_cannot_be_rendered_is_a_failure_of_its_event(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN parked rows of which one is bad WHEN retried THEN it is refused unsent, and the others are delivered."""
    table = _some_bad(3, 1)
    answers = sink.attempt([Try(spec_for(receiver.url), row_json(table, n), 2) for n in range(3)], 5)
    assert [answer.verdict for answer in answers] == [Verdict.ACCEPTED, Verdict.REFUSED, Verdict.ACCEPTED]
    assert answers[1].reason == "unserialisable: FormatError"
