"""A database that is not the one we left (P11): restored, cloned, promoted. Nothing is delivered from it unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from evermark.testing.copies import copied, promote, started
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """Ten orders taken, and three copies of the database from when there were five."""
    folder = tmp_path / "scene"
    folder.mkdir(mode=0o711)
    tmp_path.chmod(0o711)
    with postgres_server(tmp_path / "original") as original, fresh_database(original) as dsn:
        database = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
        with Scene(folder, dsn, {"steady": None}) as scene:
            running = scene.up()
            order(dsn, 5)
            came(scene, 5)
            assert running.terminate() == 0
            names = ("restored", "cloned", "promoted")
            copies = dict(zip(names, copied(original, *(tmp_path / name for name in names)), strict=True))
            scene.env["SHOP_DSN"] = original.dsn(database)
            running = scene.up()
            order(original.dsn(database), 5)
            came(scene, 10)
            assert running.terminate() == 0
            yield Shop(scene, copies, database)


def test_p11_a_cloned_a_restored_and_a_promoted_database_wait_for_a_persons_word(shop: Shop) -> None:
    """GIVEN copies that look like our database WHEN one takes its place THEN it is refused by name, then repaired."""
    # WHEN a clone has gone on by itself, further than we were THEN it lacks what we took
    with shop.at("cloned") as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table filler as select repeat('x', 500) from generate_series(1, 20000)")
        order(dsn, 3)
        running = shop.refused("does not have the last event we took")
        # WHEN a person gives up what lies between THEN only what comes after is taken
        shop.scene.run("source", "recover", "--choice", "skip", "--yes")
        until(lambda: running.said("the gap is closed"), "the gap was accepted")
        assert running.said("a gap was accepted")
        order(dsn, 1)
        came(shop.scene, 11)
        assert running.terminate() == 0
    # WHEN a backup from before takes the place of the database THEN it is behind us; and a person says it is right
    with shop.at("restored") as dsn:
        order(dsn, 4)
        running = shop.refused("behind our checkpoint")
        shop.scene.run("source", "recover", "--choice", "repair", "--yes")
        # THEN what it has and the log lacks is taken, though all its positions are lower than ours
        came(shop.scene, 15)
        assert running.terminate() == 0
    # WHEN a standby was promoted THEN it has another timeline
    promote(shop.copies["promoted"])
    with shop.at("promoted") as dsn:
        order(dsn, 3)
        running = shop.refused("is not the one we left")
        shop.scene.run("source", "recover", "--choice", "repair", "--yes")
        came(shop.scene, 18)
        # THEN it stays the right one
        shop.goes_on_after_a_restart(running, dsn, 19)


@dataclass
class Shop:
    scene: Scene
    copies: dict[str, PostgresServer]
    database: str

    @contextmanager
    def at(self, copy: str) -> Iterator[str]:
        """The deployment's file points at this copy from here on."""
        with started(self.copies[copy]) as server:
            self.scene.env["SHOP_DSN"] = server.dsn(self.database)
            yield server.dsn(self.database)

    def refused(self, why: str) -> Instance:
        before = self.scene.delivered("steady")
        running = self.scene.up()
        until(lambda: running.said("partition stopped"), "the partition stopped")
        assert running.said(why), running.log.read_text()[-3000:]
        assert running.said("evermark source recover")
        assert self.scene.delivered("steady") == before
        return running

    def goes_on_after_a_restart(self, running: Instance, dsn: str, wanted: int) -> None:
        assert running.terminate() == 0
        running = self.scene.up()
        order(dsn, 1)
        came(self.scene, wanted)
        assert max(self.scene.handled["steady"].values()) == 1
        assert running.terminate() == 0


def came(scene: Scene, wanted: int) -> None:
    until(lambda: scene.delivered("steady") == wanted, f"{wanted} orders came")


def order(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))
