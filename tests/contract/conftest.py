"""What many contract tests begin with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract.webhook_receiver import Receiver

from evermark.delivery.webhook.sink import WebhookSink


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A webhook on loopback that answers as it is told, and keeps what it got."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def sink() -> Iterator[WebhookSink]:
    made = WebhookSink()
    yield made
    made.close()
