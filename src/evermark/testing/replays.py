"""A scene whose receivers tell replays from first deliveries, for the fault tests and `make chaos` of replays."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from evermark.event import Op
from evermark.log.read import LogReader
from evermark.storage import readable
from evermark.testing.listener import Failing, Record
from evermark.testing.pipeline import PATIENCE_S, Scene
from evermark.testing.until import until


class ReplayScene(Scene):
    """`handled` counts first deliveries only; `replayed` what handlers saw of each replay, by its id."""

    def __init__(
        self, folder: Path, dsn: str, receivers: Mapping[str, Failing | None], slots: int = 1, **options: str
    ) -> None:
        self.replayed: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self.arrived: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.live: dict[str, dict[str, str]] = defaultdict(dict)
        super().__init__(folder, dsn, receivers, slots, **options)

    def _recorder(self, name: str) -> Callable[[Record], None]:
        first = super()._recorder(name)

        def record(record: Record) -> None:
            event = record.event
            if event.delivery_id == event.id:
                first(record)
                self.live[name].setdefault(event.key or "", record.at)
                return
            assert event.historical, "a replayed event says that it is historical"
            assert event.delivery_id.startswith(f"{event.id}."), event.delivery_id
            if not record.duplicate:
                replay = event.delivery_id[len(event.id) + 1 :]
                self.replayed[name][replay][event.id] += 1
                self.arrived[replay].append((event.timestamp or "", event.id))

        return record

    def logged(self) -> list[str]:
        """Control events are in the log, and count for nobody."""
        found: list[str] = []
        for file in LogReader(self.log_root / self.source).files():
            rows = pq.read_table(readable(file.path), columns=["event_id", "op"])
            found += [i for i, op in zip(*rows.to_pydict().values(), strict=True) if op != Op.CONTROL]
        return found

    def ask_by_sql(self, since: str, to: str | None = None) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(
                "update pgstream.streams set replay_from_ts = %s, replay_to_ts = %s where name = 'public.orders'",
                (since, to),
            )

    def asked_for(self) -> tuple[Any, ...] | None:
        """What the source's row shows."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            return conn.execute(
                "select replay_from_ts, replay_to_ts from pgstream.streams where name = 'public.orders'"
            ).fetchone()

    def events_between(self, since: str, to: str) -> list[str]:
        """Ids of a window, both ends included, in the order of a replay."""
        with psycopg.connect(self.dsn) as conn:
            rows = conn.execute(
                "select id from pgstream.events where op <> 'control' and created_at between %s and %s"
                " order by created_at, id",
                (since, to),
            )
            return [str(row[0]) for row in rows]

    def replays(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("replay", "list", "--json").stdout)
        return found

    def wait_cleared(self, timeout_s: float = PATIENCE_S) -> None:
        """Until the source's row shows no request any more: the replay it asked for is over."""
        until(lambda: self.asked_for() == (None, None), "the request is cleared", timeout_s=timeout_s)
