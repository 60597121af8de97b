"""Replays through the real process: asked for by SQL while orders go on, killed in the middle, asked for again."""

from __future__ import annotations

from pathlib import Path

import psycopg

from evermark.testing.pipeline import Writer, died_by_itself
from evermark.testing.replays import ReplayScene
from evermark.testing.until import until


def _now(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute("select clock_timestamp()::text").fetchone()
        assert row is not None
        return str(row[0])


def test_a_replay_asked_by_sql_survives_kills_and_reaches_the_handlers(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN live traffic WHEN a window is replayed and the process dies twice THEN handlers see it whole, live too."""
    with ReplayScene(tmp_path, pg_dsn, {"one": None, "bundled": None}, bundled="bundle: 20") as scene:
        since = _now(pg_dsn)
        with psycopg.connect(pg_dsn) as conn:
            conn.execute("insert into public.orders (total) select n from generate_series(1, 600) n")
        to = _now(pg_dsn)
        wanted = scene.events_between(since, to)
        assert len(wanted) == 600
        writer = Writer(pg_dsn)
        writer.start()
        try:
            # GIVEN that all of it has been delivered once
            first = scene.up("replay.sent@1")
            until(lambda: not scene.missing(set(wanted)), "the window was delivered live", timeout_s=90)

            # WHEN a replay is asked for and the process dies after a slice was sent, then after one was settled
            scene.ask_by_sql(since, to)
            died_by_itself(first)
            died_by_itself(scene.up("replay.settled@1"))
            last = scene.up()

            # THEN the request is done and cleared, and each handler saw each event under the replay's id
            scene.wait_cleared()
            (replay,) = scene.replays()
            assert (replay["state"], replay["asked_by"]) == ("done", "sql")
            for name in ("one", "bundled"):
                seen = scene.replayed[name][replay["id"]]
                assert set(seen) == set(wanted), f"{name}: of {len(wanted)} events {len(seen)} were replayed"
                assert max(seen.values()) == 1, "its own retries are duplicates"

            # WHEN the same window is asked for again THEN it is another replay, under other ids
            scene.ask_by_sql(since, to)
            scene.wait_cleared()
            again, before = scene.replays()
            assert (before["id"], again["state"]) == (replay["id"], "done")
            assert set(scene.replayed["one"][again["id"]]) == set(wanted)
        finally:
            writer.finish()
        # THEN live deliveries missed nothing, and no control event reached anybody
        scene.check_complete()
        assert last.terminate() == 0
