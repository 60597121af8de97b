"""What the benches of block streams share: a node that is filled, and a pipeline that reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.taking import drain
from evermark.embedded.address import EmbeddedDsn
from evermark.embedded.java import ensure_java
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.stream_choice import ChosenStreams
from evermark.sources.blocks.target import BlocksTarget, Pace
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate
from evermark.testing.blocknodes import Client, Node

_ADDED_AT_ONCE = 1000
_CONNECTIONS = 32
_WATCHDOG_S = 600.0


def fill(client: Client, stream: str, events: int) -> list[str]:
    """So many events more; their ids."""
    ids: list[str] = []
    while len(ids) < events:
        ids += client.say(stream, min(_ADDED_AT_ONCE, events - len(ids)))
    return ids


def create(node: Node, streams: Sequence[str]) -> None:
    """Over many connections: a node writes what comes together at once."""

    def some(share: Sequence[str]) -> None:
        client = node.client()
        for stream in share:
            client.create(stream)
        client.close()

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(some, [streams[at::_CONNECTIONS] for at in range(_CONNECTIONS)]))


class Kept:
    """A state of the bench's own, embedded."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedPostgres(folder / "state")
        self.server.start()
        self.dsn = EmbeddedDsn(folder / "state")
        self.state = State(self.dsn.open, schema_for("bench"))
        migrate(self.state)

    def target(self, source: str, node: Node, streams: Sequence[str] = (), partitions: int = 1) -> BlocksTarget:
        choice = ChosenStreams(frozenset(streams))
        return BlocksTarget(
            source, (node.url,), self.dsn, self.state.schema, partitions=partitions, choice=choice, pace=Pace()
        )

    def close(self) -> None:
        self.state.close()
        self.server.stop()


class Reading:
    """One warm Spark session, as a running instance has."""

    def __init__(self, folder: Path, kept: Kept) -> None:
        os.environ["JAVA_HOME"] = str(ensure_java(folder / "java"))
        from evermark.spark.session import make_session

        self._folder, self._kept = folder, kept
        self._spark = make_session("bench", "local[16,4]", folder / "scratch", {}, noise=folder / "spark.log")

    def close(self) -> None:
        self._spark.stop()

    def drain(self, target: BlocksTarget, start: str, events: int) -> tuple[float, list[str]]:
        source = BlockStreams(target)
        try:
            return drain(self._spark.sparkContext, self._kept.state, source, target.source, self._folder, events, start)
        finally:
            source.close()
