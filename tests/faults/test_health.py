"""What /health and /readyz say is so: of a source that is away, of events that wait, of a database that is idle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from evermark.embedded.postgres import EmbeddedPostgres
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.until import until

_TABLE = "create table public.orders (id bigint generated always as identity primary key, total int)"


def partition(instance: Instance, name: str = "shop/0") -> dict[str, Any]:
    return instance.health(name)


def gauge(instance: Instance, name: str) -> float | None:
    _, text = instance.ask("/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), None)


def orders(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


class TwoShops(Scene):
    """Two databases, each on a server of its own, read by one instance."""

    def __init__(self, folder: Path, shop: str, other: str) -> None:
        super().__init__(folder, shop, {"steady": None})
        self.other = other
        self.env["OTHER_DSN"] = other

    def settings(self) -> str:
        return f'{super().settings()}\n  other: {{type: postgres, dsn: "${{OTHER_DSN}}", tables: [public.orders]}}'

    def prepare(self) -> None:
        for name, dsn in (("shop", self.dsn), ("other", self.other)):
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(_TABLE)
            self.run("source", "install", name)


def test_a_source_that_is_down_at_the_start_is_taken_when_it_comes_up(tmp_path: Path) -> None:
    """GIVEN one of two databases down WHEN it goes up, and the database later THEN the other delivers meanwhile, the
    first then, without a restart; and /readyz says which it is."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    with (
        EmbeddedPostgres(tmp_path / "shop") as shop,
        EmbeddedPostgres(tmp_path / "other") as other,
        TwoShops(folder, shop.dsn(), other.dsn()) as scene,
    ):
        orders(shop.dsn(), 5)
        shop.stop()

        running = scene.up()
        orders(other.dsn(), 5)
        until(lambda: scene.delivered("steady") == 5, "the other source delivers", timeout_s=90)
        code, text = running.ask("/readyz")
        assert code == 503 and "shop/0: stale" in text and "does not answer" in text and "other/0" not in text
        assert partition(running, "other/0")["status"] == "healthy"
        assert running.said("the source cannot be read yet")

        shop.start()
        until(lambda: scene.delivered("steady") == 10, "what had waited is taken", timeout_s=60)
        until(lambda: running.ask("/readyz") == (200, "ready\n"), "it is ready", timeout_s=30)
        orders(shop.dsn(), 5)
        until(lambda: scene.delivered("steady") == 15, "what comes is taken", timeout_s=30)
        until(lambda: partition(running)["lag_s"] == 0, "nothing waits", timeout_s=30)

        shop.stop()
        until(lambda: running.ask("/readyz")[0] == 503, "it is not ready while the source is away", timeout_s=30)
        assert partition(running)["status"] == "stale"
        assert not running.died() and running.terminate() == 0
        shop.start()


@contextmanager
def held(dsn: str) -> Iterator[None]:
    """Somebody else reads from the slot, so that nobody can take anything: a batch hangs."""
    with psycopg.connect(dsn, autocommit=True) as db:
        row = db.execute("select slot, publication from pgstream.readers").fetchone()
    assert row is not None
    slot, publication = row
    sender = psycopg.pq.PGconn.connect(make_conninfo(dsn, replication="database").encode())
    start = f"START_REPLICATION SLOT \"{slot}\" LOGICAL 0/0 (proto_version '1', publication_names '\"{publication}\"')"
    try:

        def is_ours() -> bool:
            found = sender.exec_(start.encode())
            return found.status == psycopg.pq.ExecStatus.COPY_BOTH

        until(is_ours, "the slot is ours")
        yield
    finally:
        sender.finish()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    tmp_path.chmod(0o711)
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    with EmbeddedPostgres(tmp_path / "server") as server, Scene(folder, server.dsn(), {"steady": None}) as made:
        yield made


def test_lag_is_of_what_waits_now(scene: Scene) -> None:
    """GIVEN an instance WHEN old events were taken, when a batch hangs, and when it goes on THEN lag is 0, grows, and
    is 0 again, in /health and metrics alike, with no other event to come."""
    with psycopg.connect(scene.dsn, autocommit=True) as db:
        db.execute("insert into pgstream.events (stream, created_at) values ('shop', now() - interval '1 hour')")
    running = scene.up()
    until(lambda: scene.delivered("steady") == 1, "an hour late, the event is delivered", timeout_s=90)
    found = until(
        lambda: (now := partition(running))["status"] == "healthy" and now["lag_s"] == 0 and now,
        "a database that is idle and taken has no lag",
        timeout_s=30,
    )
    assert found["events"] == 1 and json.loads(running.ask("/health")[1])["delivering"]

    with held(scene.dsn):
        orders(scene.dsn, 1)
        until(lambda: (partition(running)["lag_s"] or 0) > 6, "what waits is seen to wait", timeout_s=25)
        assert (gauge(running, 'evermark_partition_lag_seconds{partition="0",source="shop"}') or 0) > 6
        assert scene.delivered("steady") == 1
    until(lambda: scene.delivered("steady") == 2, "it is taken", timeout_s=60)
    until(lambda: partition(running)["lag_s"] == 0, "nothing waits", timeout_s=30)
    assert gauge(running, 'evermark_partition_lag_seconds{partition="0",source="shop"}') == 0
    assert partition(running)["status"] == "healthy"
    assert running.terminate() == 0
