"""A source uninstalled and installed again over the old data folder."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from evermark.secrets import Plain
from evermark.sources.postgres.admin.install import install, uninstall
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.until import until


def order(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


def came(scene: Scene, wanted: int) -> None:
    until(lambda: scene.delivered("steady") == wanted, f"{wanted} orders came")


def ran(scene: Scene, rows: int, wanted: int) -> Instance:
    """An instance that has delivered these orders, and all before them."""
    running = scene.up()
    order(scene.dsn, rows)
    came(scene, wanted)
    return running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a deployment whose embedded server may run as another user."""
    tmp_path.chmod(0o711)
    made = tmp_path / "scene"
    made.mkdir(mode=0o711)
    return made


def test_uninstalled_and_installed_again_goes_on_with_the_old_data_folder(folder: Path, pg_dsn: str) -> None:
    """GIVEN a data folder that remembers WHEN its source is installed anew THEN that is said, and `up` goes on; WHEN
    another reader keeps the outbox meanwhile THEN ours takes what it missed."""
    with Scene(folder, pg_dsn, {"steady": None}) as scene:
        assert ran(scene, 3, 3).terminate() == 0
        gone = scene.run("source", "uninstall", "--yes").stderr
        assert "remember what was taken" in gone and "what changes until then is in no event" in gone
        order(pg_dsn, 2)  # in no event: nothing captures them
        again = scene.run("source", "install").stderr
        assert "events were taken here before, up to batch" in again and "was installed anew at" in again
        assert "reading goes on with what the outbox holds" in again
        order(pg_dsn, 4)
        running = ran(scene, 1, 8)
        assert not running.said("partition stopped")
        assert scene.run("source", "recover").returncode == 0
        assert running.terminate() == 0

        # WHEN it is uninstalled where another deployment reads the same outbox
        other = PostgresTarget(Plain(pg_dsn), "other_slot", "other_pub")
        install(other)
        scene.run("source", "uninstall", "--yes")
        order(pg_dsn, 2)  # captured still: the other deployment reads them
        scene.run("source", "install")
        running = ran(scene, 1, 11)
        assert not running.said("partition stopped")
        assert running.terminate() == 0
        assert max(scene.handled["steady"].values()) == 1
        assert set(scene.committed()) <= set(scene.logged()) and len(scene.logged()) == 11
        uninstall(other)
