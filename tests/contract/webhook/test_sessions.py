"""D3: events of a session at the sink: set aside without its key, and sent again one after another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from aiohttp import web

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Fate
from evermark.delivery.webhook.base import Job, Try
from evermark.delivery.webhook.bundles import prepared
from evermark.delivery.webhook.parked_json import row_json
from evermark.delivery.webhook.sink import WebhookSink
from tests.contract.webhook.webhook_receiver import Receiver, events, one_outcome, spec_for


def _came(receiver: Receiver) -> list[int]:
    """The numbers of what came, bundled or not."""
    found: list[int] = []
    for got in receiver.got:
        said = json.loads(got.body)
        found += [one["data"]["n"] for one in said.get("events", [said])]
    return found


@pytest.mark.parametrize("bundle", [1, 4])
def test_d3_what_has_no_key_is_parked_for_its_session_and_stops_nothing(
    receiver: Receiver, sink: WebhookSink, bundle: int
) -> None:
    """GIVEN some rows without their key WHEN all are sent THEN those are parked unsent, and the others come."""
    job = Job(spec_for(receiver.url, bundle=bundle), events(6, keys=2), waits={1: "s1", 4: "s2"})
    outcome = one_outcome(sink.deliver(prepared([job]), 5))
    assert (outcome.fate, outcome.accepted) == (Fate.DONE, 4)
    assert sorted((one.event_id, one.session, one.status) for one in outcome.parked) == [
        ("e1", "s1", None),
        ("e4", "s2", None),
    ]
    assert sorted(_came(receiver)) == [0, 2, 3, 5]


def test_d6_what_has_no_key_takes_no_room_from_what_is_refused(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN more without a key than may be parked WHEN others are refused THEN these are parked; in a replay, which
    hurts nobody by stopping, all of it counts."""
    receiver.answer = lambda got: 400
    waits = dict.fromkeys(range(4), "s1")
    spec = spec_for(receiver.url, concurrency=1)
    live = Job(spec, events(6), waits=waits, parked_room=2)
    outcome = one_outcome(sink.deliver(prepared([live]), 5))
    assert (outcome.fate, len(outcome.parked)) == (Fate.DONE, 6)
    for job in (replace(live, parked_room=1), replace(live, replay_id="r1")):
        assert one_outcome(sink.deliver(prepared([job]), 5)).fate is Fate.FULL


def test_d7_a_bot_over_its_limit_stops_before_what_has_no_key_and_keeps_what_it_got(
    receiver: Receiver, sink: WebhookSink
) -> None:
    """GIVEN a bot over its limit WHEN an event without a key comes THEN it stops there: State would refuse to park it,
    and all before it would be sent again and again."""
    job = Job(spec_for(receiver.url, concurrency=1), events(6, keys=1), waits={3: "s1"})
    over = sink.deliver(prepared([replace(job, parked_room=-1)]), 5)[0]
    assert (over.outcome.fate, over.outcome.accepted, over.outcome.parked) == (Fate.FULL, 3, ())
    assert over.through == events(6).column("position")[2].as_py()
    assert one_outcome(sink.deliver(prepared([replace(job, parked_room=0)]), 5)).fate is Fate.DONE


def _is_one(body: bytes) -> bool:
    return bool(json.loads(body)["data"]["n"] == 1)


def _tries(receiver: Receiver) -> list[Try]:
    """Five of a session, each with a key of its own: without the session they would be sent side by side."""
    rows = events(5)
    return [Try(spec_for(receiver.url), row_json(rows, n), 1, session="s1") for n in range(5)]


def test_d3_a_session_is_flushed_in_order(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN events of one session WHEN they are tried together THEN one after another, in the order given."""
    assert {answer.verdict for answer in sink.attempt(_tries(receiver), 5)} == {Verdict.ACCEPTED}
    assert _came(receiver) == [0, 1, 2, 3, 4]


def test_d3_one_that_is_busy_holds_the_rest_of_its_session_back(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN one that is answered 409 THEN those behind it are not sent; another session and plain ones are."""
    busy = {"Retry-After": "60"}
    receiver.answer = lambda got: web.Response(status=409, headers=busy) if _is_one(got.body) else 200
    mine = _tries(receiver)
    others = [replace(mine[4], session="s2"), replace(mine[3], session="")]
    answers = sink.attempt([*mine[:3], *others], 5)
    assert [answer.verdict for answer in answers[:3]] == [Verdict.ACCEPTED, Verdict.BUSY, Verdict.BUSY]
    assert [answer.sent for answer in answers[:3]] == [True, True, False]
    assert {answer.verdict for answer in answers[3:]} == {Verdict.ACCEPTED}


def test_d6_one_that_is_refused_does_not_hold_its_session_back(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN one that is refused for its content THEN those behind it are sent: it was tried."""
    receiver.answer = lambda got: 422 if _is_one(got.body) else 200
    answers = sink.attempt(_tries(receiver), 5)
    assert [answer.verdict for answer in answers] == [Verdict.ACCEPTED, Verdict.REFUSED, *[Verdict.ACCEPTED] * 3]
    assert _came(receiver) == [0, 1, 2, 3, 4]
