"""The contract of sources over the outbox of a real Postgres."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import evermark as em
from evermark.testing.servers import PostgresServer
from tests.contract.postgres.outbox_scene import scene


class TestPostgresOutbox(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def filled(self, pg_server: PostgresServer) -> Iterator[None]:
        """Transactions of one and of several events, with one in between that was rolled back.

        The slot begins behind the installation, which is half a megabyte without an event: five hundred ranges of the
        smallest size, through which every test would go.
        """
        with scene(pg_server) as made:
            made.source.confirm(0, made.position(made.flush_lsn()))
            for number in range(6):
                made.emit("orders", str(number))
                with made.connection() as conn:
                    for each in range(number):
                        conn.execute("select pgstream.emit('users', %s, '{}')", (f"{number}.{each}",))
                    if number == 3:
                        conn.rollback()
            made.flush_lsn()
            self.source = made.source
            yield
