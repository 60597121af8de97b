"""The end of a replay that a row of `streams` asked for: the row shows it no longer."""

from __future__ import annotations

from psycopg import sql

from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.place import PostgresPlace

# A newer request, or the same window with another end, stays: it has a control event of its own.
_CLEAR = """
update {schema}.streams set replay_from_ts = null, replay_to_ts = null
where name = %s and replay_from_ts = %s::timestamptz and replay_to_ts is not distinct from %s::timestamptz
"""


def clear_request(place: PostgresPlace, stream: str, since: str, until: str | None) -> bool:
    """Whether the row still asked for exactly this, and now asks for nothing."""
    link = connect(place.dsn)
    try:
        query = sql.SQL(_CLEAR + "returning true").format(schema=sql.Identifier(place.schema))
        return link.row(query.as_string(), (stream, since, until), doing="clearing a replay request") is not None
    finally:
        link.close()
