"""The sync feed and followers, with real node processes: what a reader gets, live, after a reconnect and an outage."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evermark.sources.blocks.chain import START, Cookie
from evermark.testing.until import until
from tests.contract.blocknode.blocknode_scene import Client, Node, Sync, message

OPTIONS = ("--seal-events", "4", "--seal-after", "200ms", "--snapshot-every", "3", "--page-blocks", "5")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    options = (*OPTIONS, "--resume-blocks", "8", "--keepalive", "200ms", "--stall", "1s")
    with Node(tmp_path_factory.mktemp("node"), *options) as running:
        yield running


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    client = node.client()
    yield client
    client.close()


def test_a_sync_sends_minipool_events_at_once_and_their_block_later(node: Node, client: Client) -> None:
    """GIVEN a sync WHEN events come THEN they are sent before they are sealed, and again within their block."""
    client.create("live")
    sync = Sync(node.port, {"live": None})
    sync.wait(lambda sync: sync.of("live"), "the stream is sent from its snapshot")
    assert [name for name, _ in sync.told[:2]] == ["open", "reset"]
    said = client.say("live", 2)
    sync.wait(lambda sync: sync.seen("live") == said, "the events come")
    sync.wait(lambda sync: sync.of("live")[-1].blocks, "their block comes")
    updates = sync.of("live")[1:]
    assert all(view.cookie.minipool_gen == 1 for view in updates[:-1])
    assert list(updates[-1].blocks[0].event_hashes) == said
    assert updates[-1].cookie.minipool_gen == 2
    sync.close()


def test_a_sync_resumes_from_cookies_without_loss(node: Node, client: Client) -> None:
    """GIVEN a reader that went away WHEN it comes back with its cookies THEN it gets what it missed and no reset."""
    streams = ["resumed-1", "resumed-2"]
    for stream in streams:
        client.create(stream)
        client.say(stream, 4)
    cookies: dict[str, Cookie | None] = {stream: client.view(stream).cookie for stream in streams}
    missed = {stream: client.say(stream, 9) for stream in streams}
    sync = Sync(node.port, cookies)
    for stream in streams:
        sync.wait(lambda sync, it=stream: sync.seen(it) == missed[it], "what was missed comes")
        assert not any(view.reset for view in sync.of(stream))
        more = client.say(stream, 1)
        sync.wait(lambda sync, it=stream, new=more: sync.seen(it) == missed[it] + new, "and what is new")
    sync.close()


def test_a_cookie_that_cannot_be_continued_is_answered_with_a_reset(node: Node, client: Client) -> None:
    """GIVEN cookies too old, of another chain, or of nothing WHEN they sync THEN each gets its latest snapshot."""
    cookies: dict[str, Cookie | None] = {}
    for stream in ("old", "forked", "begun"):
        client.create(stream)
        cookies[stream] = client.view(stream).cookie
        client.say(stream, 4 * 10)
    cookies |= {"forked": Cookie(11, "f" * 64), "begun": START}
    sync = Sync(node.port, cookies)
    for stream in cookies:
        view = sync.wait(lambda sync, it=stream: sync.of(it), "it is answered")[0]
        assert view.reset
        assert (view.blocks[0].number, view.cookie.minipool_gen) == (9, 11)
        assert view.blocks[0].snapshot is not None
    sync.close()


def test_streams_join_and_leave_a_running_sync(node: Node, client: Client) -> None:
    """GIVEN a running sync WHEN streams are added and removed THEN it sends what it is asked for, and nothing else."""
    for stream in ("first", "second"):
        client.create(stream)
    sync = Sync(node.port, {"first": None})
    cookie = client.view("second").cookie
    change = {"add": {"second": cookie.wire()}, "remove": ["first"]}
    assert client.good("POST", f"/v1/sync/{sync.id}", change) == {"streams": 1}
    client.say("first", 1)
    said = client.say("second", 1)
    sync.wait(lambda sync: sync.seen("second") == said, "the added stream is sent")
    assert sync.seen("first") == []
    assert client.refused("POST", "/v1/sync/unheard-of", change) == "sync_not_found"
    sync.close()


def test_a_sync_that_ended_takes_no_streams_that_were_on_their_way(node: Node, client: Client) -> None:
    """GIVEN a change whose body is on its way WHEN the sync ends meanwhile THEN it is told, and nothing is kept."""
    sync = Sync(node.port, {})
    body = json.dumps({"add": {"late": None}}).encode()
    head = f"POST /v1/sync/{sync.id} HTTP/1.1\r\nHost: node\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", node.port), timeout=20) as change:
        change.sendall(head.encode() + body[:5])
        sync.close()
        until(lambda: client.call("POST", f"/v1/sync/{sync.id}", {})[0] == 404, "the sync has ended")
        change.sendall(body[5:])
        assert change.recv(12) == b"HTTP/1.1 404"


def test_a_sync_tells_of_streams_that_are_gone_and_of_recreated_ones(node: Node, client: Client) -> None:
    """GIVEN a sync WHEN a stream is deleted THEN it says so; one that was recreated meanwhile is a reset."""
    client.create("mortal")
    cookie = client.view("mortal").cookie
    sync = Sync(node.port, {"mortal": cookie, "never": None})
    sync.wait(lambda sync: "gone" in [name for name, _ in sync.told], "the unknown stream is told")
    client.good("DELETE", "/v1/streams/mortal")
    sync.wait(lambda sync: [name for name, _ in sync.told].count("gone") == 2, "the deleted stream is told")
    assert {data["code"] for name, data in sync.told if name == "gone"} == {"stream_not_found"}
    client.create("mortal")
    again = Sync(node.port, {"mortal": cookie})
    again.wait(lambda sync: sync.of("mortal"), "the recreated stream is sent")
    assert again.of("mortal")[0].reset
    sync.close()
    again.close()


def test_a_quiet_sync_is_kept_alive_and_told_when_the_node_stops(tmp_path: Path) -> None:
    """GIVEN a sync with nothing to say WHEN time passes THEN it says that much; SIGTERM ends it in order."""
    with Node(tmp_path / "node", "--keepalive", "50ms") as node:
        node.client().create("quiet")
        sync = Sync(node.port, {"quiet": None})
        sync.wait(lambda sync: sync.keepalives >= 2, "it says that it is still there")
        assert node.stop()[0] == 0
        assert sync.ended.wait(5)
        assert sync.told[-1] == ("end", {"code": "stopping"})


def test_a_client_that_does_not_read_is_cut_off_at_bounded_memory(node: Node, client: Client) -> None:
    """GIVEN a reader that stopped reading WHEN much is written THEN it is cut off, and the others notice nothing."""
    client.create("flood")
    deaf = Sync(node.port, {"flood": None}, reads=False)
    other = Sync(node.port, {"flood": None})
    process = psutil.Process(node.pid)
    before = process.memory_info().rss
    text = "x" * 30_000
    said: list[str] = []

    def cut_off() -> bool:
        events = [message("flood", text) for _ in range(20)]
        said.extend(added["hash"] for added in client.add("flood", *events))
        other.wait(lambda sync: said[-1] in sync.told_hashes, "the other one keeps up")
        return bool(client.good("GET", "/v1/node")["counts"]["cut_off"])

    until(cut_off, "the deaf one is cut off")
    assert process.memory_info().rss - before < 120 * 1024 * 1024
    assert other.seen("flood") == said
    deaf.read()
    assert deaf.ended.wait(5), "what was on its way is all there is"
    assert "end" not in {kind for kind, _ in deaf.told}, "nobody said goodbye"
    assert said[-1] not in deaf.told_hashes, "it was cut off before the end"
    other.close()


def test_a_listing_waits_for_the_next_change_and_misses_none(client: Client, node: Node) -> None:
    """GIVEN a listing up to now WHEN a stream changes THEN whoever waits is answered with it, in order of change."""
    for stream in ("listed-1", "listed-2"):
        client.create(stream)
    listed = client.good("GET", "/v1/streams")
    names = [row["stream"] for row in listed["streams"]]
    assert names.index("listed-1") < names.index("listed-2")
    found: list[dict[str, object]] = []

    def wait() -> None:
        waiting, after = node.client(), listed["touched"]
        while not any(row["stream"] == "listed-1" for row in found):
            answer = waiting.good("GET", "/v1/streams", touched_after=after, wait_s=10)
            assert answer["touched"] >= after
            found.extend(answer["streams"])
            after = answer["touched"]

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    client.say("listed-1", 1)
    thread.join(5)
    assert "listed-1" in [row["stream"] for row in found]
    pages = client.good("GET", "/v1/streams", limit=1)
    assert len(pages["streams"]) == 1
    client.create("listed-3", kind="inbox", members=["bot"])
    assert [row["stream"] for row in client.good("GET", "/v1/streams", kind="inbox")["streams"]] == ["listed-3"]
    assert client.refused("GET", "/v1/streams", kind="room") == "bad_request"


def level(follower: Client, leader: Client, *streams: str) -> None:
    """Wait until the follower has what the leader has."""

    def same(stream: str) -> bool:
        status, answer = follower.call("GET", f"/v1/streams/{stream}")
        mine, theirs = leader.call("GET", f"/v1/streams/{stream}"), (status, answer)
        return mine == theirs

    for stream in streams:
        until(lambda it=stream: same(it), f"the follower has {stream}")  # type: ignore[misc]


def test_a_follower_serves_readers_through_an_outage_and_catches_up(tmp_path: Path) -> None:
    """GIVEN a follower WHEN the node is killed THEN readers go on there with their cookies; then it catches up."""
    leading = Node(tmp_path / "one", *OPTIONS)
    with leading, Node(tmp_path / "two", "--page-blocks", "4", "--follow", leading.url) as following:
        leader, follower = leading.client(), following.client()
        leader.create("shared", members=["alice"])
        said = leader.say("shared", 41)
        cookie = leader.view("shared").cookie
        said += leader.say("shared", 2)
        level(follower, leader, "shared")
        assert follower.refused("POST", "/v1/streams/shared/events", {"events": [message("shared")]}) == "read_only"
        assert follower.refused("GET", "/v1/streams/unknown") == "behind"
        assert follower.refused("GET", "/v1/streams/shared/miniblocks", **{"from": 99, "to": 100}) == "behind"
        leading.kill()
        assert follower.hashes("shared") == said
        sync = Sync(following.port, {"shared": cookie})
        sync.wait(lambda sync: sync.seen("shared") == said[-2:] or sync.seen("shared") == said[-3:], "it is continued")
        leading.start()
        leader = leading.client()
        more = leader.say("shared", 5)
        sync.wait(lambda sync: sync.seen("shared")[-5:] == more, "the sync at the follower goes on")
        level(follower, leader, "shared")
        assert follower.hashes("shared") == said + more
        sync.close()


def test_the_folder_of_a_follower_can_be_served_as_a_node_of_its_own(tmp_path: Path) -> None:
    """GIVEN a copy, minipool included WHEN it is served without following THEN it seals, dedups and goes on."""
    with Node(tmp_path / "one", "--seal-events", "4", "--seal-after", "1h") as leading:
        leader = leading.client()
        leader.create("heir", members=["alice"])
        events = [message("heir") for _ in range(6)]
        leader.add("heir", *events)
        with Node(tmp_path / "two", "--follow", leading.url) as following:
            level(following.client(), leader, "heir")
    with Node(tmp_path / "two", "--seal-events", "3", "--snapshot-every", "1", "--seal-after", "1h") as heir:
        client = heir.client()
        assert [added["duplicate"] for added in client.add("heir", *events)] == [True] * 6
        more = client.say("heir", 1)
        blocks, pool = client.history("heir")
        assert client.hashes("heir") == [event["hash"] for event in events] + more
        assert not pool
        assert blocks[-1].snapshot is not None
        assert blocks[-1].snapshot.members == ("alice",)
        assert not client.create("heir", members=["alice"])["created"]


def test_a_follower_copies_recreated_and_deleted_streams_anew(tmp_path: Path) -> None:
    """GIVEN a copy WHEN its stream is recreated or deleted meanwhile THEN the copy becomes the new one, or gone."""
    leading = Node(tmp_path / "one", *OPTIONS)
    with leading, Node(tmp_path / "two", "--follow", leading.url) as following:
        leader, follower = leading.client(), following.client()
        for stream in ("again", "away"):
            leader.create(stream)
            leader.say(stream, 9)
        level(follower, leader, "again", "away")
        following.kill()
        leader.good("DELETE", "/v1/streams/again")
        leader.create("again")
        leader.say("again", 13)
        leader.good("DELETE", "/v1/streams/away")
        following.start()
        follower = following.client()
        level(follower, leader, "again", "away")
        assert follower.hashes("again") == leader.hashes("again")
        assert follower.refused("GET", "/v1/streams/away") == "stream_not_found"


def test_a_follower_keeps_nothing_that_does_not_verify_and_copies_the_rest(tmp_path: Path) -> None:
    """GIVEN a node that lies about a block once WHEN it is followed THEN the lie is owed, the rest copied, then all."""
    lie = {"fault": "lie", "op": "stream", "number": 2, "lie": "event", "times": 2}
    leading = Node(tmp_path / "one", "--seal-events", "2", faults=[lie])
    with leading:
        leader = leading.client()
        leader.create("lied-about")
        leader.create("fine")
        leader.say("lied-about", 4)
        leader.say("fine", 1)
        with Node(tmp_path / "two", "--follow", leading.url) as following:
            follower = following.client()
            until(lambda: follower.call("GET", "/v1/streams/fine")[0] == 200, "the sound stream is copied")
            level(follower, leader, "fine", "lied-about")
            assert follower.hashes("lied-about") == leader.hashes("lied-about")
            _, stderr = following.stop()
    said = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    assert [line["stream"] for line in said if line["event"] == "a stream cannot be copied"] == ["lied-about"]


def test_a_follower_says_with_its_listing_how_many_streams_it_owes(tmp_path: Path) -> None:
    """GIVEN a stream that is lied about WHEN a follower lists THEN it says that it owes one; others owe none."""
    lie = {"fault": "lie", "op": "stream", "number": 2, "lie": "event"}
    with Node(tmp_path / "one", "--seal-events", "2", faults=[lie]) as leading:
        leader = leading.client()
        leader.create("lied-about")
        leader.say("lied-about", 4)
        leader.create("fine")
        with Node(tmp_path / "two", "--follow", leading.url) as following:
            follower = following.client()
            listed = until(lambda: follower.good("GET", "/v1/streams", touched_after=0).get("streams"), "one is copied")
            assert [row["stream"] for row in listed] == ["fine"]
            assert follower.good("GET", "/v1/streams")["owed"] == 1
            assert follower.good("GET", "/v1/streams", touched_after=listed[-1]["touched"])["owed"] == 1
            until(lambda: follower.good("GET", "/v1/node")["followed"]["owed"] == 1, "it says so of itself, too")
        assert "owed" not in leader.good("GET", "/v1/streams")
    with Node(tmp_path / "two") as heir:
        assert "owed" not in heir.client().good("GET", "/v1/streams"), "it follows no other any more"
