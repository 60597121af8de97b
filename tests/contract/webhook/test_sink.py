"""The webhook sink against real receivers on loopback: what is promised in `delivery/sinks/base.py`."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from aiohttp import web
from standardwebhooks import Webhook

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Fate, Outcome, SourcePartition
from evermark.delivery.webhook import body, dispatch
from evermark.delivery.webhook import sink as sinks
from evermark.delivery.webhook.base import Job, Try
from evermark.delivery.webhook.body import Rendering
from evermark.delivery.webhook.parked_json import row_json
from evermark.delivery.webhook.rendered_once import SharedBodies
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.webhook.sink import WebhookSink
from evermark.errors import FormatError
from evermark.event import EVENT
from tests.contract.webhook.webhook_receiver import SECRET, Got, Receiver, events, one_outcome, spec_for


def test_accepted_events_are_done_signed_and_carry_the_promised_headers(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a healthy receiver WHEN events are delivered THEN each arrives once, verifiable, as itself."""
    spec = spec_for(receiver.url, headers={"x-team": "billing"})
    results = sink.deliver([Job(spec, events(30, batch_rows=10))], 10)
    assert [(r.place, r.batch, r.outcome.fate, r.outcome.accepted) for r in results] == [
        (SourcePartition("shop", 0), batch, Fate.DONE, 10) for batch in (1, 2, 3)
    ]
    assert sorted(receiver.ids) == sorted(f"e{n}" for n in range(30))
    for got in receiver.got:
        Webhook(SECRET).verify(got.body, got.headers)
        assert [got.headers["webhook-id"]] == got.ids
        assert got.headers["content-type"] == "application/json"
        assert got.headers["user-agent"].startswith("evermark/")
        assert got.headers["x-team"] == "billing"
        assert "cookie" not in got.headers


def test_both_secrets_sign_during_a_rotation_after_being_opened(receiver: Receiver, sink: WebhookSink) -> None:
    """Secrets arrive sealed; the opener is asked, and every secret signs."""
    other = new_secret()
    sealed = {"sealed:a": SECRET, "sealed:b": other}
    sealed["sealed:c"] = "Bearer of good news"
    spec = spec_for(receiver.url, secrets=("sealed:a", "sealed:b"), headers={"authorization": "sealed:c"})
    assert one_outcome(sink.deliver([Job(spec, events(1), sealed.__getitem__)], 10)).fate is Fate.DONE
    for secret in (SECRET, other):
        Webhook(secret).verify(receiver.got[0].body, receiver.got[0].headers)
    # THEN a header's value was sealed, too
    assert receiver.got[0].headers["authorization"] == "Bearer of good news"


@pytest.mark.parametrize("bundle", [1, 3])
@pytest.mark.parametrize(
    ("form", "kind", "around"),
    [
        ("standard", "application/json", "events"),
        ("cloudevents", "application/cloudevents", None),
        ("raw", "application/json", None),
    ],
)
def test_every_form_of_body_arrives_whole_and_signed(
    receiver: Receiver, sink: WebhookSink, bundle: int, form: str, kind: str, around: str | None
) -> None:
    """GIVEN a form of body WHEN events are sent, singly and bundled THEN each is JSON of that form, and verifies."""
    spec = spec_for(receiver.url, body=form, bundle=bundle, concurrency=1)
    assert one_outcome(sink.deliver([Job(spec, events(6))], 10)).fate is Fate.DONE
    assert len(receiver.got) == 6 // bundle
    seen = []
    for got in receiver.got:
        Webhook(SECRET).verify(got.body, got.headers)
        assert got.headers["content-type"].startswith(kind)
        body = json.loads(got.body)
        if bundle > 1:
            body = body[around] if around else body
        seen += body if bundle > 1 else [body]
    assert len(seen) == 6
    if form == "cloudevents":
        assert sorted(one["id"] for one in seen) == [f"e{n}" for n in range(6)]
        assert {one["specversion"] for one in seen} == {"1.0"}


def test_a_replay_has_its_own_delivery_ids_and_says_historical(receiver: Receiver, sink: WebhookSink) -> None:
    """So that it reaches the handler in spite of the receiver's memory of ids."""
    sink.deliver([Job(spec_for(receiver.url), events(1), historical=True, replay_id="r7")], 10)
    (got,) = receiver.got
    assert got.headers["webhook-id"] == "e0.r7"
    meta = json.loads(got.body)["evermark"]
    assert (meta["id"], meta["delivery"], meta["historical"]) == ("e0", "e0.r7", True)


