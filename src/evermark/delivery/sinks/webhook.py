"""Signed webhooks: all subscriptions' requests run side by side in one event loop per process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

import pyarrow as pa

from evermark.delivery.base import Fate
from evermark.delivery.body import Rendering, bundle, bundle_id, delivery_ids, render, row_from_json
from evermark.delivery.retry import Verdict
from evermark.delivery.sinks.base import Answer, Job, Lane, Prefix, Result, Try
from evermark.delivery.sinks.http import Courier, HttpLoop, close_http_loop, http_loop
from evermark.delivery.sinks.lanes import CONCURRENCY_MAX, Dispatch
from evermark.delivery.sinks.patience import Patience
from evermark.delivery.sinks.tally import Tally
from evermark.errors import BusyError, ConfigError, EvermarkError, FormatError

# A guard against a loop that stopped answering, far beyond what deadlines and timeouts add up to.
_LATE_S = 60.0

# What a finished job hands over: its account, and the fate, reason and wanted wait of whatever is not complete.
Closed = tuple[Tally, Fate, str, float | None]


class WebhookSink:
    """See `Sink` for the contract. Holds nothing: instances of one process share its event loop and connections."""

    def deliver(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> list[Result]:
        closed = self._closed(jobs, deadline_s, grace_s, slack_s)
        results = [result for tally, fate, reason, wait in closed for result in tally.results(fate, reason, wait)]
        return sorted(results, key=lambda result: (result.subscription, result.place, result.batch))

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None
    ) -> Iterator[list[Result]]:
        for tally, fate, reason, wait in self._closed(jobs, deadline_s, grace_s):
            yield tally.results(fate, reason, wait)

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        ((tally, fate, reason, wait),) = self._closed([job], deadline_s, grace_s)
        return tally.through(fate, reason, wait)

    def _closed(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None, slack_s: float | None = None
    ) -> Iterator[Closed]:
        _one_job_each(jobs)
        http = http_loop()
        finished: queue.SimpleQueue[tuple[int, Closed]] = queue.SimpleQueue()
        under_way = [
            http.submit(_deliver(_made(job, http), deadline_s, grace_s, partial(_hand_in, finished, n)))
            for n, job in enumerate(jobs)
        ]
        late_s = deadline_s + _LATE_S + max((job.spec.timeout_s for job in jobs), default=0.0)
        patience = Patience([-(-job.events.num_rows // max(1, job.spec.bundle)) for job in jobs], slack_s)
        left, began = len(jobs), monotonic()
        try:
            while left:
                cut_s = patience.next_s()
                try:
                    wait_s = late_s if cut_s is None else max(0.0, began + cut_s - monotonic())
                    number, closed = finished.get(timeout=wait_s)
                except queue.Empty:
                    if cut_s is None:
                        raise
                    for n in patience.over(monotonic() - began):  # they say themselves that they were cut off
                        under_way[n].cancel()
                    continue
                left -= 1
                patience.finished(number, monotonic() - began)
                yield closed
        except queue.Empty:
            raise BusyError("the event loop of the webhooks does not answer", hint="restart this instance") from None
        finally:
            for future in under_way:
                future.cancel()

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        http = http_loop()
        by_subscription: dict[str, list[int]] = {}
        for n, one in enumerate(tries):
            by_subscription.setdefault(one.spec.name, []).append(n)
        groups = list(by_subscription.values())
        answers: list[Answer] = [_UNSENT] * len(tries)
        futures = [http.submit(_attempt([tries[n] for n in group], http, deadline_s)) for group in groups]
        for group, future in zip(groups, futures, strict=True):
            # Closing the sink cancels what is under way; those tries count as unsent.
            with contextlib.suppress(concurrent.futures.CancelledError):
                for n, answer in zip(group, future.result(), strict=True):
                    answers[n] = answer
        return answers

    def close(self) -> None:
        close_http_loop()


_UNSENT = Answer(Verdict.BUSY, reason="not sent: the time given to this work ran out")


def _one_job_each(jobs: Sequence[Job]) -> None:
    names = [job.spec.name for job in jobs]
    if len(set(names)) != len(names):
        raise ConfigError("two jobs of one subscription in one call", hint="put its rows into one job, in log order")


def _made(job: Job, http: HttpLoop) -> Dispatch | Closed:
    """The work, or how it ends when it cannot begin."""
    try:
        return Dispatch(job, Courier(job.spec, job.open_secret), http)
    except EvermarkError as problem:
        # Wrong settings lose nothing: the subscription waits for somebody to mend them.
        return Tally(job.spec.name, job.events), Fate.ENDPOINT_FAILED, str(problem), None


def _hand_in(finished: queue.SimpleQueue[tuple[int, Closed]], number: int, closed: Closed) -> None:
    finished.put((number, closed))


async def _deliver(
    work: Dispatch | Closed, deadline_s: float, grace_s: float | None, hand_in: Callable[[Closed], None]
) -> None:
    if not isinstance(work, Dispatch):
        hand_in(work)
        return
    try:
        await work.run(deadline_s, grace_s)
    except asyncio.CancelledError:
        hand_in((work.tally, Fate.UNFINISHED, "cut off: slower than the others, or the sink was closed", None))
        raise
    except Exception as problem:  # noqa: BLE001 - one subscription's trouble must not become another's
        hand_in((work.tally, Fate.UNFINISHED, f"sending failed: {type(problem).__name__}", None))
    else:
        hand_in((work.tally, work.fate or Fate.DONE, work.reason, work.retry_after_s))


async def _attempt(tries: Sequence[Try], http: HttpLoop, deadline_s: float) -> list[Answer]:
    """The answers to the tries of one subscription, in their order."""
    spec = tries[0].spec
    deadline = asyncio.get_running_loop().time() + deadline_s
    answers: list[Answer] = [_UNSENT] * len(tries)
    try:
        courier = Courier(spec, tries[0].open_secret)
    except EvermarkError as problem:
        return [Answer(Verdict.ENDPOINT, reason=str(problem))] * len(tries)
    lanes: dict[tuple[str | None, Lane | int], list[tuple[int, pa.RecordBatch]]] = {}
    for n, one in enumerate(tries):
        try:
            row = row_from_json(one.event)
        except FormatError as problem:
            answers[n] = Answer(Verdict.EVENT, reason=str(problem))
            continue
        source, stream, key = (row.column(name)[0].as_py() for name in ("source", "stream", "key"))
        lane: Lane | int = n if key is None else (source, stream, key)
        lanes.setdefault((one.replay_id, lane), []).append((n, row))
    gate = asyncio.Semaphore(min(max(1, spec.concurrency), CONCURRENCY_MAX))
    stopped: list[Answer] = []

    async def one_lane(waiting: list[tuple[int, pa.RecordBatch]]) -> None:
        held = ""
        for n, row in waiting:
            if held and spec.ordered:
                answers[n] = Answer(Verdict.BUSY, reason=f"held behind {held}")
                continue
            async with gate:
                if stopped:
                    answers[n] = stopped[0]
                elif asyncio.get_running_loop().time() < deadline:
                    answers[n] = await _try(tries[n], row, courier, http)
                    if answers[n].verdict in (Verdict.ENDPOINT, Verdict.GONE):
                        stopped.append(answers[n])
            if answers[n].verdict is not Verdict.ACCEPTED:
                held = row.column("event_id")[0].as_py()

    await asyncio.gather(*(one_lane(waiting) for waiting in lanes.values()))
    return answers


async def _try(one: Try, row: pa.RecordBatch, courier: Courier, http: HttpLoop) -> Answer:
    how = Rendering(courier.style, one.historical, one.attempt, one.replay_id)
    (body,) = render(row, how)
    (ident,) = delivery_ids(row.column("event_id").to_pylist(), one.replay_id)
    if one.spec.bundle > 1:
        body, ident = bundle([body], how.style), bundle_id([ident])
    if len(body) > one.spec.body_bytes_max:
        return Answer(Verdict.EVENT, reason=f"too large: {len(body)} bytes, the limit is {one.spec.body_bytes_max}")
    return await courier.post(http, ident, body)
