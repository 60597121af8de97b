"""What tests of an outbox share: a server of each Postgres at hand. A module that wants other settings has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.testing.servers import PostgresServer, postgres_server, system_binaries


@pytest.fixture(scope="session", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(
    request: pytest.FixtureRequest, pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PostgresServer]:
    """Each Postgres at hand. Tests make databases in it; they neither stop it nor change its settings."""
    if request.param is None:
        yield pg_server
        return
    with postgres_server(tmp_path_factory.mktemp("other"), binaries=request.param) as found:
        yield found
