"""A source uninstalled and installed again over the old data folder, and one installed by an earlier version."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from evermark.secrets import Plain
from evermark.sources.postgres.admin.install import install, uninstall
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.until import until
from tests.contract.postgres.outbox_v2_scene import install_v2


def order(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


def came(scene: Scene, wanted: int) -> None:
    until(lambda: scene.delivered("steady") == wanted, f"{wanted} orders came", timeout_s=90)


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
    """GIVEN a data folder that remembers WHEN its source is installed anew THEN that is said, and `up` goes on."""
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
        # AND it stays so
        assert running.terminate() == 0
        assert ran(scene, 1, 9).terminate() == 0
        assert max(scene.handled["steady"].values()) == 1


def test_installed_again_where_another_deployment_kept_the_outbox_misses_nothing(folder: Path, pg_dsn: str) -> None:
    """GIVEN an outbox that another reader kept WHEN ours is uninstalled and comes back THEN it takes what it missed."""
    with Scene(folder, pg_dsn, {"steady": None}) as scene:
        other = PostgresTarget(Plain(pg_dsn), "other_slot", "other_pub")
        install(other)
        assert ran(scene, 3, 3).terminate() == 0
        scene.run("source", "uninstall", "--yes")
        order(pg_dsn, 2)  # captured still: the other one reads them
        scene.run("source", "install")
        assert ran(scene, 1, 6).terminate() == 0
        scene.check_complete()
        uninstall(other)


class InstalledBefore(Scene):
    """A shop whose outbox was installed by version 2."""

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
            install_v2(conn, "evermark_scene_shop", "evermark_scene_shop", "public.orders")


def test_an_outbox_of_the_version_before_is_read_without_a_person_and_upgraded_under_up(
    folder: Path, pg_dsn: str
) -> None:
    """GIVEN an outbox of version 2 WHEN `up` runs THEN it delivers, warns, and goes on through the upgrade."""
    with InstalledBefore(folder, pg_dsn, {"steady": None}) as scene:
        running = ran(scene, 3, 3)
        until(lambda: running.said("the outbox is of version 2"), "the old version was warned of", timeout_s=30)
        assert running.said("evermark source install")
        scene.run("source", "install")
        order(pg_dsn, 2)
        came(scene, 5)
        assert not running.said("partition stopped") and not running.said("a gap was found")
        assert running.terminate() == 0
        assert ran(scene, 1, 6).terminate() == 0
        scene.check_complete()
