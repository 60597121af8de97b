"""A block source on real nodes with its state in a real Postgres, and the few verbs its tests are told with."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.stream_choice import ChosenStreams
from evermark.sources.blocks.target import BlocksTarget, Pace
from evermark.state.connection import State
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state
from evermark.testing.until import until
from simulator.blocks.pipeline import Pipeline
from tests.contract.blocknode.blocknode_scene import Client, Node

NEVER = ("--seal-after", "3600s", "--seal-events", "1000")  # nothing is sealed unless it is asked for
EACH = ("--seal-events", "1")  # every event is a block
ALL = Limit(wait_s=0.0)
PACE = Pace(connect_s=2.0, read_s=2.0, patience_s=0.6, requests_per_s=10_000)
_names = itertools.count()


@dataclass
class Scene:
    """A state of its own, and sources on it."""

    dsn: str
    state: State
    sources: list[BlockStreams] = field(default_factory=list)

    def target(self, urls: Sequence[str], streams: Sequence[str] = (), **more: Any) -> BlocksTarget:
        chosen: dict[str, Any] = {"choice": ChosenStreams(frozenset(streams)), "pace": PACE} | more
        return BlocksTarget("chat", tuple(urls), Plain(self.dsn), self.state.schema, **chosen)

    def source(self, urls: Sequence[str], streams: Sequence[str] = (), **more: Any) -> BlockStreams:
        made = BlockStreams(self.target(urls, streams, **more))
        self.sources.append(made)
        return made

    def pipeline(self, urls: Sequence[str], streams: Sequence[str] = (), **more: Any) -> Pipeline:
        """Each of its processes has a source of its own, that came there pickled."""
        place = self.target(urls, streams, **more)

        def another() -> BlockStreams:
            made: BlockStreams = pickle.loads(pickle.dumps(BlockStreams(place)))
            self.sources.append(made)
            return made

        pipe = Pipeline(another)
        pipe.start()
        return pipe

    def rows(self, query: str, *args: object, returns: bool = True) -> list[tuple[Any, ...]]:
        with self.state.connection() as conn:
            done = conn.execute(query, args)
            return done.fetchall() if returns else []

    def synced(self, stream: str) -> tuple[Any, ...] | None:
        """(snapshot_miniblock, minipool_gen, prev_miniblock_hash, xmin) of a stream."""
        asked = """select snapshot_miniblock, minipool_gen, prev_miniblock_hash, xmin::text from stream_sync_state
            where stream_id = %s"""
        found = self.rows(asked, f"chat/{stream}".encode())
        return found[0] if found else None

    def stale(self) -> dict[str, str]:
        return dict(self.rows("select stream, reason from block_stale"))

    def hurry(self) -> None:
        """Stale streams are tried now."""
        self.rows("update block_stale set next_at = clock_timestamp() returning 1")


@contextmanager
def scene(server: PostgresServer) -> Iterator[Scene]:
    with fresh_state(server.dsn()) as state:
        made = Scene(server.dsn(), state)
        try:
            yield made
        finally:
            for source in made.sources:
                source.close()


def new_stream(client: Client, count: int = 0, **more: Any) -> str:
    stream = f"room{next(_names)}"
    client.create(stream, **more)
    if count:
        client.say(stream, count)
    return stream


def level(follower: Node, leader: Node) -> None:
    """Wait until the follower has all that the leader has."""
    client, theirs = follower.client(), leader.client()
    wanted = theirs.good("GET", "/v1/streams", touched_after=0)["touched"]
    until(
        lambda: client.good("GET", "/v1/node")["followed"].get("touched", 0) >= wanted,
        "the follower is level",
    )
    client.close()
    theirs.close()
