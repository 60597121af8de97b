"""The contract of sources over block streams of a real node, with State in a real Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import evermark as em
from evermark.testing.servers import PostgresServer
from tests.contract.blocknode.blocknode_scene import Node
from tests.contract.blocks.blocks_scene import scene


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Three streams: one with a gap's worth of blocks, one with a few, one in its minipool."""
    folder: Path = tmp_path_factory.mktemp("node")
    with Node(
        folder, "--seal-events", "3", "--seal-after", "3600s", "--snapshot-every", "2", "--page-blocks", "2"
    ) as made:
        client = made.client()
        for stream, count in (("long", 17), ("short", 4), ("pooled", 2)):
            client.create(stream)
            for _ in range(count):
                client.say(stream, 1)
        client.close()
        yield made


class TestBlockStreams(em.testing.SourceContract):
    @pytest.fixture(autouse=True)
    def filled(self, pg_server: PostgresServer, node: Node) -> Iterator[None]:
        with scene(pg_server) as made:
            self.source = made.source([node.url])
            yield