@pytest.mark.parametrize("bundle", [1, 7])
def test_events_of_a_key_arrive_in_log_order_one_at_a_time(receiver: Receiver, sink: WebhookSink, bundle: int) -> None:
    """GIVEN slow answers in random order THEN no key is overtaken, and keys do not wait for each other."""
    busy: set[str] = set()
    clashes: list[str] = []

    async def answer(got: Got) -> int:
        parsed = json.loads(got.body)
        keys = {one["evermark"]["key"] for one in parsed.get("events", [parsed])}
        clashes.extend(keys & busy)
        busy.update(keys)
        await asyncio.sleep(hash(got.body) % 5 / 1000)
        busy.difference_update(keys)
        return 200

    receiver.answer = answer
    spec = spec_for(receiver.url, bundle=bundle, concurrency=8)
    results = sink.deliver([Job(spec, events(200, keys=3))], 30)
    assert one_outcome(results).fate is Fate.DONE
    assert not clashes
    for key in range(3):
        got = [int(ident[1:]) for ident in receiver.ids if int(ident[1:]) % 3 == key]
        assert got == list(range(key, 200, 3))
    assert 1 < receiver.under_way_max <= 3


@pytest.mark.parametrize("bundle", [1, 7])
def test_a_truncate_is_sent_between_what_came_before_and_after_it(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN answers that take their time WHEN a stream is truncated THEN no event of it passes the truncate."""

    async def answer(got: Got) -> int:
        await asyncio.sleep(hash(got.body) % 5 / 1000)
        return 200

    receiver.answer = answer
    table, at = events(60, keys=20), 30
    for name, value in (("op", "truncate"), ("key", None)):
        column = table.column(name).to_pylist()
        column[at] = value
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(column, pa.string()))
    results = sink.deliver([Job(spec_for(receiver.url, bundle=bundle, concurrency=8), table)], 30)
    assert one_outcome(results).fate is Fate.DONE
    assert [int(ident[1:]) for ident in receiver.ids] == list(range(60))


def test_keyless_events_go_side_by_side(receiver: Receiver, sink: WebhookSink) -> None:
    """An event without a key waits for no other."""

    async def answer(_: Got) -> int:
        await asyncio.sleep(0.05)
        return 200

    receiver.answer = answer
    sink.deliver([Job(spec_for(receiver.url, concurrency=10), events(20, key=None))], 10)
    assert len(receiver.ids) == 20
    assert receiver.under_way_max > 5


@pytest.mark.parametrize(("rows", "posts"), [(100, 1), (10, 1), (1_000, None)])
def test_bundles_are_as_full_as_order_allows(
    receiver: Receiver, sink: WebhookSink, rows: int, posts: int | None
) -> None:
    """Few events are not spread over many requests; a bundle never exceeds its size."""
    sink.deliver([Job(spec_for(receiver.url, bundle=100), events(rows))], 10)
    assert sorted(receiver.ids) == sorted(f"e{n}" for n in range(rows))
    assert posts is None or len(receiver.got) == posts
    assert all(len(got.ids) <= 100 for got in receiver.got)
    assert len(receiver.got) <= 2 * rows / 100 + 1
    for got in receiver.got:
        Webhook(SECRET).verify(got.body, got.headers)


def test_bundles_stay_within_the_body_limit(receiver: Receiver, sink: WebhookSink) -> None:
    """Large events make smaller bundles."""
    table = events(50, payload=json.dumps("x" * 1_000))
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, bundle=100, body_bytes_max=8_000), table)], 10))
    assert (outcome.fate, outcome.accepted) == (Fate.DONE, 50)
    assert all(len(got.body) <= 8_000 for got in receiver.got)


@pytest.mark.parametrize("bundle", [1, 16])
def test_a_refused_event_is_parked_alone(receiver: Receiver, sink: WebhookSink, bundle: int) -> None:
    """GIVEN a receiver that cannot stomach two events THEN exactly those are parked, bundled or not."""
    receiver.answer = lambda got: web.Response(status=422, text="no 5s\n") if {"e5", "e37"} & set(got.ids) else 200
    table = events(64)
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, bundle=bundle), table)], 10))
    assert (outcome.fate, outcome.accepted) == (Fate.DONE, 62)
    assert [(p.event_id, p.status, p.reason, p.key) for p in outcome.parked] == [
        (f"e{n}", 422, "HTTP 422: no 5s", str(n)) for n in (5, 37)
    ]
    assert outcome.parked[0].event == row_json(table, 5)


def test_a_parked_event_holds_back_its_key_and_no_other_when_ordered(receiver: Receiver, sink: WebhookSink) -> None:
    """Later events of the key are parked behind it unsent; other keys go on."""
    receiver.answer = lambda got: 400 if "e3" in got.ids else 200
    for bundle in (1, 4):
        receiver.got.clear()
        spec = spec_for(receiver.url, ordered=True, bundle=bundle)
        outcome = one_outcome(sink.deliver([Job(spec, events(20, keys=5))], 10))
        assert [p.event_id for p in outcome.parked] == ["e3", "e8", "e13", "e18"]
        assert {p.reason for p in outcome.parked[1:]} == {"held behind e3"}
        # A refused bundle may have shown later ones to the receiver, but it took none of them.
        assert bundle > 1 or not {"e8", "e13", "e18"} & set(receiver.ids)
        assert outcome.accepted == 16


def moving(*keys: tuple[str, str | None]) -> pa.Table:
    """Events of these keys; the second one is the key that the record left."""
    table = events(len(keys))
    for name, values in zip(("key", "previous_key"), zip(*keys, strict=True), strict=True):
        table = table.set_column(EVENT.get_field_index(name), EVENT.field(name), pa.array(values, pa.string()))
    return table


@pytest.mark.parametrize("bundle", [1, 3])
def test_a_change_of_a_key_is_sent_after_and_before_the_events_of_both_keys(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN slow answers and a record that moves from key to key THEN what has a key in common arrives in log order."""

    async def answer(got: Got) -> int:
        await asyncio.sleep(hash(got.body) % 7 / 1000)
        return 200

    receiver.answer = answer
    chain = [(str(n // 3 + 1), str(n // 3)) if n % 3 == 2 else (str(n // 3), None) for n in range(60)]
    rows = [row for n, row in enumerate(chain) for row in (row, (f"other {n}", None))]
    results = sink.deliver([Job(spec_for(receiver.url, bundle=bundle, concurrency=8), moving(*rows))], 30)
    assert one_outcome(results).fate is Fate.DONE
    arrived = [int(ident[1:]) for ident in receiver.ids]
    assert sorted(arrived) == list(range(120))
    assert [n for n in arrived if n % 2 == 0] == list(range(0, 120, 2))
    assert receiver.under_way_max > 1


@pytest.mark.parametrize("bundle", [1, 8])
def test_a_change_of_a_key_holds_and_is_held_by_both_keys_when_ordered(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN an event of k1 that is refused THEN a change of k1 to k2 waits behind it, and later ones of both too."""
    rows = moving(("k1", None), ("k2", None), ("k3", None), ("k2", "k1"), ("k1", None), ("k2", None), ("k3", None))
    spec = spec_for(receiver.url, ordered=True, bundle=bundle)
    receiver.answer = lambda got: 400 if "e0" in got.ids else 200
    outcome = one_outcome(sink.deliver([Job(spec, rows)], 10))
    assert [(p.event_id, p.key, p.previous_key) for p in outcome.parked] == [
        ("e0", "k1", None),
        ("e3", "k2", "k1"),
        ("e4", "k1", None),
        ("e5", "k2", None),
    ]
    assert outcome.accepted == 3
    # AND what is parked already holds it too, by the key it left as by the key it has
    receiver.answer = lambda got: 200
    for key in ("k1", "k2"):
        held = {("shop", "public.orders", key): 1}
        waiting = one_outcome(sink.deliver([Job(spec, moving(("k2", "k1"), ("k3", None)), held=held)], 10))
        assert [p.event_id for p in waiting.parked] == ["e0"]


def test_retries_of_a_changed_key_go_one_after_another(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN parked events of two keys and a change between them, unordered THEN they are sent in their order."""

    answered: list[str] = []
    before: dict[str, set[str]] = {}

    async def answer(got: Got) -> int:
        before[got.ids[0]] = set(answered)
        await asyncio.sleep(0.03 if "e0" in got.ids else 0)
        answered.extend(got.ids)
        return 200

    receiver.answer = answer
    table = moving(("k1", None), ("k2", None), ("k2", "k1"), ("k1", None))
    tries = [Try(spec_for(receiver.url), row_json(table, n), 2) for n in range(4)]
    assert [a.verdict for a in sink.attempt(tries, 10)] == [Verdict.ACCEPTED] * 4
    assert (before["e2"], before["e3"]) == ({"e0", "e1"}, {"e0", "e1", "e2"})
    meta = [json.loads(got.body)["evermark"] for got in receiver.got]
    assert [one.get("previous_key") for one in meta if one["id"] == "e2"] == ["k1"]


def test_keys_held_by_earlier_work_stay_held(receiver: Receiver, sink: WebhookSink) -> None:
    """What is parked already holds back what comes now; the same key of another stream is another key."""
    spec = spec_for(receiver.url, ordered=True)
    held = {("shop", "public.orders", "1"): 1, ("shop", "public.users", "2"): 1}
    outcome = one_outcome(sink.deliver([Job(spec, events(8, keys=4), held=held)], 10))
    behind = "held behind an earlier one of its key"
    assert [(p.event_id, p.reason) for p in outcome.parked] == [(f"e{n}", behind) for n in (1, 5)]
    assert sorted(receiver.ids) == ["e0", "e2", "e3", "e4", "e6", "e7"]


def test_past_the_bound_of_held_events_the_subscription_stops(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad event must not park a whole backlog."""
    monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", 3)
    receiver.answer = lambda got: 400 if "e0" in got.ids else 200
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, ordered=True), events(10, keys=1))], 10))
    assert outcome.fate is Fate.FULL
    assert "held behind e0" in outcome.reason


def test_when_there_is_no_room_to_park_the_subscription_stops(receiver: Receiver, sink: WebhookSink) -> None:
    """A receiver that refuses everything fills no table without bound."""
    receiver.answer = lambda got: 404
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, concurrency=1), events(10), parked_room=4)], 10))
    assert outcome.fate is Fate.FULL
    assert "no room to park" in outcome.reason
    assert len(receiver.got) == 5


def test_too_large_an_event_is_parked_unsent(receiver: Receiver, sink: WebhookSink) -> None:
    """With that reason; its neighbours arrive."""
    big = json.dumps("x" * 3_000)
    table = pa.concat_tables([events(1, payload=big), events(3).slice(1)])
    for bundle in (1, 10):
        spec = spec_for(receiver.url, bundle=bundle, body_bytes_max=2_000)
        outcome = one_outcome(sink.deliver([Job(spec, table)], 10))
        assert (outcome.fate, outcome.accepted) == (Fate.DONE, 2)
        assert [p.event_id for p in outcome.parked] == ["e0"]
        assert "too large" in outcome.parked[0].reason
    assert "e0" not in receiver.ids


@pytest.mark.parametrize("status", [301, 307, 429, 500, 502, 503, 504])
def test_a_failing_endpoint_stops_its_subscription_and_parks_nothing(
    receiver: Receiver, sink: WebhookSink, status: int
) -> None:
    """GIVEN ten good batches, then failures THEN earlier batches are done, nothing is parked, the wait is passed on."""
    headers = {"location": receiver.url + "/elsewhere", "retry-after": "17"}
    receiver.answer = lambda got: (
        web.Response(status=status, headers=headers) if int(got.ids[0][1:]) >= 50 else web.Response(text="ok")
    )
    results = sink.deliver([Job(spec_for(receiver.url, concurrency=3), events(1_000, batch_rows=10))], 10)
    assert [r.outcome.fate for r in results] == [Fate.DONE] * 5 + [Fate.ENDPOINT_FAILED] * 95
    assert not any(r.outcome.parked for r in results)
    assert results[-1].outcome.reason.startswith(f"HTTP {status}")
    assert results[-1].outcome.retry_after_s == 17.0
    assert len(receiver.got) <= 50 + 3
    assert all(got.raw.path == "/hook" for got in receiver.got)


def test_done_batches_are_a_prefix_even_when_later_ones_were_accepted(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a slow first event WHEN it fails after later batches arrived THEN no later batch is done."""
    later = threading.Event()

    async def answer(got: Got) -> int:
        if got.ids == ["e0"]:
            await asyncio.to_thread(later.wait, 5)
            return 503
        if got.ids == ["e29"]:
            later.set()
        return 200

    receiver.answer = answer
    results = sink.deliver([Job(spec_for(receiver.url), events(30, batch_rows=10))], 10)
    assert len(set(receiver.ids)) == 30
    assert len(receiver.ids) == 32  # the failing one is asked three times, nothing else more than once
    assert [r.outcome.fate for r in results] == [Fate.ENDPOINT_FAILED] * 3
    assert [r.through for r in results] == [None] * 3


def test_an_unfinished_batch_tells_how_far_it_came(receiver: Receiver, sink: WebhookSink) -> None:
    """`through` is the end of the unbroken beginning, parked ones included."""
    receiver.answer = lambda got: {"e3": 400, "e7": 503}.get(got.ids[0], 200)
    (result,) = sink.deliver([Job(spec_for(receiver.url, concurrency=1), events(20))], 10)
    assert result.outcome.fate is Fate.ENDPOINT_FAILED
    assert result.through == "000000006"
    assert [p.event_id for p in result.outcome.parked] == ["e3"]


def test_d10_what_was_sent_before_the_time_was_up_is_not_sent_again(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a slow receiver and keys that come again WHEN the time is up THEN next to nothing that was sent lies
    behind an event that was not: it would come again in the next turn, and the receiver's time would go into repeats.
    """

    async def answer(_: Got) -> int:
        await asyncio.sleep(0.05)
        return 200

    receiver.answer = answer
    keys = [f"k{n // 2}" for n in range(200)]
    rows = events(200, batch_rows=200)
    rows = rows.set_column(rows.schema.get_field_index("key"), "key", pa.array(keys, rows.schema.field("key").type))
    passed = sink.deliver_prefix(Job(spec_for(receiver.url, concurrency=5), rows), 1.0, 1.0).rows
    assert 0 < passed < 200
    assert passed >= len(receiver.got) - 5


@pytest.mark.parametrize("answer", [410, "disable"])
def test_gone_disables(receiver: Receiver, sink: WebhookSink, answer: int | str) -> None:
    """410, or the receiver's explicit word."""
    receiver.answer = lambda got: (
        answer if isinstance(answer, int) else web.Response(status=403, headers={"webhook-delivery": "disable"})
    )
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(3))], 10))
    assert (outcome.fate, outcome.parked) == (Fate.GONE, ())


def test_a_busy_receiver_is_asked_again_and_nothing_is_spent(receiver: Receiver, sink: WebhookSink) -> None:
    """409 with Retry-After: the same delivery id comes back, and is taken."""
    busy = {"retry-after": "0"}
    receiver.answer = lambda got: web.Response(status=409, headers=busy) if len(receiver.got) < 3 else 200
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 10))
    assert (outcome.fate, outcome.accepted, outcome.parked) == (Fate.DONE, 1, ())
    assert receiver.ids == ["e0"] * 3


def test_a_receiver_busy_beyond_the_deadline_is_left_with_its_wait(receiver: Receiver, sink: WebhookSink) -> None:
    """It is not waited for, and no event is parked."""
    receiver.answer = lambda got: web.Response(status=409, headers={"retry-after": "60"})
    begun = time.monotonic()
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5))
    assert (outcome.fate, outcome.parked, outcome.retry_after_s) == (Fate.ENDPOINT_FAILED, (), 60.0)
    assert time.monotonic() - begun < 3


