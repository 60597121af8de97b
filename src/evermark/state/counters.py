"""Counts that must survive a restart: what expired, what a person dropped, which duplicates were skipped."""

from __future__ import annotations

from collections.abc import Mapping

from evermark.state.connection import Connection, State

_ADD = """
insert into counters as c (name, label, value)
select %s, label, value from unnest(%s::text[], %s::bigint[]) as given (label, value)
order by label
on conflict (name, label) do update set value = c.value + excluded.value
"""


def count(conn: Connection, name: str, by_label: Mapping[str, int]) -> None:
    """Add to counters inside the caller's transaction, so that the count and what it counts are seen together."""
    given = {label: value for label, value in by_label.items() if value}
    if given:
        conn.execute(_ADD, (name, list(given), list(given.values())))


def read(state: State, name: str) -> dict[str, int]:
    with state.connection() as conn:
        rows = conn.execute("select label, value from counters where name = %s", (name,)).fetchall()
    return {str(label): int(value) for label, value in rows}
