"""What State keeps apart for owners that overlap, logs that were set back, and marks that are made meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.sources.base import Limit
from evermark.testing.servers import PostgresServer
from tests.contract.blocknode.blocknode_scene import Client, Node
from tests.contract.blocks.blocks_scene import ALL, EACH, Scene, new_stream, scene


@pytest.fixture
def here(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), *EACH, "--snapshot-every", "4") as made:
        yield made


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    made = node.client()
    yield made
    made.close()


def test_an_owner_that_begins_late_takes_nothing_from_its_successor(here: Scene, node: Node, client: Client) -> None:
    """GIVEN an owner paused before `begin` WHEN its successor has gone on THEN its root is gone with the next batch."""
    stream = new_stream(client, 5)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    late, then = here.source([node.url], [stream]), dict(pipe.ends)
    client.say(stream, 3)
    pipe.drain(ALL)
    before = here.synced(stream)
    late.check(then)
    late.begin(0, then[0])
    found = late.latest(then, ALL)
    assert found != then
    assert late.may_repeat_from(0, then[0]) < then[0]
    assert here.synced(stream) == before
    assert here.rows("select count(*) from block_ticks where starts = ends") == [(1,)]
    client.say(stream, 2)
    pipe.drain(ALL)
    assert (pipe.ids(stream), pipe.dropped) == (client.hashes(stream), 0)
    assert here.rows("select count(*) from block_ticks") == [(0,)]


def test_a_log_that_was_set_back_gets_what_it_lacks(here: Scene, node: Node, client: Client) -> None:
    """GIVEN State that knows more than the log THEN all is compared with the log, streams not reached yet included."""
    streams = [new_stream(client, 6) for _ in range(2)]
    pipe = here.pipeline([node.url], streams)
    pipe.step(Limit(rows_max=4, wait_s=0.0))
    end = pipe.ends[0]
    pipe.drain(ALL)
    pipe.log[0] = [row for row in pipe.log[0] if row["position"] < end]
    pipe.ends[0] = end
    pipe.start()
    pipe.step(Limit(rows_max=1, wait_s=0.0))
    assert here.rows("select count(*) from block_streams where anew") == [(1,)]
    pipe.drain(ALL)
    for stream in streams:
        assert pipe.ids(stream) == client.hashes(stream)
    assert here.rows("select count(*) from block_streams where anew") == [(0,)]


def test_marks_and_a_persons_word_outlive_ticks_made_before_them(here: Scene, node: Node, client: Client) -> None:
    """GIVEN a batch that is not confirmed WHEN its stream is marked, and accepted THEN both stay."""
    stream = new_stream(client, 4)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    client.say(stream, 2)
    pipe.step(ALL, "unconfirmed")
    plans = pipe.source.plans
    plans.mark_stale(0, stream, 6, "fork: another block")
    seen = plans.stale(0)[stream]
    plans.accept_fork(0, stream)
    plans.unmark_stale(stream, seen)
    pipe.source.confirm(0, pipe.ends[0])
    assert list(here.stale()) == [stream]
    known = plans.known([stream])[stream].known
    assert known is not None
    assert known.fork_accepted
    pipe.drain(ALL)
    assert here.stale() == {}
    assert pipe.ids(stream) == client.hashes(stream)
    plans.mark_stale(0, stream, 6, "a lie")
    plans.unmark_stale(stream, plans.stale(0)[stream])
    assert here.stale() == {}
