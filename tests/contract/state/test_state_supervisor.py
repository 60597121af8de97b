"""The embedded state server of a running deployment comes back when it died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from evermark.app.state_supervisor import StateSupervisor
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import EvermarkError
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate
from evermark.testing.until import until


def test_a_state_server_that_died_is_started_again_and_has_kept_everything(tmp_path: Path) -> None:
    """GIVEN a deployment's state WHEN its server is killed THEN it is back by itself, with what was committed."""
    tmp_path.chmod(0o711)
    with EmbeddedPostgres(tmp_path / "state") as server:
        state = State(server.dsn, schema_for("shop"))
        keeper = StateSupervisor(server)
        try:
            migrate(state)
            with state.connection() as conn:
                conn.execute("create table kept as select 7 as n")
            first = server.pid
            os.kill(first, signal.SIGKILL)
            # A connection that is open outlives the server it came from, for a moment: so first the new one.
            until(lambda: server.pid != first, "the server is another one")
            assert until(lambda: _kept(state), "state answers again") == 7
        finally:
            keeper.stop()
            state.close()


def _kept(state: State) -> int | None:
    try:
        with state.connection() as conn:
            row = conn.execute("select n from kept").fetchone()
    except EvermarkError:
        return None
    return int(row[0]) if row else None
