"""Signed webhooks: all subscriptions' requests run side by side in one event loop per process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

from evermark.delivery.base import Fate
from evermark.delivery.webhook.base import Answer, Job, Prefix, Try
from evermark.delivery.webhook.client import Endpoint, HttpLoop, close_http_loops, http_loop
from evermark.delivery.webhook.dispatch import Dispatch
from evermark.delivery.webhook.resend import UNSENT, attempt
from evermark.delivery.webhook.stragglers import Stragglers
from evermark.delivery.webhook.tally import Tally
from evermark.delivery.work import Result
from evermark.errors import BusyError, ConfigError, EvermarkError

# A guard against a loop that stopped answering, far beyond what deadlines and timeouts add up to.
_LATE_S = 60.0

# What a finished job hands over: its account, and the fate, reason and wanted wait of whatever is not complete.
Closed = tuple[Tally, Fate, str, float | None]


class WebhookSink:
    """See `Sink` for the contract. Holds nothing: instances of one process share its event loop and connections.

    With `low_priority` it sends when no other thread wants the processor.
    """

    def __init__(self, *, low_priority: bool = False) -> None:
        self._low_priority = low_priority

    def deliver(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> list[Result]:
        closed = self._closed(jobs, deadline_s, grace_s, slack_s)
        results = [result for tally, fate, reason, wait in closed for result in tally.results(fate, reason, wait)]
        return sorted(results, key=lambda result: (result.subscription, result.place, result.batch))

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        for tally, fate, reason, wait in self._closed(jobs, deadline_s, grace_s, slack_s):
            yield tally.results(fate, reason, wait)

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        ((tally, fate, reason, wait),) = self._closed([job], deadline_s, grace_s)
        return tally.through(fate, reason, wait)

    def _closed(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None, slack_s: float | None = None
    ) -> Iterator[Closed]:
        _one_job_each(jobs)
        http = http_loop(low_priority=self._low_priority)
        finished: queue.SimpleQueue[tuple[int, Closed]] = queue.SimpleQueue()
        under_way = [
            http.submit(_deliver(_made(job, http, len(jobs)), deadline_s, grace_s, partial(_hand_in, finished, n)))
            for n, job in enumerate(jobs)
        ]
        late_s = deadline_s + _LATE_S + max((job.spec.timeout_s for job in jobs), default=0.0)
        patience = Stragglers([-(-job.events.num_rows // max(1, job.spec.bundle)) for job in jobs], slack_s)
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
        http = http_loop(low_priority=self._low_priority)
        # A replay never disturbs live: what its tries find out about the endpoint stops none but its own.
        by_subscription: dict[tuple[str, str | None], list[int]] = {}
        for n, one in enumerate(tries):
            by_subscription.setdefault((one.spec.name, one.replay_id), []).append(n)
        groups = list(by_subscription.values())
        answers: list[Answer] = [UNSENT] * len(tries)
        futures = [http.submit(attempt([tries[n] for n in group], http, deadline_s)) for group in groups]
        for group, future in zip(groups, futures, strict=True):
            # Closing the sink cancels what is under way; those tries count as unsent.
            with contextlib.suppress(concurrent.futures.CancelledError):
                for n, answer in zip(group, future.result(), strict=True):
                    answers[n] = answer
        return answers

    def close(self) -> None:
        close_http_loops()


def _one_job_each(jobs: Sequence[Job]) -> None:
    names = [job.spec.name for job in jobs]
    if len(set(names)) != len(names):
        raise ConfigError("two jobs of one subscription in one call", hint="put its rows into one job, in log order")


def _made(job: Job, http: HttpLoop, jobs: int) -> Dispatch | Closed:
    """The work, or how it ends when it cannot begin."""
    try:
        return Dispatch(job, Endpoint(job.spec, job.open_secret), http, jobs)
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
