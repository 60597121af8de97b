"""What a receiver answers is read within bounds (D12), and what it asks for reaches the queue (D4)."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from evermark.delivery.model import Fate
from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.sink import WebhookSink
from tests.contract.webhook.webhook_receiver import Got, Receiver, events, one_outcome, spec_for

PIECE = b"x" * 64 * 1024
# What two sockets may hold on their way, beyond what is read.
BUFFERS_BYTES = 24 * 1024 * 1024


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("status", [200, 400, 500])
def test_d12_an_answer_without_end_is_cut_by_its_size(
    receiver: Receiver, sink: WebhookSink, status: int, chunked: bool
) -> None:
    """GIVEN a body of a terabyte WHEN it comes as fast as it can THEN it is cut off at once, and the status counts."""
    sent = [0]
    ended = asyncio.Event()

    async def flood(got: Got) -> web.StreamResponse:
        answer = web.StreamResponse(status=status)
        if chunked:
            answer.enable_chunked_encoding()
        else:
            answer.content_length = 1 << 40
        await answer.prepare(got.raw)
        try:
            while True:
                await answer.write(PIECE)
                sent[0] += len(PIECE)
        finally:
            ended.set()

    receiver.answer = flood
    begun = time.monotonic()
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url, timeout_s=20.0), events(1), probe=True)], 30))
    assert {200: Fate.DONE, 400: Fate.DONE, 500: Fate.ENDPOINT_FAILED}[status] is outcome.fate
    assert len(outcome.parked) == (status == 400)
    asyncio.run_coroutine_threadsafe(asyncio.wait_for(ended.wait(), 4), receiver._loop).result(5)
    assert time.monotonic() - begun < 4, "it was cut by its size, and not by the time it took"
    assert sent[0] < BUFFERS_BYTES


def test_d4_a_refused_event_is_parked_with_the_wait_it_was_asked_for(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN 422 with Retry-After WHEN the event is parked THEN the queue knows when to ask again."""
    receiver.answer = lambda got: web.Response(status=422, headers={"retry-after": "90"})
    outcome = one_outcome(sink.deliver([Job(spec_for(receiver.url), events(1))], 5))
    assert [(parked.status, parked.retry_after_s) for parked in outcome.parked] == [(422, 90.0)]


@pytest.mark.parametrize("limit", [1, 3])
def test_d10_no_more_requests_at_a_time_than_asked_for(receiver: Receiver, sink: WebhookSink, limit: int) -> None:
    """GIVEN a limit and slow answers WHEN many events without a key are sent THEN so many at a time, and no more."""

    async def slowly(got: Got) -> int:
        await asyncio.sleep(0.05)
        return 200

    receiver.answer = slowly
    table = events(12, key=None)
    assert one_outcome(sink.deliver([Job(spec_for(receiver.url, concurrency=limit), table)], 10)).fate is Fate.DONE
    assert receiver.under_way_max == limit


def test_d10_a_request_that_takes_longer_than_its_timeout_is_given_up(receiver: Receiver, sink: WebhookSink) -> None:
    """GIVEN timeouts of two subscriptions WHEN the receiver is slow THEN each waits as long as its own says."""

    async def slowly(got: Got) -> int:
        await asyncio.sleep(0.6)
        return 200

    receiver.answer = slowly
    jobs = [Job(spec_for(receiver.url, name=name, timeout_s=s), events(1)) for name, s in (("a", 0.2), ("b", 5.0))]
    fates = {result.subscription: result.outcome.fate for result in sink.deliver(jobs, 10)}
    assert fates == {"a": Fate.ENDPOINT_FAILED, "b": Fate.DONE}
