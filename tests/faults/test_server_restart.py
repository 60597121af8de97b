"""The source's server goes away and comes back, in order and by a crash, under the running process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg

from evermark.embedded import postmaster
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.testing.pipeline import Scene
from evermark.testing.until import until


def test_p10_the_source_may_be_restarted_and_may_crash(tmp_path: Path) -> None:
    """GIVEN a running pipeline WHEN its database is restarted, then crashes THEN reading goes on by itself, exactly."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    with EmbeddedPostgres(tmp_path / "server") as server, Scene(folder, server.dsn(), {"steady": None}) as scene:
        running = scene.up()
        orders(server, 10)
        until(lambda: scene.delivered("steady") == 10, "the first orders came", timeout_s=60)
        for n, harm in enumerate((restart, crash), start=1):
            harm(server)
            orders(server, 10)
            wanted = 10 * (n + 1)
            until(lambda wanted=wanted: scene.delivered("steady") == wanted, "orders come again", timeout_s=90)
        scene.check_complete()
        assert not running.said("a hole was found")
        assert running.terminate() == 0


def restart(server: EmbeddedPostgres) -> None:
    server.stop()
    server.start()


def crash(server: EmbeddedPostgres) -> None:
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: postmaster.running(server.data) is None, "the server is gone")
    server.start()


def orders(server: EmbeddedPostgres, rows: int) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))
