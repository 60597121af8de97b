"""The rates of subscriptions, kept by State for all processes of a deployment: each takes stretches of time in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from evermark.delivery.decide.pace import WAIT_S_MAX
from evermark.delivery.webhook.client import rest_rates, use_rates
from evermark.secrets import Hidden
from evermark.state.connection import State

# In one step, by the database's own clock; no row: the next stretch begins too late. What is given away further ahead
# than anyone may take was so at another rate, or before the clock was set back, and does not count.
# Replays come and go: a stretch that ended long ago belongs to no replay any more.
_TAKE = """
with gone as (
    delete from rates where subscription = %(name)s and replay_id <> %(replay)s
      and free_at < clock_timestamp() - interval '1 day'
)
insert into rates as r (subscription, replay_id, free_at)
values (%(name)s, %(replay)s, clock_timestamp() + %(span_s)s * interval '1 second')
on conflict (subscription, replay_id) do update
set free_at = case
    when r.free_at between clock_timestamp() and clock_timestamp() + %(ahead_s)s * interval '1 second' then r.free_at
    else clock_timestamp()
  end + %(span_s)s * interval '1 second'
where r.free_at <= clock_timestamp() + %(wait_s)s * interval '1 second'
  or r.free_at > clock_timestamp() + %(ahead_s)s * interval '1 second'
returning extract(epoch from free_at - clock_timestamp())::float8 - %(span_s)s
"""


class PostgresRates:
    """A `Rates`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def take(self, subscription: str, replay_id: str, span_s: float, wait_s: float) -> float | None:
        times = {"span_s": span_s, "wait_s": wait_s, "ahead_s": WAIT_S_MAX + span_s}
        given = {"name": subscription, "replay": replay_id, **times}
        with self._state.connection() as conn:
            row = conn.execute(_TAKE, given).fetchone()
        return float(row[0]) if row else None

    def rest(self) -> None:
        self._state.rest()


@dataclass(frozen=True)
class SharedRates:
    """The same, for tasks of Spark's that post. Picklable, secrets sealed."""

    dsn: Hidden
    schema: str

    @contextmanager
    def shared(self) -> Iterator[None]:
        """This process asks State. Behind the block it keeps no connection: workers outlive their tasks by hours."""
        use_rates(lambda: PostgresRates(State(self.dsn.open, self.schema, connections_max=2)))
        try:
            yield
        finally:
            rest_rates()
