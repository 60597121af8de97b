"""The status of each subscription, in the words of a stream: healthy, failover or replay. In State, as a view."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from evermark.cluster.fence import DELIVER_LEASE, fenced
from evermark.delivery.model import SourcePartition
from evermark.errors import NotFoundError
from evermark.state.connection import State

_STATUS = """
select subscription, status, checkpoint_event_id, failover_since, replay_from, replay_to from stream_status
where %(name)s::text is null or subscription = %(name)s order by subscription
"""
_KNOWN = "select subscription, generation, source, partition, batch, event_id from failovers"
_NOTE = """
insert into failovers (subscription, generation, source, partition, batch, event_id)
values (%s, %s, %s, %s, %s, %s)
on conflict (subscription) do update
set (generation, source, partition, batch, event_id, since) =
    (excluded.generation, excluded.source, excluded.partition, excluded.batch, excluded.event_id,
     case when failovers.generation = excluded.generation then failovers.since else excluded.since end)
"""
_END = "delete from failovers where subscription = any(%s)"


@dataclass(frozen=True)
class StreamStatus:
    subscription: str
    status: str  # healthy, failover or replay
    checkpoint_event_id: str | None = None  # of a failover: the first event that was not delivered
    failover_since: datetime | None = None
    replay_from: datetime | None = None
    replay_to: datetime | None = None


@dataclass(frozen=True)
class Failover:
    """The event from which a subscription goes on when its endpoint is back."""

    subscription: str
    generation: int
    place: SourcePartition
    batch: int
    event_id: str


class PostgresStatus:
    def __init__(self, state: State) -> None:
        self._state = state

    def all(self) -> list[StreamStatus]:
        return list(self._rows(None))

    def one(self, name: str) -> StreamStatus:
        for row in self._rows(name):
            return row
        raise NotFoundError(f"no subscription is called {name[:80]!r}", hint="see `evermark subscription list`")

    def _rows(self, name: str | None) -> Iterator[StreamStatus]:
        with self._state.connection() as conn:
            rows = conn.execute(_STATUS, {"name": name}).fetchall()
        return (StreamStatus(*row) for row in rows)

    def failovers(self) -> dict[str, Failover]:
        with self._state.connection() as conn:
            rows = conn.execute(_KNOWN).fetchall()
        return {row[0]: Failover(row[0], row[1], SourcePartition(row[2], row[3]), row[4], row[5]) for row in rows}

    def save(self, noted: Collection[Failover], ended: Collection[str], epoch: int) -> None:
        """By the owner of delivery alone."""
        with fenced(self._state, DELIVER_LEASE, epoch) as conn:
            for one in noted:
                values = (one.place.source, one.place.partition, one.batch, one.event_id)
                conn.execute(_NOTE, (one.subscription, one.generation, *values))
            if ended:
                conn.execute(_END, (list(ended),))
