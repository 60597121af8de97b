"""Signed webhooks: all subscriptions' requests run side by side in one event loop per process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import TypeAlias

from evermark.delivery.model import Fate, Outcome
from evermark.delivery.webhook.base import Answer, Job, Prefix, Try
from evermark.delivery.webhook.client import HttpLoop, close_http_loops, endpoint_of, http_loop
from evermark.delivery.webhook.dispatch import Dispatch
from evermark.delivery.webhook.resend import UNSENT, attempt
from evermark.delivery.webhook.tally import Tally
from evermark.delivery.work import Result
from evermark.errors import BusyError, ConfigError, EvermarkError

# A guard against a loop that stopped answering, far beyond the sum of deadlines and timeouts.
_LATE_S = 60.0

# The slower half may take this many times as long as the quicker half took.
_TIMES = 2.0
# A larger share of the work is no reason to wait longer than this: such a job is served beside the others.
_FAIR_S_MAX = 10.0

JOBS_PER_HOST_MAX = 128
# A finished job: its account, and the outcome of the rows that are not complete.
Closed = tuple[Tally, Outcome]
Finished: TypeAlias = "queue.SimpleQueue[tuple[int, Closed]]"


class WebhookSink:
    """See `Sink` for the contract. Holds nothing: instances of one process share its event loop and connections.

    With `low_priority` it sends when no other thread wants the processor.
    """

    def __init__(self, *, low_priority: bool = False) -> None:
        self._low_priority = low_priority

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        for tally, otherwise in self._closed(jobs, deadline_s, grace_s, slack_s):
            yield tally.results(otherwise)

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        ((tally, otherwise),) = self._closed([job], deadline_s, grace_s)
        return tally.through(otherwise)

    def _closed(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None, slack_s: float | None = None
    ) -> Iterator[Closed]:
        if len({job.spec.name for job in jobs}) != len(jobs):
            hint = "put its rows into one job, in log order"
            raise ConfigError("two jobs of one subscription in one call", hint=hint)
        http = http_loop(low_priority=self._low_priority)
        finished: Finished = queue.SimpleQueue()
        gates = Gates(JOBS_PER_HOST_MAX)
        cancel = http.begin(
            [
                _deliver(_made(job, http, len(jobs)), gates, deadline_s, grace_s, finished, n)
                for n, job in enumerate(jobs)
            ]
        )
        late_s = deadline_s + _LATE_S + max((job.spec.timeout_s for job in jobs), default=0.0)
        stragglers = Stragglers([-(-job.events.num_rows // max(1, job.spec.bundle)) for job in jobs], slack_s)
        left, began = len(jobs), monotonic()
        try:
            while left:
                cut_s = stragglers.next_s()
                wait_s = late_s if cut_s is None else max(0.0, began + cut_s - monotonic())
                try:
                    number, closed = finished.get(timeout=wait_s)
                except queue.Empty:
                    if cut_s is None:
                        hint = "restart this instance"
                        raise BusyError("the event loop of the webhooks does not answer", hint=hint) from None
                    cancel(stragglers.over(monotonic() - began))  # each says itself that it was cut off
                    continue
                left -= 1
                stragglers.finished(number, monotonic() - began)
                yield closed
        finally:
            if left:
                cancel(range(len(jobs)))

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        http = http_loop(low_priority=self._low_priority)
        # A replay never disturbs first deliveries: a failure of its tries stops only its own tries.
        by_subscription: dict[tuple[str, str | None], list[int]] = {}
        for n, one in enumerate(tries):
            by_subscription.setdefault((one.spec.name, one.replay_id), []).append(n)
        groups = list(by_subscription.values())
        answers: list[Answer] = [UNSENT] * len(tries)
        futures = [http.submit(attempt([tries[n] for n in group], http, deadline_s)) for group in groups]
        for group, future in zip(groups, futures, strict=True):
            # Closing the sink cancels tries that are under way: they count as unsent.
            with contextlib.suppress(concurrent.futures.CancelledError):
                for n, answer in zip(group, future.result(), strict=True):
                    answers[n] = answer
        return answers

    def close(self) -> None:
        close_http_loops()


def _made(job: Job, http: HttpLoop, jobs: int) -> Dispatch | Closed:
    """The work, or how it ends when it cannot begin."""
    try:
        return Dispatch(job, endpoint_of(job.spec, job.open_secret), http, jobs)
    except EvermarkError as problem:
        # Wrong settings lose nothing: the subscription waits until a person repairs them.
        return Tally(job.events), Outcome(job.spec.name, Fate.ENDPOINT_FAILED, reason=str(problem))


async def _deliver(
    work: Dispatch | Closed, gates: Gates, deadline_s: float, grace_s: float | None, finished: Finished, number: int
) -> None:
    if not isinstance(work, Dispatch):
        finished.put((number, work))
        return
    cut = "cut off: slower than the others, or the sink was closed"
    outcome = Outcome(work.subscription, Fate.UNFINISHED, reason=cut)
    try:
        began = monotonic()
        async with gates.of(work.host):
            waited_s = monotonic() - began
            if waited_s < deadline_s:
                await work.run(deadline_s - waited_s, grace_s)
                outcome = work.outcome
            else:  # nothing of it was sent
                outcome = replace(outcome, reason="others that send to its host took all the time")
    except Exception as problem:  # noqa: BLE001 - one subscription's trouble must not become another's
        outcome = replace(outcome, reason=f"sending failed: {type(problem).__name__}")
    finally:  # also when it is cancelled
        finished.put((number, (work.tally, outcome)))


class Gates:
    """Lets only so many jobs of a call send to one host at a time: of ten thousand connections most would not be
    answered in time. Used in the loop alone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[tuple[str, int], asyncio.Semaphore] = {}

    def of(self, host: tuple[str, int]) -> asyncio.Semaphore:
        gate = self._of.get(host)
        if gate is None:
            gate = self._of[host] = asyncio.Semaphore(self._most)
        return gate


class Stragglers:
    """How long jobs that are done wait for the others: counted from when half of the jobs are done. A job with more to
    send than the finished jobs had gets as many times longer.
    """

    def __init__(self, work: Sequence[int], slack_s: float | None) -> None:
        self._work = work
        self._slack_s = slack_s
        self._left = set(range(len(work)))
        self._cut_at: dict[int, float] = {}

    def finished(self, job: int, elapsed_s: float) -> None:
        self._left.discard(job)
        self._cut_at.pop(job, None)
        if self._slack_s is None or self._cut_at or len(self._left) > len(self._work) // 2:
            return
        most = max(size for n, size in enumerate(self._work) if n not in self._left)
        for n in self._left:
            fair_s = min(_FAIR_S_MAX, _TIMES * elapsed_s * self._work[n] / max(1, most))
            self._cut_at[n] = elapsed_s + max(self._slack_s, _TIMES * elapsed_s, fair_s)

    def next_s(self) -> float | None:
        """When the first job will have had enough time; None: no job waits for another."""
        return min(self._cut_at.values(), default=None)

    def over(self, elapsed_s: float) -> list[int]:
        """The jobs that had enough time, each named once."""
        late = [n for n, at in self._cut_at.items() if at <= elapsed_s]
        for n in late:
            del self._cut_at[n]
        if not self._cut_at:
            self._slack_s = None
        return late
