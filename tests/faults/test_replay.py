"""Replays through the real process: asked for by SQL while orders go on, killed in the middle, asked for again."""

from __future__ import annotations

import psycopg

from evermark.testing.pipeline import died_by_itself
from evermark.testing.until import until
from tests.faults.conftest import SharedShop


def _now(dsn: str) -> str:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute("select clock_timestamp()::text").fetchone()
        assert row is not None
        return str(row[0])


def test_a_replay_asked_by_sql_survives_kills_and_reaches_the_handlers(shop: SharedShop) -> None:
    """GIVEN live traffic WHEN a window is replayed and the process dies twice THEN handlers see it whole, live too."""
    since = _now(shop.dsn)
    with psycopg.connect(shop.dsn) as conn:
        conn.execute("insert into public.orders (total) select n from generate_series(1, 600) n")
    to = _now(shop.dsn)
    wanted = shop.events_between(since, to)
    assert len(wanted) == 600
    with shop.writing():
        # GIVEN that all of it has been delivered once
        first = shop.running("replay.sent@1")
        until(lambda: not shop.missing(set(wanted)), "the window was delivered live")

        # WHEN a replay is asked for and the process dies after a slice was sent, then after one was settled
        shop.ask_by_sql(since, to)
        died_by_itself(first)
        died_by_itself(shop.up("replay.settled@1"))
        shop.running()

        # THEN the request is done and cleared, and each handler saw each event under the replay's id
        shop.wait_cleared()
        (replay,) = shop.replays()
        assert (replay["state"], replay["asked_by"]) == ("done", "sql")
        for name in ("one", "bundled"):
            seen = shop.replayed[name][replay["id"]]
            assert set(seen) == set(wanted), f"{name}: of {len(wanted)} events {len(seen)} were replayed"
            assert max(seen.values()) == 1, "its own retries are duplicates"

        # WHEN the same window is asked for again THEN it is another replay, under other ids
        shop.ask_by_sql(since, to)
        shop.wait_cleared()
        again, before = shop.replays()
        assert (before["id"], again["state"]) == (replay["id"], "done")
        assert set(shop.replayed["one"][again["id"]]) == set(wanted)
    # THEN live deliveries missed nothing, and no control event reached anybody