def test_slow_and_dead_receivers_do_not_slow_a_healthy_one(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN one that hangs, one that refuses and one that fails THEN the healthy one's results come at once."""
    released = asyncio.Event()

    async def hang(_: Got) -> int:
        await released.wait()
        return 200

    slow, failing = Receiver(hang), Receiver(lambda got: 500)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        urls = {"slow": slow.url, "dead": dead, "failing": failing.url, "healthy": receiver.url}
        jobs = [Job(spec_for(url, name=name, timeout_s=2.0), events(200)) for name, url in urls.items()]
        begun = time.monotonic()
        seen: dict[str, tuple[float, Outcome]] = {}
        for results in sink.deliver_each(jobs, deadline_s=1.0):
            seen[results[0].subscription] = (time.monotonic() - begun, results[0].outcome)
    assert seen["healthy"][1].fate is Fate.DONE
    assert seen["healthy"][0] < 1.0
    assert list(seen)[-1] == "slow"
    assert {name: seen[name][1].fate for name in ("slow", "dead", "failing")} == dict.fromkeys(
        ("slow", "dead", "failing"), Fate.ENDPOINT_FAILED
    )
    assert seen["slow"][1].reason == "no answer within 2 s"
    assert "refused" in seen["dead"][1].reason.lower()
    slow.close()
    failing.close()


def test_whoever_is_much_slower_than_the_others_is_cut_off(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN four that answer at once and one that hangs WHEN there is little slack THEN nobody waits for that one."""

    async def hang(_: Got) -> int:
        await asyncio.sleep(3.0)
        return 200

    slow = Receiver(hang)
    urls = {"slow": slow.url, **{f"r{n}": receiver.url for n in range(4)}}
    jobs = [Job(spec_for(url, name=name, timeout_s=20.0), events(5)) for name, url in urls.items()]
    begun = time.monotonic()
    found = {result.subscription: result.outcome.fate for result in sink.deliver(jobs, 30.0, 1.0, slack_s=0.3)}
    assert time.monotonic() - begun < 2.5
    assert found == {"slow": Fate.UNFINISHED, **{f"r{n}": Fate.DONE for n in range(4)}}
    # WHEN nobody waits for anybody THEN it has the time it needs
    assert {result.outcome.fate for result in sink.deliver(jobs, 30.0)} == {Fate.DONE}
    slow.close()


def test_the_deadline_starts_nothing_new_and_lets_the_rest_finish(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN answers slower than the deadline THEN those under way still count: a slow receiver makes progress."""

    async def answer(_: Got) -> int:
        await asyncio.sleep(0.5)
        return 200

    receiver.answer = answer
    results = sink.deliver([Job(spec_for(receiver.url, concurrency=4), events(20, batch_rows=4))], deadline_s=0.2)
    assert [r.outcome.fate for r in results] == [Fate.DONE] + [Fate.UNFINISHED] * 4
    assert len(receiver.got) == 4


def test_without_grace_the_deadline_cuts(receiver: Receiver, sink: WebhookSink) -> None:
    """A time budget can be a hard one; nothing counts as failed."""

    async def answer(_: Got) -> int:
        await asyncio.sleep(2)
        return 200

    receiver.answer = answer
    begun = time.monotonic()
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(5))], deadline_s=0.2, grace_s=0.0))
    assert outcome.fate is Fate.UNFINISHED
    assert time.monotonic() - begun < 1.0


