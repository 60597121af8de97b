"""`make chaos ARGS=--down`: a receiver that is down while 200 000 events are made, and comes back.

It must cost next to nothing while it is down, miss nothing, and get the events of a key in their order; and another
receiver must not notice: single orders are committed at a steady rate, and their way to it is measured before and
meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import psycopg

from evermark.testing.clockwork import Clockwork
from evermark.testing.listener import Failing, Record
from evermark.testing.pipeline import Ledger, Scene
from evermark.testing.until import until

_KEYS = 200
_WARM_S = 5.0
_QUIET_S = 20.0
_PATIENCE_S = 600.0
_QUEUE_ROWS_MAX = 1_000


class _DownScene(Scene):
    """Notes when the orders arrived, and in which order the events of a key did."""

    def __init__(self, folder: Path, dsn: str, receivers: Mapping[str, Failing | None], **options: str) -> None:
        self.arrived: dict[str, dict[str, float]] = defaultdict(dict)
        self.of_key: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        super().__init__(folder, dsn, receivers, 1, **options)

    def _recorder(self, name: str) -> Callable[[Record], None]:
        note = super()._recorder(name)

        def record(record: Record) -> None:
            note(record)
            if not record.duplicate and record.event.key is not None:
                at = datetime.fromisoformat(record.at).timestamp()
                self.arrived[name].setdefault(record.event.key, at)
                self.of_key[name][record.event.key].append(record.event.position)

        return record

    def parked(self, name: str) -> tuple[int, int]:
        """Waiting and dead."""
        rows = json.loads(self.run("subscription", "list", "--json").stdout)
        (mine,) = (row for row in rows if row["subscription"] == name)
        return mine["waiting"], mine["dead"]


def down_and_back(folder: Path, dsn: str, events: int) -> tuple[Ledger, dict[str, float]]:
    """What was counted, and the figures it found. Raises when anything was lost, doubled, or out of order."""
    options = {"steady": "bundle: 50", "down": "bundle: 50, ordered: true"}
    with _DownScene(folder, dsn, {"steady": None, "down": None}, **options) as scene:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("insert into public.orders (total) select 0 from generate_series(1, %s)", (_KEYS,))
        running = scene.up()
        scene.wait_delivered(_KEYS - 1)
        clockwork = Clockwork(dsn)
        clockwork.start()
        try:
            time.sleep(_WARM_S)
            quiet = _p99(scene, clockwork, _QUIET_S)
            scene.receivers["down"].failing = Failing.parse("503:100%")
            until(lambda: running.said("subscription fell behind"), "it fell behind")
            turning = _p99(scene, clockwork, _WARM_S)
            meanwhile = _p99(scene, clockwork, _QUIET_S)
            told = f"p99 of the other one: {quiet:.2f} s, {meanwhile:.2f} s while one is down"
            sys.stderr.write(f"{told}, {turning:.2f} s in the first {_WARM_S:.0f} seconds of it\n")
            _update(dsn, events)
            until(lambda: _has(scene, "steady", dsn), "the other one has everything", timeout_s=_PATIENCE_S)
            waiting, dead = scene.parked("down")
            assert waiting + dead < _QUEUE_ROWS_MAX, f"{waiting + dead} rows in the queue"
            assert dead == 0, f"{dead} dead deliveries"
            scene.receivers["down"].failing = None
            began = time.monotonic()
        finally:
            clockwork.finish()
        ledger = scene.check_complete(_PATIENCE_S)
        drained_s = time.monotonic() - began
        for key, positions in scene.of_key["down"].items():
            assert positions == sorted(positions), f"key {key} came out of order"
        assert running.terminate() == 0
        return ledger, {
            "queue_rows": float(waiting),
            "p99_s": quiet,
            "p99_down_s": meanwhile,
            "p99_turning_s": turning,
            "drained_s": drained_s,
        }


def _update(dsn: str, events: int) -> None:
    """Many events of few keys."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(events // _KEYS):
            conn.execute("update public.orders set total = total + 1 where id <= %s", (_KEYS,))


def _has(scene: _DownScene, name: str, dsn: str) -> bool:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select count(*) from pgstream.events where op = 'update'").fetchone()
    assert row is not None
    return sum(len(seen) - 1 for key, seen in list(scene.of_key[name].items()) if int(key) <= _KEYS) >= int(str(row[0]))


def _p99(scene: _DownScene, clockwork: Clockwork, seconds: float) -> float:
    """Of the orders committed from now on for a while, at the receiver that is well."""
    began = time.time()
    time.sleep(seconds)
    mine = {key: at for key, at in list(clockwork.committed.items()) if at >= began}
    arrived = scene.arrived["steady"]
    until(lambda: mine.keys() <= arrived.keys(), "live orders arrive", timeout_s=_PATIENCE_S)
    ages = sorted(arrived[key] - at for key, at in mine.items())
    return ages[int(len(ages) * 0.99)]
