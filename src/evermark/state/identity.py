"""Which State this is. A copy of its database is the same one."""

from __future__ import annotations

from evermark.state.connection import State


def identity_of(state: State) -> str:
    """Made with State, and never changed."""
    with state.connection() as conn:
        row = conn.execute("select uuid::text from state_identity").fetchone()
    assert row is not None  # noqa: S101 - inserted with its table, and never deleted
    return str(row[0])
