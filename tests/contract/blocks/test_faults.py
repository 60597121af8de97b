"""Block streams whose nodes are killed, slow, behind, or lie: what is taken is true and whole, or not taken yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evermark.errors import UnreachableError
from evermark.sources.base import Limit
from evermark.testing.servers import PostgresServer
from tests.contract.blocknode.blocknode_scene import Client, Node
from tests.contract.blocks.blocks_scene import ALL, EACH, PACE, Scene, level, new_stream, scene

OPTIONS = (*EACH, "--snapshot-every", "6", "--page-blocks", "4", "--resume-blocks", "3")
LIES: list[Mapping[str, Any]] = [
    {"fault": "lie", "op": "miniblocks", "number": 9, "lie": "hash"},
    {"fault": "lie", "op": "miniblocks", "number": 9, "lie": "event"},
    {"fault": "lie", "op": "miniblocks", "number": 9, "lie": "previous"},
    {"fault": "skip", "op": "miniblocks", "number": 9},
]


@pytest.fixture
def here(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


@pytest.fixture(scope="module")
def leader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("leader"), *OPTIONS) as made:
        yield made


@pytest.fixture
def client(leader: Node) -> Iterator[Client]:
    made = leader.client()
    yield made
    made.close()


def _gap(here: Scene, client: Client, urls: list[str], **more: Any) -> tuple[Any, str, str]:
    """A pipeline on `urls` that has four blocks of a stream which has 24 by now, and another stream with news."""
    stream, other = new_stream(client, 3), new_stream(client)
    pipe = here.pipeline([f"http://127.0.0.1:{client.port}"], [stream, other], **more)
    pipe.drain(ALL)
    client.say(stream, 20)
    client.say(other, 2)
    pipe_on = here.pipeline(urls, [stream, other], **more)
    pipe_on.ends, pipe_on.log = pipe.ends, pipe.log
    pipe_on.start()
    return pipe_on, stream, other


@pytest.mark.parametrize("fault", LIES, ids=lambda fault: str(fault.get("lie", fault["fault"])))
def test_a_block_that_is_not_true_is_never_passed(
    here: Scene, leader: Node, client: Client, tmp_path: Path, fault: Mapping[str, Any]
) -> None:
    """B10, B12: with nobody else to ask the stream is stale in front of it, and the others go on; then it is filled."""
    with Node(tmp_path, *OPTIONS, "--follow", leader.url, faults=[fault]) as liar:
        stream, other = new_stream(client, 3), new_stream(client)
        level(liar, leader)
        pipe = here.pipeline([liar.url], [stream, other])
        pipe.drain(ALL)
        client.say(stream, 20)
        client.say(other, 2)
        level(liar, leader)
        pipe.drain(ALL)
        assert pipe.ids(other) == client.hashes(other)
        true = client.hashes(stream)
        assert pipe.ids(stream) == true[: len(pipe.ids(stream))]
        state = here.synced(stream)
        assert state is not None
        assert state[1] <= 9
        assert list(here.stale()) == [stream]
        assert pipe.source.condition().gauges == {"streams_stale": 1.0}
        assert [each.stream for each in pipe.source.condition().stale[0].first] == [stream]
    both = here.pipeline([liar.url, leader.url], [stream, other])
    both.ends, both.log = pipe.ends, pipe.log
    both.start()
    here.hurry()
    both.drain(ALL)
    assert both.ids(stream) == true
    assert here.stale() == {}


def test_what_one_node_refuses_another_one_gives(here: Scene, leader: Node, client: Client, tmp_path: Path) -> None:
    """B10: at once, without a stale stream."""
    refuse = {"fault": "refuse", "op": "miniblocks"}
    with Node(tmp_path, *OPTIONS, "--follow", leader.url, faults=[refuse]) as follower:
        level(follower, leader)
        pipe, stream, _ = _gap(here, client, [follower.url, leader.url])
        level(follower, leader)
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)
        assert here.stale() == {}


def test_a_lie_about_the_stream_itself_is_asked_of_another(
    here: Scene, leader: Node, client: Client, tmp_path: Path
) -> None:
    """B12: the answer to `get stream` is verified like a page."""
    lies = [{"fault": "lie", "op": "stream", "number": number, "lie": "event"} for number in (2, 3)]
    with Node(tmp_path, *OPTIONS, "--follow", leader.url, faults=lies) as liar:
        stream = new_stream(client, 3)
        level(liar, leader)
        pipe = here.pipeline([liar.url, leader.url], [stream])
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)


def test_an_event_that_one_node_hides_is_had_from_another_and_waited_for(
    here: Scene, leader: Node, client: Client, tmp_path: Path
) -> None:
    """B10, B12: GIVEN a node that sends events of a page and of `get stream` unreadable WHEN the other one is away THEN
    the stream is stale for as long as that may last; WHEN it is there THEN they are logged as themselves."""
    lies = [
        {"fault": "lie", "op": op, "number": number, "lie": "unreadable"}
        for op, number in (("miniblocks", 9), ("miniblocks", 21), ("stream", 21))
    ]
    with Node(tmp_path, *OPTIONS, "--follow", leader.url, faults=lies) as liar:
        level(liar, leader)
        away = "http://127.0.0.1:9"
        pipe, stream, other = _gap(here, client, [liar.url, away])
        level(liar, leader)
        pipe.drain(ALL)
        assert pipe.ids(other) == client.hashes(other)
        assert here.stale()[stream].startswith("unreadable: ")
        assert {row["op"] for row in pipe.rows(stream)} == {"schema", "message"}
        assert pipe.ids(stream) == client.hashes(stream)[: len(pipe.ids(stream))]
        both = here.pipeline([liar.url, leader.url], [stream, other])
        both.ends, both.log = pipe.ends, pipe.log
        both.start()
        here.hurry()
        both.drain(ALL)
        assert both.ids(stream) == client.hashes(stream)
        assert here.stale() == {}


def test_how_long_an_event_is_unreadable_is_counted_from_when_it_was_found(here: Scene) -> None:
    """B10: GIVEN a mark in State WHEN it is made again THEN its time goes on, and its pauses grow; WHEN it becomes
    unreadable THEN both begin anew."""
    plans = here.source(["http://127.0.0.1:9"]).plans
    for reason, kept in (("away", True), ("away still", True), ("unreadable: a", False), ("unreadable: b", True)):
        plans.mark_stale(0, "a", 7, reason)
        lasted_s = plans.stale(0)["a"].lasted_s
        assert (lasted_s >= 3600) is (kept and reason != "away")
        here.rows("update block_stale set since = since - interval '1 h' returning 1")
    assert here.rows("select attempts from block_stale") == [(2,)]
    assert plans.stale(0)["a"].unreadable


def test_an_older_snapshot_takes_nothing_twice(here: Scene, tmp_path: Path) -> None:
    """B6: the node begins further back than we know, at every answer."""
    with Node(tmp_path, *OPTIONS, faults=[{"fault": "older", "op": "stream", "after": 1}]) as node:
        client = node.client()
        stream = new_stream(client, 8)
        pipe = here.pipeline([node.url])
        pipe.drain(ALL)
        for count in (1, 3, 9):
            client.say(stream, count)
            pipe.start()
            pipe.drain(ALL)
        assert len(set(pipe.ids(stream))) == len(pipe.ids(stream)) == 21
        client.close()


def test_a_slow_node_is_left_for_another(here: Scene, leader: Node, client: Client, tmp_path: Path) -> None:
    """B10: an answer that does not come in time is no answer."""
    late = {"fault": "late", "op": "miniblocks", "seconds": 20}
    with Node(tmp_path, *OPTIONS, "--follow", leader.url, faults=[late]) as slow:
        level(slow, leader)
        pace = replace(PACE, read_s=0.5)
        pipe, stream, _ = _gap(here, client, [slow.url, leader.url], pace=pace)
        level(slow, leader)
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)


def test_a_node_that_is_killed_between_plan_and_fetch_loses_nothing(here: Scene, tmp_path: Path) -> None:
    """B10, B11: the plan stands, the other node has the blocks; and the one that comes back has the rest."""
    first = Node(tmp_path / "first", *OPTIONS).start()
    try:
        with Node(tmp_path / "second", *OPTIONS, "--follow", first.url) as second:
            client = first.client()
            stream = new_stream(client, 15)
            level(second, first)
            pipe = here.pipeline([first.url, second.url])
            after = dict(pipe.ends)
            end = pipe.source.latest(after, ALL)[0]
            hidden = client.say(stream, 3)  # the follower may or may not have it in time
            first.kill()
            rows = [r for s in pipe.source.slices(0, after[0], end) for b in pipe.source.read(s) for r in b.to_pylist()]
            pipe.log[0], pipe.ends = rows, {0: end}
            pipe.source.confirm(0, end)
            pipe.start()
            pipe.drain(ALL)
            first.start()
            pipe.start()
            pipe.drain(ALL)
            client.close()
            client = first.client()
            assert pipe.ids(stream) == client.hashes(stream)
            assert pipe.ids(stream)[-3:] == hidden
            client.close()
    finally:
        first.kill()


def test_a_follower_that_takes_over_for_good_is_read_on(here: Scene, tmp_path: Path) -> None:
    """Its cookies, its listing and its identity are known: nothing is taken anew."""
    first = Node(tmp_path / "first", *OPTIONS).start()
    try:
        with Node(tmp_path / "second", *OPTIONS, "--follow", first.url) as second:
            client = first.client()
            stream = new_stream(client, 9)
            level(second, first)
            pipe = here.pipeline([first.url, second.url])
            pipe.drain(ALL)
            client.close()
    finally:
        first.kill()
    with Node(tmp_path / "second", *OPTIONS, port=second.port) as promoted:
        client = promoted.client()
        client.say(stream, 9)
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)
        assert pipe.dropped == 0
        client.close()


def test_with_no_node_left_it_says_so_and_goes_on_when_one_is_back(here: Scene, tmp_path: Path) -> None:
    """What passes is an error that is tried again, never a stop."""
    node = Node(tmp_path, *OPTIONS).start()
    try:
        client = node.client()
        stream = new_stream(client, 2)
        pipe = here.pipeline([node.url])
        pipe.drain(ALL)
        said = client.say(stream, 2)
        client.close()
        node.kill()
        with pytest.raises(UnreachableError):
            pipe.source.latest(pipe.ends, Limit(wait_s=0.1))
        with pytest.raises(UnreachableError):
            pipe.start()
        node.start()
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids(stream)[-2:] == said
    finally:
        node.kill()


def test_waiting_ends_with_the_first_event(here: Scene, leader: Node, client: Client) -> None:
    """An idle source costs one request at the node, and answers as soon as there is something."""
    stream = new_stream(client, 1)
    pipe = here.pipeline([leader.url], [stream])
    pipe.drain(ALL)
    assert pipe.source.latest(pipe.ends, Limit(wait_s=1.0)) == pipe.ends
    said: list[str] = []
    soon = threading.Timer(0.3, lambda: said.extend(client.say(stream, 1)))
    soon.start()
    assert pipe.step(Limit(wait_s=60.0))
    soon.join()
    assert pipe.ids(stream)[-1:] == said
