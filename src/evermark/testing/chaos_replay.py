"""`make chaos ARGS=--replay`: a long window replayed beside live traffic, killed three times, and what live felt of it.

First the window is replayed without any kill while single orders are committed at a steady rate: their way from commit
to receiver is measured before and meanwhile. Then the same window is asked for again, and the process dies after a
slice was sent, after one was settled, and in the middle of one.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path

import psycopg

from evermark.testing.clockwork import Clockwork
from evermark.testing.pipeline import Instance, Ledger, died_by_itself
from evermark.testing.replays import ReplayScene
from evermark.testing.until import until

_WARM_S = 10.0
_QUIET_S = 20.0
_PATIENCE_S = 600.0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _p99(scene: ReplayScene, clockwork: Clockwork, since: float, to: float) -> float:
    """Of the orders committed in between, once all of them have arrived."""
    mine = {key: at for key, at in list(clockwork.committed.items()) if since <= at < to}
    arrived = scene.live["one"]
    until(lambda: mine.keys() <= arrived.keys(), "live orders arrive", timeout_s=_PATIENCE_S)
    ages = sorted(datetime.fromisoformat(arrived[key]).timestamp() - at for key, at in mine.items())
    return ages[int(len(ages) * 0.99)]


def _window(scene: ReplayScene, events: int) -> tuple[str, str]:
    """So many orders in transactions of a thousand, in the log and delivered once; their first and last time."""
    with psycopg.connect(scene.dsn, autocommit=True) as conn:
        for first in range(0, events, 1_000):
            conn.execute(
                "insert into public.orders (total) select n from generate_series(%s::int, %s::int) n",
                (first, min(events, first + 1_000) - 1),
            )
        row = conn.execute("select min(created_at)::text, max(created_at)::text from pgstream.events").fetchone()
    assert row is not None
    return str(row[0]), str(row[1])


def _replayed(scene: ReplayScene, wanted: set[str], since: str, to: str, *, nth: int) -> tuple[str, float]:
    """Ask, and wait until the source's row says that it is over; the replay's id and how long it took."""
    began = time.monotonic()
    scene.ask_by_sql(since, to)
    scene.wait_cleared(_PATIENCE_S)
    seconds = time.monotonic() - began
    return _checked(scene, wanted, nth=nth), seconds


def _checked(scene: ReplayScene, wanted: set[str], *, nth: int) -> str:
    replays = scene.replays()
    assert len(replays) == nth, f"{len(replays)} replays where {nth} were asked for"
    assert replays[0]["state"] == "done", replays[0]
    seen = scene.replayed["one"][replays[0]["id"]]
    assert set(seen) == wanted, f"of {len(wanted)} events the handler saw {len(seen)}"
    assert max(seen.values()) == 1, "a repeat of the replay reached the handler"
    return str(replays[0]["id"])


def _killed_three_times(scene: ReplayScene, running: Instance, since: str, to: str) -> Instance:
    running.terminate()
    first = scene.up("replay.sent@1")
    scene.ask_by_sql(since, to)
    died_by_itself(first, _PATIENCE_S)
    died_by_itself(scene.up("replay.settled@1"), _PATIENCE_S)
    third = scene.up()
    before = sum(len(seen) for seen in scene.replayed["one"].values())
    until(
        lambda: sum(len(seen) for seen in scene.replayed["one"].values()) > before + 1_000,
        "the replay goes on",
        timeout_s=_PATIENCE_S,
    )
    third.kill()
    return scene.up()


def replay_beside_live(folder: Path, dsn: str, events: int) -> tuple[Ledger, dict[str, float]]:
    """The whole scenario; what was counted, and the figures it found. Raises when anything was lost or doubled."""
    with ReplayScene(folder, dsn, {"one": None}, one="bundle: 50") as scene:
        since, to = _window(scene, events)
        wanted = set(scene.events_between(since, to))
        running = scene.up()
        until(lambda: not scene.missing(wanted), "the window was delivered once", timeout_s=_PATIENCE_S)
        clockwork = Clockwork(dsn)
        clockwork.start()
        try:
            time.sleep(_WARM_S)
            began = time.time()
            time.sleep(_QUIET_S)
            quiet = _p99(scene, clockwork, began, time.time())
            _say(f"live p99 without a replay: {quiet:.2f} s")
            began = time.time()
            _, took_s = _replayed(scene, wanted, since, to, nth=1)
            beside = _p99(scene, clockwork, began, time.time())
            _say(f"live p99 beside a replay of {events} events: {beside:.2f} s; the replay took {took_s:.0f} s")
            last = _killed_three_times(scene, running, since, to)
            scene.wait_cleared(_PATIENCE_S)
            _checked(scene, wanted, nth=2)
            _say("killed three times: each event of the window reached the handler once")
        finally:
            clockwork.finish()
        ledger = scene.check_complete(_PATIENCE_S)
        assert last.terminate() == 0
        return ledger, {"p99_s": quiet, "p99_replay_s": beside, "replay_s": took_s}