def test_the_rate_holds_across_calls(receiver: Receiver, sink: WebhookSink) -> None:
    """Requests are spaced, and a second call does not begin with a burst."""
    spec = spec_for(receiver.url, rate_per_s=20.0)
    begun = time.monotonic()
    for _ in range(2):
        assert one_outcome(sink.deliver([Job(spec, events(5))], 10)).fate is Fate.DONE
    assert time.monotonic() - begun >= 9 / 20
    assert one_outcome(sink.deliver([Job(spec, events(50))], 0.3)).fate is Fate.UNFINISHED


def test_d10_a_rate_is_reached_until_the_time_is_up(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN 10 a second and twenty requests that may be under way at a time WHEN there is more to send than three
    seconds allow THEN it is sent until they are over: none waits with a moment that it will not use."""
    begun = time.monotonic()
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, rate_per_s=10.0), events(100))], 3.0))
    assert outcome.fate is Fate.UNFINISHED
    # At most the rate; a busy machine misses some moments, which are lost.
    assert 16 <= outcome.accepted <= 10 * (time.monotonic() - begun) + 2


def test_a_probe_sends_one_at_a_time_until_one_is_accepted(receiver: Receiver, sink: WebhookSink) -> None:
    """An endpoint that was down is not met with twenty requests at once."""
    receiver.answer = lambda got: 503
    sink.deliver([Job(spec_for(receiver.url), events(50), probe=True)], 10)
    assert len(receiver.got) == 1
    receiver.answer = lambda got: 200
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url), events(50), probe=True)], 10)).fate is Fate.DONE


def test_parked_deliveries_are_tried_again_with_their_attempt(receiver: Receiver, sink: WebhookSink) -> None:
    """Same id, same event, higher attempt; each answer stands where its try stood."""
    receiver.answer = lambda got: {"e1": 422, "e2": 410}.get(got.ids[0], 200)
    table = events(2)
    tries = [Try(spec_for(receiver.url), row_json(table, n), 2 + n) for n in (0, 1)]
    tries.append(Try(spec_for(receiver.url, name="other"), row_json(events(3), 2), 4))
    tries.append(Try(spec_for(receiver.url, name="third"), "damaged", 2))
    answers = sink.attempt(tries, 5)
    assert [answer.verdict for answer in answers] == [Verdict.ACCEPTED, Verdict.REFUSED, Verdict.GONE, Verdict.REFUSED]
    assert (answers[1].status, answers[1].reason) == (422, "HTTP 422")
    attempts = {got.ids[0]: json.loads(got.body)["evermark"]["attempt"] for got in receiver.got}
    assert attempts == {"e0": 2, "e1": 3, "e2": 4}
    assert {got.headers["webhook-id"] for got in receiver.got} == {"e0", "e1", "e2"}


def test_a_dead_endpoint_spends_no_attempts_of_the_other_tries(receiver: Receiver, sink: WebhookSink) -> None:
    """After a hiccup that did not pass the rest is not sent; ordered tries behind a failed one wait."""
    receiver.answer = lambda got: 503
    table = events(10)
    answers = sink.attempt([Try(spec_for(receiver.url, concurrency=1), row_json(table, n), 2) for n in range(10)], 5)
    assert {answer.verdict for answer in answers} == {Verdict.ENDPOINT}
    assert [answer.sent for answer in answers] == [True, *[False] * 9]
    assert receiver.ids == ["e0"] * 3

    receiver.got.clear()
    receiver.answer = lambda got: 400 if got.ids == ["e0"] else 200
    table = events(4, keys=2)
    answers = sink.attempt([Try(spec_for(receiver.url, ordered=True), row_json(table, n), 2) for n in range(4)], 5)
    assert [a.verdict for a in answers] == [Verdict.REFUSED, Verdict.ACCEPTED, Verdict.BUSY, Verdict.ACCEPTED]
    assert answers[2].reason == "held behind e0"
    assert "e2" not in receiver.ids


def test_rows_of_several_places_are_accounted_for_each_on_its_own(receiver: Receiver, sink: WebhookSink) -> None:
    """A failure in one place leaves the finished batches of the other done."""
    first = events(6, batch_rows=3)
    second = events(6, batch_rows=3, source="crm", stream="public.people").set_column(
        0, EVENT.field("event_id"), pa.array([f"c{n}" for n in range(6)])
    )
    order = [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]
    both = pa.concat_tables([first, second]).take(order)
    receiver.answer = lambda got: 500 if got.ids == ["e4"] else 200
    results = sink.deliver([Job(spec_for(receiver.url, concurrency=1), both)], 5)
    assert {(r.place.source, r.batch): (r.outcome.fate, r.through) for r in results} == {
        ("crm", 1): (Fate.DONE, "000000002"),
        ("crm", 2): (Fate.ENDPOINT_FAILED, "000000003"),
        ("shop", 1): (Fate.DONE, "000000002"),
        ("shop", 2): (Fate.ENDPOINT_FAILED, "000000003"),
    }


def test_many_jobs_at_once_render_fewer_rows_ahead_each(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN room for 30 rows ahead WHEN ten want 50 each one by one THEN few are rendered at a time; all arrive."""
    monkeypatch.setattr(dispatch, "AHEAD_ROWS_MAX", 30)
    rendered: list[int] = []
    render_sound = dispatch.render_sound

    def seen(rows: pa.Table, how: Rendering) -> tuple[pa.Array, dict[int, str]]:
        rendered.append(rows.num_rows)
        return render_sound(rows, how)

    monkeypatch.setattr(dispatch, "render_sound", seen)
    jobs = [Job(spec_for(receiver.url, name=f"s{n}", concurrency=2), events(50, keys=3)) for n in range(10)]
    results = sink.deliver(jobs, 30)
    assert [result.outcome.accepted for result in results] == [50] * 10
    assert max(rendered) == 3
    assert len(receiver.ids) == 500


def test_a_receiver_that_fails_now_and_then_is_not_given_up(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a receiver that answers 503 to every third request WHEN many events are sent THEN all are accepted."""
    asked = 0

    async def answer(got: Got) -> int:
        nonlocal asked
        asked += 1
        return 503 if asked % 3 == 0 else 200

    receiver.answer = answer
    (result,) = sink.deliver([Job(spec_for(receiver.url, concurrency=1), events(30))], 30)
    assert (result.outcome.fate, result.outcome.accepted) == (Fate.DONE, 30)


def test_shared_bodies_are_those_that_each_job_would_have_made(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN rows that several want, one of which cannot be rendered, WHEN rendered once for all THEN each gets the same
    requests, and parks the same row, as by itself.
    """
    real = body.render_column

    def render(some: pa.Table | pa.RecordBatch, *how: Any) -> pa.Array:
        if "e4" in some.column("event_id").to_pylist():
            raise FormatError("e4 is odd")
        return real(some, *how)

    monkeypatch.setattr(body, "render_column", render)
    monkeypatch.setattr(dispatch, "PIECE_ROWS", 2)
    rows = events(6).combine_chunks().to_batches()[0]
    specs = [spec_for(receiver.url, name=name, body=style) for name, style in (("a", "standard"), ("b", "cloudevents"))]
    numbers = {"a": np.array([0, 2, 4, 5]), "b": np.array([1, 2, 4])}

    def sent(*jobs: Job) -> tuple[list[tuple[str, bytes]], dict[str, list[str]]]:
        receiver.got.clear()
        results = sink.deliver(list(jobs), 5)
        parked = {one.subscription: [event.event_id for event in one.outcome.parked] for one in results}
        return sorted((got.headers["webhook-id"], got.body) for got in receiver.got), parked

    alone = [Job(spec, rows.take(pa.array(numbers[spec.name]))) for spec in specs]
    shared = SharedBodies(rows, historical=False)
    together = [replace(job, bodies=shared.of(job.spec, numbers[job.spec.name])) for job in alone]
    assert all(job.bodies is not None for job in together)
    assert sent(*together) == sent(*alone)
    assert sent(*together)[1] == {"a": ["e4"], "b": ["e4"]}


def test_an_endpoint_is_kept_until_its_subscription_changes(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN a subscription WHEN its url changes THEN the next event goes there, though its name is the same."""
    spec = spec_for(receiver.url)
    opened: list[str] = []

    def open_secret(sealed: str) -> str:
        opened.append(sealed)
        return sealed

    for _ in range(3):
        assert one_outcome(sink.deliver([Job(spec, events(1), open_secret)], 5)).fate is Fate.DONE
    assert len(opened) == len(spec.secrets)
    moved = replace(spec, url=f"{receiver.url}/moved")
    receiver.got.clear()
    assert one_outcome(sink.deliver([Job(moved, events(1), open_secret)], 5)).fate is Fate.DONE
    assert receiver.got[0].raw.path.endswith("/moved")


def test_not_all_of_a_thousand_subscriptions_send_to_one_host_at_once(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN many subscriptions of one host WHEN all get an event THEN few are asked at a time, and all are done."""
    monkeypatch.setattr(sinks, "JOBS_PER_HOST_MAX", 5)
    under_way = most = 0

    async def answer(_: Got) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return 200

    receiver.answer = answer
    jobs = [Job(spec_for(receiver.url, name=f"s{n}"), events(1)) for n in range(40)]
    assert {one.outcome.fate for one in sink.deliver(jobs, 10)} == {Fate.DONE}
    assert len(receiver.got) == 40
    assert 1 < most <= 5


def test_what_had_to_wait_for_others_of_its_host_until_the_end_is_not_sent_at_all(
    receiver: Receiver, sink: WebhookSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a host that takes one at a time, slowly WHEN the time is over THEN no request is begun to be cut off."""
    monkeypatch.setattr(sinks, "JOBS_PER_HOST_MAX", 1)

    async def answer(_: Got) -> int:
        await asyncio.sleep(0.4)
        return 200

    receiver.answer = answer
    jobs = [Job(spec_for(receiver.url, name=f"s{n}"), events(1)) for n in range(4)]
    fates = [one.outcome.fate for one in sink.deliver(jobs, 0.3, 5.0)]
    assert (fates.count(Fate.DONE), fates.count(Fate.UNFINISHED)) == (1, 3)
    assert len(receiver.got) == 1
