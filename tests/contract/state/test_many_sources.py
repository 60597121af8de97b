"""What many sources of one process ask of State: few connections, few statements, and none waits for another's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from evermark.app.ingesting import LaneTools
from evermark.breaker import Breaker
from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.errors import UnreachableError
from evermark.ingest.limits import ReadingLimits
from evermark.ingest.repair.base import Step
from evermark.ingest.repair.postgres import Recoveries
from evermark.log.head import Head, PostgresHeads, durable_version
from evermark.log.table import commit_file
from evermark.observe.metrics import Metrics
from evermark.runtime import Threads
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import BlocksTarget
from evermark.sources.replica.source import ReplicaTables, open_plans
from evermark.sources.replica.target import ReplicaTarget
from evermark.state.connection import State
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from evermark.testing.until import until


def test_a_source_that_begins_needs_one_connection(pg_server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a State with a single connection WHEN a source brings its log in order THEN it does: sources that each hold
    one and wait for a second would wait for each other."""
    dsn = pg_server.socket_dsn()
    with fresh_state(dsn) as state:
        narrow = State(lambda: dsn, state.schema, connections_max=1, statement_timeout_s=5)
        tools = _tools(narrow, tmp_path / "log")
        tools.prepare()
        assert tools.prepared.is_set()
        narrow.close()


def test_an_owner_that_comes_back_goes_on_with_the_log_it_had_open(pg_server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN an owner, and a repair beside it with a log of its own WHEN it owns the source again THEN it has its own
    log, which only one of them uses; and not after torn commits were set aside."""
    with fresh_state(pg_server.socket_dsn()) as state:
        tools = _tools(state, tmp_path / "log")
        tools.prepare()
        first, beside = tools.open_log(1)[0], tools.open_log(1)[0]
        assert first is not beside
        tools.prepare()
        again = tools.open_log(2)[0]
        assert again is first
        assert tools.open_log(2)[0] is not again
        again.fence(0, 2)
        commit_file(tmp_path / "log", 1).write_text("")
        tools.prepare()
        assert tools.open_log(3)[0] is not first


def test_an_owner_makes_no_log_where_one_was(pg_server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a head that knows a batch, and a log whose disk is away WHEN its next owner opens it THEN it says so, and
    makes nothing in its place; when it is back it is opened. A source that was begun, without a batch, gets a log."""
    with fresh_state(pg_server.socket_dsn()) as state:
        tools = _tools(state, tmp_path / "log")
        heads, epoch = PostgresHeads(state), owners(PostgresLeases(state, is_gone=lambda _: True))(source_lease("shop"))
        heads.move("shop", 0, Head(0, epoch, "a", -1))
        tools.prepare()
        tools.open_log(epoch)
        (tmp_path / "log").rename(tmp_path / "away")
        heads.move("shop", 0, Head(1, epoch, "b", 1))
        tools = _tools(state, tmp_path / "log")
        tools.warm()
        tools.prepare()
        with pytest.raises(UnreachableError, match="is gone"):
            tools.open_log(epoch)
        assert not (tmp_path / "log").exists()
        (tmp_path / "away").rename(tmp_path / "log")
        tools.open_log(epoch)


def _tools(state: State, folder: Path) -> LaneTools:
    source: Any = SimpleNamespace(partitions=lambda: [0], divisible=lambda: False)
    recoveries: Any = SimpleNamespace(past=lambda _: ())
    limits = ReadingLimits()
    stores: Any = SimpleNamespace(
        sources={"shop": source}, reading=limits, log_folder=lambda _: folder, copies=None, state=state,
        recoveries=recoveries, store_breaker=Breaker(limits.breaker), heads=PostgresHeads(state), checkpoints=None,
        replays=None,
    )  # fmt: skip
    tasks: Any = SimpleNamespace(write_chunks=None, write_pieces=None)
    return LaneTools(stores, tasks, "shop", Metrics(), Limit(), Threads())


def test_the_durable_version_is_that_of_the_last_head(pg_server: PostgresServer) -> None:
    """GIVEN heads of two partitions WHEN asked THEN the later version counts; -1 before the first batch."""
    with fresh_state(pg_server.socket_dsn()) as state:
        epoch = owners(PostgresLeases(state, is_gone=lambda _: True))(source_lease("shop"))
        heads = PostgresHeads(state)
        heads.move("shop", 0, Head(1, epoch, "a", 4))
        heads.move("shop", 1, Head(1, epoch, "a", 7))
        with state.connection() as conn:
            assert durable_version(conn, "shop") == 7
            assert durable_version(conn, "crm") == -1


def test_sources_with_an_open_recovery_are_known_by_one_statement(pg_server: PostgresServer) -> None:
    """GIVEN recoveries of two sources, one of them over WHEN looked up THEN both are known, and which is open."""
    with fresh_state(pg_server.socket_dsn()) as state:
        take_over = owners(PostgresLeases(state, is_gone=lambda _: True))
        recoveries = Recoveries(state)
        for name in ("shop", "crm"):
            epoch = take_over(source_lease(name))
            found = recoveries.open(name, 0, "lost", "0", epoch)
            if name == "crm":
                recoveries.move(found, Step.FAILED, epoch, error="gone")
        assert recoveries.known() == {"shop": True, "crm": False}


def test_block_sources_of_one_process_share_connections_until_the_last_is_closed(pg_server: PostgresServer) -> None:
    """GIVEN a hundred block sources WHEN each asks State THEN they share few connections, which are closed with the
    last of them."""
    with fresh_state(pg_server.socket_dsn()) as state:
        dsn = make_conninfo(pg_server.socket_dsn(), application_name=f"shared_{state.schema}")
        target = BlocksTarget("b0", ("http://127.0.0.1:1",), Plain(dsn), state.schema)
        sources = [BlockStreams(replace(target, source=f"b{n}")) for n in range(100)]
        for source in sources:
            source.plans.stale(0)
        assert _connections(state) == 1
        for source in sources[1:]:
            source.close()
        sources[0].plans.stale(0)
        sources[0].close()
        assert sources[0]._opened is None
        sources[0].plans.stale(0)  # opened anew
        sources[0].close()


def test_replica_sources_share_the_connections_of_block_sources(pg_server: PostgresServer) -> None:
    """GIVEN a hundred replica sources, and a block source, of one deployment WHEN each asks State THEN they share few
    connections; one that is closed twice takes them from no other."""
    with fresh_state(pg_server.socket_dsn()) as state:
        dsn = Plain(make_conninfo(pg_server.socket_dsn(), application_name=f"shared_{state.schema}"))
        node = ReplicaTarget("http://127.0.0.1:1", "shop", "reader", "peer", Plain("key"), ("orders",))
        replicas = [ReplicaTables(node, partial(open_plans, dsn, state.schema, f"r{n}")) for n in range(100)]
        blocks = BlockStreams(BlocksTarget("b0", ("http://127.0.0.1:1",), dsn, state.schema))
        blocks.plans.stale(0)
        for source in replicas:
            assert source.plans.load() is None
        assert _connections(state) == 1
        for source in (*replicas, *replicas):
            source.close()
        blocks.plans.stale(0)
        assert _connections(state) == 1
        blocks.close()
        until(lambda: not _connections(state), "the last one closed them")


def _connections(state: State) -> int:
    with state.connection() as conn:
        asked = "select count(*) from pg_stat_activity where application_name = %s"
        row = conn.execute(asked, (f"shared_{state.schema}",)).fetchone()
    return int(row[0]) if row is not None else 0
