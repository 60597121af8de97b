"""Data folders that tests copy are servers of their own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from evermark.embedded.binaries import Binaries
from evermark.testing.servers import fresh_database, postgres_server, system_binaries


@pytest.mark.parametrize("binaries", [None, *system_binaries()], ids=lambda found: str(found.major) if found else "own")
def test_copied_servers_are_told_apart_and_come_back_after_a_crash(tmp_path: Path, binaries: Binaries | None) -> None:
    """GIVEN two servers from one data folder THEN each has an identifier of its own, which its readers are told, and
    finds its own WAL again WHEN it was killed."""
    with ExitStack() as stack:
        servers = [stack.enter_context(postgres_server(tmp_path / name, binaries=binaries)) for name in ("a", "b")]
        identifiers = set()
        for server in servers:
            with fresh_database(server) as dsn:
                with psycopg.connect(f"{dsn}&replication=database", autocommit=True) as conn:
                    (told, *_) = conn.execute("IDENTIFY_SYSTEM").fetchone() or ("",)
                with psycopg.connect(dsn, autocommit=True) as conn:
                    kept = conn.execute("select system_identifier::text from pg_control_system()").fetchone()
                    conn.execute("create table there as select 1")
                assert (told,) == kept
                identifiers.add(told)
                server.kill()
                server.start()
                with psycopg.connect(server.dsn(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])) as conn:
                    assert conn.execute("select count(*) from there").fetchone() == (1,)
        assert len(identifiers) == 2
