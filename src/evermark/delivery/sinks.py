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
    """A `Sink` that hands each subscription's work to the sink of its url. Jobs for several sinks run side by side."""

    def __init__(self, *, low_priority: bool = False) -> None:
        self._made = {make: make(low_priority=low_priority) for make in {_DEFAULT, *SINKS.values()}}

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        finished: queue.SimpleQueue[list[Result] | Exception] = queue.SimpleQueue()

        def work(sink: Sink, mine: Sequence[Job]) -> None:
            try:
                for results in sink.deliver_each(mine, deadline_s, grace_s, slack_s):
                    finished.put(results)
            except Exception as error:  # noqa: BLE001 - raised again where the results are waited for
                finished.put(error)

        shares = self._shares(jobs)
        if len(shares) == 1:
            yield from shares[0][0].deliver_each(jobs, deadline_s, grace_s, slack_s)
        elif shares:
            with ThreadPoolExecutor(len(shares), thread_name_prefix="sink") as pool:
                for sink, mine in shares:
                    pool.submit(work, sink, mine)
                for _ in jobs:
                    results = finished.get()
                    if isinstance(results, Exception):
                        raise results
                    yield results

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        return self._sink(job).deliver_prefix(job, deadline_s, grace_s)

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for sink, mine in self._shares(tries):
            answers |= zip(map(id, mine), sink.attempt(mine, deadline_s), strict=True)
        return [answers[id(one)] for one in tries]

    def close(self) -> None:
        for sink in self._made.values():
            sink.close()

    def _sink(self, one: Job | Try) -> Sink:
        return self._made[SINKS.get(one.spec.url.partition(":")[0].lower(), _DEFAULT)]

    def _shares(self, given: Sequence[W]) -> list[tuple[Sink, list[W]]]:
        shares: dict[int, tuple[Sink, list[W]]] = {}
        for one in given:
            sink = self._sink(one)
            shares.setdefault(id(sink), (sink, []))[1].append(one)
        return list(shares.values())
