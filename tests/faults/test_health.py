"""What /health and /readyz say is so: of a source that is away, of events that wait, of a database that is idle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from evermark.embedded import postmaster
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.until import until
from tests.faults.conftest import SharedShop

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

    def came(self, wanted: int) -> None:
        until(lambda: self.delivered("steady") == wanted, f"{wanted} orders came")
        assert max(self.handled["steady"].values()) == 1


def with_password(server: EmbeddedPostgres) -> str:
    """The server's address with the password itself in it, which must be shown to nobody."""
    return make_conninfo(server.dsn(), password=server.password())


def crash(server: EmbeddedPostgres) -> None:
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: postmaster.running(server.data) is None, "the server is gone")
    server.start()


def test_p10_a_source_may_be_down_at_the_start_and_later_and_may_crash(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """GIVEN one of two databases down WHEN it comes up, goes down, comes back and crashes THEN the other delivers
    meanwhile, and the first whenever it is up, exactly, without a restart; /readyz says which it is."""
    tmp_path = tmp_path_factory.mktemp("p10")  # a short path: else the server's socket has another place at each start
    tmp_path.chmod(0o711)
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    with (
        EmbeddedPostgres(tmp_path / "shop") as shop,
        EmbeddedPostgres(tmp_path / "other") as other,
        TwoShops(folder, with_password(shop), other.dsn()) as scene,
    ):
        orders(shop.dsn(), 5)
        password = shop.password()
        shop.stop()

        running = scene.up()
        orders(other.dsn(), 5)
        scene.came(5)
        code, text = running.ask("/readyz")
        assert code == 503 and "shop/0: stale" in text and "does not answer" in text and "other/0" not in text
        assert partition(running, "other/0")["status"] == "healthy"
        found = partition(running)
        assert "Postgres at" in found["reason"] and "does not answer" in found["reason"] and found["hint"]
        assert running.said("the source cannot be read yet")
        assert password not in running.text() and password not in found["reason"]

        shop.start()
        scene.came(10)
        until(lambda: running.ask("/readyz") == (200, "ready\n"), "it is ready")
        orders(shop.dsn(), 5)
        scene.came(15)
        until(lambda: partition(running)["lag_s"] == 0, "nothing waits")

        shop.stop()
        until(lambda: running.ask("/readyz")[0] == 503, "it is not ready while the source is away")
        assert partition(running)["status"] == "stale"

        shop.start()
        orders(shop.dsn(), 5)
        scene.came(20)
        crash(shop)
        orders(shop.dsn(), 5)
        scene.came(25)
        assert sorted(scene.logged()) == sorted(scene.committed())
        assert not running.said("a gap was found")
        assert not running.died() and running.terminate() == 0


class ShortLanes(Scene):
    """Lanes that are renewed before a source has failed five times in a row: no breaker opens."""

    sections = "spark: {lane: 2s}\n"

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(_TABLE)
        self.run("source", "install")


def test_a_source_that_is_dead_is_said_to_be_so_over_many_short_lanes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """GIVEN lanes of two seconds WHEN the database is down over four of them THEN /health is never anything but
    unhealthy, each lane that begins included; and when it is back, reading goes on."""
    tmp_path = tmp_path_factory.mktemp("lanes")
    tmp_path.chmod(0o711)
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    with EmbeddedPostgres(tmp_path / "shop") as shop, ShortLanes(folder, shop.dsn(), {"one": None}) as scene:
        running = scene.up()
        until(lambda: partition(running).get("status") == "healthy", "the source is read")
        shop.stop()
        until(lambda: partition(running)["status"] == "stale", "it is known to be away")
        lanes, seen = running.text().count("source owned"), set[tuple[str, str]]()

        def four_lanes_later() -> bool:
            told = json.loads(running.ask("/health")[1])
            seen.add((told["status"], told["partitions"]["shop/0"]["status"]))
            return running.text().count("source owned") >= lanes + 4

        until(four_lanes_later, "four lanes have begun")
        assert seen == {("unhealthy", "stale")}
        assert gauge(running, 'evermark_breaker_state{of="partition 0",source="shop",state="open"}') == 0
        shop.start()
        orders(shop.dsn(), 3)
        until(lambda: scene.delivered("one") == 3, "reading goes on")
        assert running.terminate() == 0


@contextmanager
def held(dsn: str) -> Iterator[None]:
    """Somebody else reads from the slot, so that nobody can take anything: a batch hangs."""
    db = psycopg.connect(dsn, autocommit=True)
    row = db.execute("select slot, publication from pgstream.readers").fetchone()
    assert row is not None
    slot, publication = row
    sender = psycopg.pq.PGconn.connect(make_conninfo(dsn, replication="database").encode())
    start = f"START_REPLICATION SLOT \"{slot}\" LOGICAL 0/0 (proto_version '1', publication_names '\"{publication}\"')"
    try:

        def is_ours() -> bool:
            db.execute(
                "select pg_terminate_backend(active_pid, 1000) from pg_replication_slots where slot_name = %s", (slot,)
            )
            found = sender.exec_(start.encode())
            return found.status == psycopg.pq.ExecStatus.COPY_BOTH

        until(is_ours, "the slot is ours")
        yield
    finally:
        sender.finish()
        db.close()


def test_lag_is_of_what_waits_now(shop: SharedShop) -> None:
    """GIVEN an instance WHEN old events were taken, when a batch hangs, and when it goes on THEN lag is 0, grows, and
    is 0 again, in /health and metrics alike, with no other event to come."""
    lag = 'evermark_partition_lag_seconds{partition="0",source="shop"}'
    running = shop.running()
    until(lambda: partition(running).get("status") == "healthy", "the source is read")
    shop.check_complete()
    before = shop.delivered("one")
    taken = until(lambda: partition(running), "its health is told")["events"]
    with psycopg.connect(shop.dsn, autocommit=True) as db:
        db.execute("insert into pgstream.events (stream, created_at) values ('shop', now() - interval '1 hour')")
    until(lambda: shop.delivered("one") == before + 1, "an hour late, the event is delivered")
    found = until(
        lambda: (
            (now := partition(running))["status"] == "healthy" and now["lag_s"] == 0 and now["events"] > taken and now
        ),
        "a database that is idle and taken has no lag",
    )
    assert found["events"] == taken + 1 and json.loads(running.ask("/health")[1])["delivering"]

    with held(shop.dsn):
        orders(shop.dsn, 1)
        until(lambda: (partition(running)["lag_s"] or 0) > 6, "what waits is seen to wait")
        assert (gauge(running, lag) or 0) > 6
        assert shop.delivered("one") == before + 1
    until(lambda: shop.delivered("one") == before + 2, "it is taken")
    until(lambda: partition(running)["lag_s"] == 0, "nothing waits")
    assert gauge(running, lag) == 0
    assert partition(running)["status"] == "healthy"
    shop.check_complete()
