"""A database that is not the one we left (P11): restored, cloned, promoted. Nothing is delivered from it unasked."""

from __future__ import annotations

from pathlib import Path

import psycopg

from evermark.testing.copies import copied, promote, started
from evermark.testing.pipeline import Instance, Scene
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until


def test_p11_a_restored_a_cloned_and_a_promoted_database_wait_for_a_persons_word(tmp_path: Path) -> None:
    """GIVEN copies that look like our database WHEN one takes its place THEN it is refused by name, and then mended."""
    scene_folder = tmp_path / "scene"
    scene_folder.mkdir(mode=0o711)
    tmp_path.chmod(0o711)
    with postgres_server(tmp_path / "original") as original, fresh_database(original) as dsn:
        database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        with Scene(scene_folder, dsn, {"steady": None}) as scene:
            # GIVEN orders taken before and after the copies were made
            running = scene.up()
            order(dsn, 5)
            until(lambda: scene.delivered("steady") == 5, "the first orders came", timeout_s=60)
            assert running.terminate() == 0
            copies = {name: copied(original, tmp_path / name) for name in ("restored", "cloned", "promoted")}
            scene.env["SHOP_DSN"] = original.dsn(str(database))
            running = scene.up()
            order(original.dsn(str(database)), 5)
            until(lambda: scene.delivered("steady") == 10, "the next orders came", timeout_s=60)
            assert running.terminate() == 0

            # WHEN a backup from before takes the place of the database THEN it is behind us
            with started(copies["restored"]) as server:
                running = pointed_at(scene, server, str(database))
                refused(scene, running, "behind our checkpoint")
                running.kill()
            # WHEN a clone has gone on by itself, further than we were THEN it lacks what we took
            with started(copies["cloned"]) as server:
                with psycopg.connect(server.dsn(str(database)), autocommit=True) as conn:
                    conn.execute("create table filler as select repeat('x', 500) from generate_series(1, 20000)")
                order(server.dsn(str(database)), 3)
                running = pointed_at(scene, server, str(database))
                refused(scene, running, "does not have the last event we took")
                running.kill()
            # WHEN a standby was promoted THEN it has another timeline
            promote(copies["promoted"])
            with started(copies["promoted"]) as server:
                order(server.dsn(str(database)), 3)
                running = pointed_at(scene, server, str(database))
                refused(scene, running, "is not the one we left")
                assert scene.delivered("steady") == 10
                # WHEN a person says that it is the right one THEN what it has and the log lacks is taken, once
                scene.run("source", "recover", "--choice", "repair", "--yes")
                until(lambda: scene.delivered("steady") == 13, "its orders came", timeout_s=90)
                order(server.dsn(str(database)), 2)
                until(lambda: scene.delivered("steady") == 15, "and go on coming", timeout_s=60)
                assert max(scene.handled["steady"].values()) == 1
                assert running.terminate() == 0
                # THEN it stays the right one
                running = scene.up()
                order(server.dsn(str(database)), 1)
                until(lambda: scene.delivered("steady") == 16, "also after a restart", timeout_s=60)
                assert running.terminate() == 0


def order(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, %s) n", (rows,))


def pointed_at(scene: Scene, server: PostgresServer, database: str) -> Instance:
    scene.env["SHOP_DSN"] = server.dsn(database)
    return scene.up()


def refused(scene: Scene, running: Instance, why: str) -> None:
    before = scene.delivered("steady")
    until(lambda: running.said("partition stopped"), "the partition stopped", timeout_s=60)
    assert running.said(why), running.log.read_text()[-3000:]
    assert running.said("evermark source recover")
    assert scene.delivered("steady") == before == 10
