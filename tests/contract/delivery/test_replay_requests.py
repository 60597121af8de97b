"""From `update pgstream.streams` to a registered replay and back to a clear row, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.replay.owner import RequestDesk
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.event import TAKEN, taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import LogReader
from evermark.log.write import BatchWriter
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from tests.contract.log.log_scene import events
from tests.contract.postgres.outbox_scene import Scene, scene

STREAM = "public.orders"
SINCE, UNTIL = "2026-01-01 00:00:00.000001+00", "2026-01-02 00:00:00+00"


@pytest.fixture
def at(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        made.emit(STREAM, "1")
        yield made


def ask(at: Scene, since: str | None = SINCE, until: str | None = UNTIL) -> None:
    at.db.execute(
        "update pgstream.streams set replay_from_ts = %s, replay_to_ts = %s where name = %s", (since, until, STREAM)
    )


def shown(at: Scene) -> tuple[Any, ...]:
    row = at.db.execute("select replay_from_ts, replay_to_ts from pgstream.streams where name = %s", (STREAM,))
    found = row.fetchone()
    assert found is not None
    return tuple(None if v is None else v.isoformat() for v in found)


def log_of(folder: Path, rows: list[dict[str, Any]]) -> LogReader:
    """A log whose first batch has no control event, and whose second holds these rows."""
    log = DeltaLog(folder)
    columns: dict[str, object] = {name: [row[name] for row in rows] for name in TAKEN.names}
    for batch, taken in ((1, events(0, 1, 3)), (2, taken_batch(columns, len(rows)))):
        file = BatchWriter(folder, "shop", 0, batch).write_all([taken])
        assert file is not None
        log.commit(Append(0, batch, 1, "", "", (file,)))
    return LogReader(folder)


def test_a_request_is_registered_once_and_cleared_exactly(at: Scene, tmp_path: Path, pg_server: PostgresServer) -> None:
    """GIVEN a row that asks WHEN its control event is found twice THEN one replay knows enough to clear that row."""
    ask(at)
    reader = log_of(tmp_path, at.drain())
    with fresh_state(pg_server.socket_dsn()) as state:
        replays = PostgresReplays(state)
        epoch = owners(PostgresLeases(state, is_gone=lambda holder: True))(source_lease("shop"))
        desk = RequestDesk(replays, "shop", reader, epoch, get_logger())
        desk(0, 0, 1)
        assert replays.open() == []
        desk(0, 1, 2)
        desk(0, 0, 2)
        (replay,) = replays.open()
    request = replay.request
    assert (request.streams, request.source) == ((STREAM,), "shop")
    assert request.since.isoformat() == "2026-01-01T00:00:00.000001+00:00"
    assert request.asked_since is not None
    at.source.replayed(STREAM, request.asked_since, request.asked_until)
    assert shown(at) == (None, None)
    assert at.drain() == [], "clearing asks for nothing"


def test_what_cannot_be_understood_is_counted_and_nothing_else(
    at: Scene, tmp_path: Path, pg_server: PostgresServer
) -> None:
    """GIVEN control events of other kinds WHEN they are found THEN they are counted, and nothing stops."""
    for payload in ('{"action": "dance"}', '{"action": "replay"}', "[]"):
        at.db.execute("insert into pgstream.events (stream, op, payload) values (%s, 'control', %s)", (STREAM, payload))
    reader = log_of(tmp_path, at.drain())
    metrics = Metrics()
    with fresh_state(pg_server.socket_dsn()) as state:
        replays = PostgresReplays(state)
        ignored = metrics.controls_ignored.labels("shop")
        RequestDesk(replays, "shop", reader, 1, get_logger(), ignored.inc)(0, 0, 2)
        assert replays.open() == []
    assert metrics.registry.get_sample_value("evermark_controls_ignored_total", {"source": "shop"}) == 3


@pytest.mark.parametrize(
    ("since", "until"), [("2026-01-01 00:00:00+00", UNTIL), (SINCE, None), (SINCE, "2026-01-03 00:00:00+00")]
)
def test_a_newer_request_is_not_cleared(at: Scene, since: str, until: str | None) -> None:
    """GIVEN a row that asks for something else by now WHEN an old request is cleared THEN the row stays."""
    ask(at, since, until)
    before = shown(at)
    at.source.replayed(STREAM, SINCE, UNTIL)
    assert shown(at) == before
    at.source.replayed("nobody", since, until)
    assert shown(at) == before


def test_an_open_end_is_cleared_as_one(at: Scene) -> None:
    """GIVEN a request without an end WHEN it is cleared THEN null is compared as null."""
    ask(at, SINCE, None)
    at.source.replayed(STREAM, SINCE, None)
    assert shown(at) == (None, None)
