"""The status of every subscription as a stream has it: healthy, failover or replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from pydantic import Field

from evermark.delivery.store.stream_status import StreamStatus
from evermark.server.messages import Answer


class FailoverAnswer(Answer):
    """The receiver is down: the first event that it has not got, once it is known, and since when."""

    checkpoint_event_id: str | None
    since: datetime | None


class ReplayWindow(Answer):
    """The window that is being replayed, both ends included."""

    start: datetime = Field(serialization_alias="from")
    to: datetime


class StatusAnswer(Answer):
    """`failover` is there while the status is failover, `replay` while it is replay."""

    subscription: str
    status: Literal["healthy", "failover", "replay"]
    failover: FailoverAnswer | None
    replay: ReplayWindow | None

    @classmethod
    def of(cls, row: StreamStatus) -> Self:
        failover = FailoverAnswer(checkpoint_event_id=row.checkpoint_event_id, since=row.failover_since)
        window = (
            ReplayWindow(start=row.replay_from, to=row.replay_to)
            if row.replay_from is not None and row.replay_to is not None
            else None
        )
        told = {"failover": failover if row.status == "failover" else None, "replay": window}
        return cls.model_validate({"subscription": row.subscription, "status": row.status, **told})


class StatusPage(Answer):
    """By name."""

    streams: list[StatusAnswer]


@dataclass(frozen=True)
class StatusService:
    every: Callable[[], Sequence[StreamStatus]]
    one: Callable[[str], StreamStatus]

    def page(self) -> StatusPage:
        """The status of every subscription."""
        return StatusPage(streams=[StatusAnswer.of(row) for row in self.every()])

    def get(self, name: str) -> StatusAnswer:
        """The status of a subscription."""
        return StatusAnswer.of(self.one(name))
