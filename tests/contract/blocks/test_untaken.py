"""Which block streams have news that the log does not have, asked of real nodes by whoever wants to know."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from evermark.errors import UnreachableError
from evermark.sources.base import Limit
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from tests.contract.blocknode.blocknode_scene import Client, Node
from tests.contract.blocks.blocks_scene import ALL, EACH, Scene, new_stream, scene


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), *EACH) as made:
        yield made


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    made = node.client()
    yield made
    made.close()


@pytest.fixture
def here(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


def test_news_of_a_stream_waits_until_it_was_taken(node: Node, client: Client, here: Scene) -> None:
    """GIVEN streams that were taken WHEN one has news THEN it waits, planned or not, until its batch is in the log."""
    stream = new_stream(client, 2)
    pipe = here.pipeline([node.url], [stream])
    looking = here.source([node.url], [stream])
    assert 0 in looking.untaken(pipe.ends)
    pipe.drain(ALL)
    assert dict(looking.untaken(pipe.ends)) == {}
    client.say(stream, 1)
    before = here.rows("select * from block_ticks")
    found = looking.untaken(pipe.ends)[0]
    assert found.upto > pipe.ends[0] and found.oldest_s is not None and found.oldest_s < 60
    assert here.rows("select * from block_ticks") == before, "looking plans nothing"
    pipe.source.latest(pipe.ends, ALL)
    assert 0 in looking.untaken(pipe.ends), "what is planned is not taken"
    pipe.step(ALL, "unconfirmed")
    assert dict(looking.untaken(pipe.ends)) == {}, "it is in the log, though nobody was told yet"


def test_news_that_nobody_takes_gets_older(node: Node, client: Client, here: Scene) -> None:
    """GIVEN news WHEN nobody reads THEN its age is that by the node's clock."""
    stream = new_stream(client)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    client.say(stream, 1)
    said_at = time.monotonic()
    looking = here.source([node.url], [stream])
    age = until(lambda: looking.untaken(pipe.ends)[0].oldest_s, "a whole second has gone by on the node's clock")
    assert age <= time.monotonic() - said_at + 1.0


def test_news_of_a_stream_that_nobody_wants_is_passed_over(node: Node, client: Client, here: Scene) -> None:
    """GIVEN news of another stream WHEN the reader has looked at it THEN nothing waits."""
    stream, other = new_stream(client, 1), new_stream(client, 1)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    client.say(other, 3)
    pipe.drain(ALL)
    assert dict(here.source([node.url], [stream]).untaken(pipe.ends)) == {}


def test_each_partition_has_its_own_news(node: Node, client: Client, here: Scene) -> None:
    """GIVEN two partitions WHEN a stream of one has news THEN the other is not behind."""
    streams = [new_stream(client, 1) for _ in range(8)]
    pipe = here.pipeline([node.url], streams, partitions=2)
    pipe.drain(ALL)
    client.say(streams[0], 1)
    found = here.source([node.url], streams, partitions=2).untaken(pipe.ends)
    before = dict(pipe.ends)
    pipe.drain(ALL)
    assert set(found) == {p for p, end in pipe.ends.items() if end != before[p]} and len(found) == 1


def test_what_is_left_over_from_a_small_batch_waits(node: Node, client: Client, here: Scene) -> None:
    """GIVEN a stream with more than a batch holds WHEN one batch was taken THEN the rest waits."""
    stream = new_stream(client, 12)
    pipe = here.pipeline([node.url], [stream])
    looking = here.source([node.url], [stream])
    for _ in range(3):
        pipe.step(Limit(rows_max=2, wait_s=0.0))
        assert 0 in looking.untaken(pipe.ends)
    pipe.drain(ALL)
    assert dict(looking.untaken(pipe.ends)) == {}


def test_another_node_answers_for_one_that_is_away_and_nobody_is_an_error(
    node: Node, client: Client, here: Scene
) -> None:
    """GIVEN a node that is away WHEN there is another one, or none THEN it answers, or that is said."""
    stream = new_stream(client, 1)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    nobody = "http://127.0.0.1:1"
    assert dict(here.source([nobody, node.url], [stream]).untaken(pipe.ends)) == {}
    with pytest.raises(UnreachableError):
        here.source([nobody], [stream]).untaken(pipe.ends)
