"""What many contract tests begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Result
from tests.contract.webhook.webhook_receiver import Receiver


class WaitingSink(WebhookSink):
    """All results at once, in order: what most tests look at."""

    def deliver(self, jobs: Sequence[Job], *times: float | None, **named: float | None) -> list[Result]:
        results = [result for some in self.deliver_each(jobs, *times, **named) for result in some]
        return sorted(results, key=lambda result: (result.subscription, result.place, result.batch))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A webhook on loopback that answers as it is told, and keeps what it got."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def sink() -> Iterator[WaitingSink]:
    made = WaitingSink()
    yield made
    made.close()
