"""Where the events of a subscription go, by the scheme of its url.

A sink is a folder beside `webhook/` with a class that keeps the contract of `webhook.base.Sink`, and a line in `SINKS`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from evermark.delivery.webhook.base import Answer, Job, Prefix, Sink, Try
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Result

SINKS: dict[str, Callable[..., Sink]] = {"https": WebhookSink, "http": WebhookSink}
_DEFAULT: Callable[..., Sink] = WebhookSink  # says what is wrong with a url that no sink knows

W = TypeVar("W", Job, Try)


class Sinks:
    """A `Sink` that hands each subscription's work to the sink of its url. Several sinks work side by side."""

    def __init__(self, *, low_priority: bool = False) -> None:
        self._made = {make: make(low_priority=low_priority) for make in {_DEFAULT, *SINKS.values()}}

    def deliver(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> list[Result]:
        return [result for some in self.deliver_each(jobs, deadline_s, grace_s, slack_s) for result in some]

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        shares = self._shares(jobs)
        if len(shares) <= 1:
            for sink, _ in shares:
                yield from sink.deliver_each(jobs, deadline_s, grace_s, slack_s)
            return
        finished: queue.SimpleQueue[list[Result] | Exception] = queue.SimpleQueue()

        def work(sink: Sink, numbers: Sequence[int]) -> None:
            try:
                for results in sink.deliver_each([jobs[n] for n in numbers], deadline_s, grace_s, slack_s):
                    finished.put(results)
            except Exception as error:  # noqa: BLE001 - raised again where the results are waited for
                finished.put(error)

        with ThreadPoolExecutor(len(shares), thread_name_prefix="sink") as pool:
            for share in shares:
                pool.submit(work, *share)
            for _ in jobs:
                results = finished.get()
                if isinstance(results, Exception):
                    raise results
                yield results

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        return self._sink(job).deliver_prefix(job, deadline_s, grace_s)

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        shares = self._shares(tries)
        with ThreadPoolExecutor(max(1, len(shares)), thread_name_prefix="sink") as pool:
            asked = [
                (numbers, pool.submit(sink.attempt, [tries[n] for n in numbers], deadline_s))
                for sink, numbers in shares
            ]
            for numbers, answered in asked:
                answers |= dict(zip(numbers, answered.result(), strict=True))
        return [answers[n] for n in range(len(tries))]

    def close(self) -> None:
        for sink in self._made.values():
            sink.close()

    def _sink(self, one: Job | Try) -> Sink:
        return self._made[SINKS.get(one.spec.url.partition(":")[0].lower(), _DEFAULT)]

    def _shares(self, given: Sequence[W]) -> list[tuple[Sink, list[int]]]:
        """Each sink that is needed, and the numbers of the jobs or tries that are its own."""
        shares: dict[int, tuple[Sink, list[int]]] = {}
        for n, one in enumerate(given):
            sink = self._sink(one)
            shares.setdefault(id(sink), (sink, []))[1].append(n)
        return list(shares.values())
