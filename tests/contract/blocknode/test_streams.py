"""A node's streams, asked of a real process: create, add, seal, snapshot, page, delete, and what survives a kill."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evermark.errors import FormatError, GapError, IdentityError
from evermark.sources.blocks.chain import START, Cookie, EventKind, block_from, verify_chain
from evermark.testing.until import until
from tests.contract.blocknode.blocknode_scene import Client, Node, control, message

TOKEN = "a-token-of-thirty-two-characters"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Seals at four events and never by time, a snapshot every third block, pages of five."""
    options = ("--seal-events", "4", "--seal-after", "1h", "--snapshot-every", "3", "--page-blocks", "5")
    with Node(tmp_path_factory.mktemp("node"), *options, "--event-bytes", "2048") as running:
        yield running


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    client = node.client()
    yield client
    client.close()


def test_events_wait_in_the_minipool_and_are_sealed_by_count_in_order(client: Client) -> None:
    """GIVEN a stream WHEN more events come than a block holds THEN blocks hold them all, chained, in order."""
    made = client.create("by-count")
    assert made["cookie"]["minipool_gen"] == 1
    said = client.say("by-count", 3)
    assert [event.hash for event in client.view("by-count").minipool] == said
    said += client.say("by-count", 6)
    blocks, pool = client.history("by-count")
    assert [block.event_hashes for block in blocks] == [(), tuple(said[:4]), tuple(said[4:8])]
    assert [event.hash for event in pool] == said[8:]


def test_a_minipool_is_sealed_by_time_also_after_a_restart(tmp_path: Path) -> None:
    """GIVEN one event and no further one WHEN its time has come THEN a block holds it, and no empty one follows."""
    with Node(tmp_path / "node", "--seal-after", "1h") as node:
        node.client().create("by-time")
        said = node.client().say("by-time", 1)
    with Node(tmp_path / "node", "--seal-after", "100ms") as node:
        client = node.client()
        until(lambda: client.view("by-time").cookie.minipool_gen == 2, "the minipool is sealed")
        said += client.say("by-time", 1)
        until(lambda: client.view("by-time").cookie.minipool_gen == 3, "the next one is sealed")
        blocks, pool = client.history("by-time")
    assert [list(block.event_hashes) for block in blocks] == [[], said[:1], said[1:]]
    assert pool == []


def test_snapshots_sum_up_members_and_settings_with_their_own_block(client: Client) -> None:
    """GIVEN joins, leaves and settings WHEN a snapshot is due THEN it holds them, its own block's included."""
    stream = "summed"
    client.create(stream, members=["alice", "bot"], settings={"title": "old", "gone": "soon"})
    client.say(stream, 8)
    client.add(
        stream,
        control(stream, EventKind.JOIN, member="bob"),
        control(stream, EventKind.LEAVE, member="bot"),
        control(stream, EventKind.SETTINGS, settings={"title": "new", "gone": None}),
        message(stream, tags={"mentions": ["bob"], "command": {"app": "bot", "name": "help"}, "session": "s1"}),
    )
    view = client.view(stream)
    first = view.blocks[0]
    assert (first.number, first.event_hashes[-1]) == (3, first.events[-1].hash)
    assert first.snapshot is not None
    assert first.snapshot.members == ("alice", "bob")
    assert first.snapshot.settings == {"title": "new"}
    assert first.events[-1].tags["command"] == {"app": "bot", "name": "help"}
    assert [block.number for block in client.history(stream)[0] if block.snapshot] == [0, 3]


def test_adding_an_event_again_adds_nothing_before_and_after_it_was_sealed(client: Client) -> None:
    """GIVEN an accepted event WHEN it is sent again, at any time THEN it is a duplicate and stands there once."""
    client.create("twice")
    event = message("twice")
    assert [added["duplicate"] for added in client.add("twice", event, event)] == [False, True]
    assert client.add("twice", event)[0]["duplicate"]
    client.say("twice", 3)
    answer = client.add("twice", event)[0]
    assert answer == {"hash": event["hash"], "minipool_gen": None, "duplicate": True}
    assert client.hashes("twice").count(event["hash"]) == 1


def test_a_hash_may_be_left_out_and_is_the_documented_one(client: Client) -> None:
    """GIVEN an event without a hash WHEN it is added THEN the node gives it the hash everybody would."""
    client.create("bare")
    event = message("bare")
    bare = {name: value for name, value in event.items() if name != "hash"}
    assert client.add("bare", bare)[0]["hash"] == event["hash"]


def test_creating_again_is_the_same_stream_or_a_conflict(client: Client) -> None:
    """GIVEN a stream WHEN it is created again THEN equal changes nothing, and anything else is refused."""
    first = client.create("again", members=["b", "a"], settings={"x": "1"})
    equal = client.create("again", members=["a", "b"], settings={"x": "1"})
    assert (first["created"], equal["created"]) == (True, False)
    assert equal["cookie"] == first["cookie"]
    asked = {"kind": "channel", "creator": "alice", "members": ["a"]}
    assert client.refused("PUT", "/v1/streams/again", asked) == "stream_exists"


BAD_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("hash_mismatch", {"hash": "0" * 64}),
    ("bad_request", {"hash": "xyz"}),
    ("bad_request", {"kind": "shout"}),
    ("bad_request", {"creator": ""}),
    ("bad_request", {"at_us": -1}),
    ("bad_request", {"at_us": 2**53}),
    ("bad_request", {"member": "bob"}),
    ("bad_request", {"tags": {"unheard": "of"}}),
    ("bad_request", {"nonce": "x" * 129}),
    ("bad_request", {"surprise": 1}),
    ("too_large", {"payload": "x" * 2048, "hash": None}),
]


@pytest.mark.parametrize(("code", "wrong"), BAD_EVENTS, ids=lambda value: str(value)[:40])
def test_a_bad_event_is_refused_and_none_beside_it_is_taken(client: Client, code: str, wrong: dict[str, Any]) -> None:
    """GIVEN a good and a bad event in one request WHEN they are added THEN there is an error, and neither is there."""
    client.create("refusing")
    bad = {name: value for name, value in (message("refusing") | wrong).items() if value is not None}
    body = {"events": [message("refusing"), bad]}
    assert client.refused("POST", "/v1/streams/refusing/events", body) == code
    assert client.view("refusing").hashes == []


def test_what_is_no_request_has_a_code_too(client: Client) -> None:
    """GIVEN ids, bodies and paths that are none WHEN they are asked THEN each answer says what is wrong."""
    assert client.refused("PUT", "/v1/streams/" + "x" * 129, {"kind": "channel", "creator": "a"}) == "bad_request"
    assert client.refused("PUT", "/v1/streams/..%2Fx", {"kind": "channel", "creator": "a"}) == "bad_request"
    assert client.refused("PUT", "/v1/streams/x", b"{not json") == "bad_request"
    assert client.refused("PUT", "/v1/streams/x", {"kind": "room", "creator": "a"}) == "bad_request"
    assert client.refused("PUT", "/v1/streams/x", {"kind": "direct", "creator": "a", "members": ["a"]}) == "bad_request"
    assert client.refused("GET", "/v1/streams/nowhere") == "stream_not_found"
    assert client.refused("POST", "/v1/streams/nowhere/events", {"events": [message("nowhere")]}) == "stream_not_found"
    assert client.refused("GET", "/v1/nothing") == "not_found"
    assert client.refused("GET", "/v1/streams", limit="many") == "bad_request"
    assert client.refused("GET", "/v1/streams/x/miniblocks") == "bad_request"
    assert client.refused("PUT", "/v1/streams/x", b" " * (17 * 1024 * 1024)) == "too_large"
    client.close()  # it answered before it had read everything


def test_members_of_direct_streams_and_inboxes_are_fixed(client: Client) -> None:
    """GIVEN a direct stream and an inbox WHEN somebody would join THEN it is refused; messages are not."""
    client.create("dm", kind="direct", members=["alice", "bob"])
    client.create("inbox", kind="inbox", members=["bot"])
    for stream in ("dm", "inbox"):
        body = {"events": [control(stream, EventKind.JOIN, member="eve")]}
        assert client.refused("POST", f"/v1/streams/{stream}/events", body) == "members_fixed"
        assert len(client.say(stream, 1)) == 1


def test_a_page_says_how_far_it_got_and_odd_ranges_have_codes_of_their_own(client: Client) -> None:
    """GIVEN more blocks than a page WHEN they are asked for THEN pages follow each other; odd ranges are errors."""
    client.create("paged")
    client.say("paged", 4 * 11)
    page = client.good("GET", "/v1/streams/paged/miniblocks", **{"from": 2, "to": 12})
    assert (page["from"], page["next"], len(page["blocks"])) == (2, 7, 5)
    assert len(client.history("paged")[0]) == 12
    for start, end, code in [
        (3, 3, "range_empty"),
        (5, 4, "range_empty"),
        (11, 13, "range_impossible"),
        (12, 13, "range_impossible"),
        (10**15, 10**17, "range_impossible"),
    ]:
        assert client.refused("GET", "/v1/streams/paged/miniblocks", **{"from": start, "to": end}) == code


def test_a_cookie_is_continued_or_answered_with_a_reset(client: Client) -> None:
    """GIVEN a cookie WHEN the stream is asked for with it THEN what follows comes; a cookie of no block is a reset."""
    client.create("continued")
    client.say("continued", 4)
    cookie = client.view("continued").cookie
    assert client.view("continued", cookie).hashes == []
    said = client.say("continued", 5)
    view = client.view("continued", cookie)
    assert not view.reset
    assert view.hashes == said
    for wrong in (Cookie(cookie.minipool_gen, "f" * 64), Cookie(2**50, cookie.prev_miniblock_hash), START):
        assert client.view("continued", wrong).reset


def test_a_recreated_stream_is_another_chain(client: Client) -> None:
    """GIVEN a reader's cookie WHEN the stream is deleted and created alike THEN the cookie is of another chain."""
    client.create("phoenix")
    client.say("phoenix", 8)
    old = client.view("phoenix").cookie
    client.good("DELETE", "/v1/streams/phoenix")
    assert client.refused("GET", "/v1/streams/phoenix") == "stream_not_found"
    client.create("phoenix")
    view = client.view("phoenix", old)
    assert view.reset
    asked = {"from": old.minipool_gen, "to": old.minipool_gen + 1}
    assert client.refused("GET", "/v1/streams/phoenix/miniblocks", **asked) == "range_impossible"
    client.say("phoenix", 12)
    blocks, _ = client.history("phoenix")
    with pytest.raises(IdentityError):
        verify_chain(blocks[old.minipool_gen :], old)


def test_nothing_that_was_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    """GIVEN many writers WHEN the node is killed in between THEN all that was acknowledged is there, once, in order."""
    node = Node(tmp_path / "node", "--seal-events", "5", "--seal-after", "50ms")
    acknowledged: dict[str, list[str]] = {f"s{number}": [] for number in range(8)}

    def write(stream: str) -> None:
        client = Client(node.port)
        while True:
            event = message(stream)
            try:
                client.add(stream, event)
            except OSError:
                return
            acknowledged[stream].append(event["hash"])

    for _ in range(2):
        with node:
            client = node.client()
            for stream in acknowledged:
                client.create(stream)
            before = sum(map(len, acknowledged.values()))
            threads = [threading.Thread(target=write, args=(stream,)) for stream in acknowledged]
            for thread in threads:
                thread.start()
            until(lambda: sum(map(len, acknowledged.values())) > before + 150, "150 events are acknowledged")  # noqa: B023
            node.kill()
            for thread in threads:
                thread.join()
    with node:
        client = node.client()
        for stream, hashes in acknowledged.items():
            found = client.hashes(stream)
            assert [one for one in found if one in set(hashes)] == hashes
            assert len(set(found)) == len(found)


def test_a_half_written_tail_is_cut_off_and_reported(tmp_path: Path) -> None:
    """GIVEN a node killed in mid-write WHEN it starts THEN the torn frame is gone and said; the rest is there."""
    node = Node(tmp_path / "node")
    with node:
        client = node.client()
        client.create("torn")
        said = client.say("torn", 3)
    wal = tmp_path / "node" / "blocknode.db-wal"
    kept = wal.read_bytes()
    frame_bytes = 24 + int.from_bytes(kept[8:12], "big")
    end = 32
    while kept[end + 8 : end + 16] == kept[16:24]:  # the salt of this generation of the log
        end += frame_bytes
    wal.write_bytes(kept[:end] + kept[32:3000])  # one more frame of it, torn
    with node:
        assert node.about["cut_bytes"] == 3000 - 32
        assert node.client().hashes("torn") == said
        code, stderr = node.stop()
    assert code == 0
    assert "half-written tail" in stderr
    with node:
        assert node.about["cut_bytes"] == 0


def test_two_nodes_do_not_share_a_folder(node: Node) -> None:
    """GIVEN a running node WHEN another is started on its folder THEN it ends with what to do about it."""
    command = [sys.executable, "-m", "evermark.cli.main", "blocknode", "serve", "--port", "0", "--data", str(node.data)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert ran.returncode == 1
    assert "another node uses" in ran.stderr
    assert "hint:" in ran.stderr


def test_a_token_is_asked_for_and_the_node_stops_in_order(tmp_path: Path) -> None:
    """GIVEN a node with a token WHEN it is not shown THEN nobody learns a thing; SIGTERM ends it with 0."""
    with Node(tmp_path / "node", "--token", TOKEN) as node:
        assert node.client().refused("GET", "/v1/streams/x") == "unauthorized"
        assert node.client("another").refused("GET", "/v1/node") == "unauthorized"
        assert node.client().call("GET", "/readyz")[0] == 200
        assert node.client().call("GET", "/livez")[0] == 200
        assert node.client(TOKEN).create("x")["created"]
        code, stderr = node.stop()
    assert code == 0
    assert TOKEN not in stderr
    assert not (tmp_path / "node" / "blocknode.db-wal").exists()


def test_faults_are_done_as_told_and_found_by_verification(tmp_path: Path) -> None:
    """GIVEN a node told to lie, skip, refuse and go back WHEN it is asked THEN each is seen by whoever verifies."""
    faults = [
        {"fault": "refuse", "op": "add", "times": 2},
        {"fault": "lie", "op": "miniblocks", "number": 2, "lie": "hash", "times": 1},
        {"fault": "lie", "op": "miniblocks", "number": 2, "lie": "event", "after": 1, "times": 1},
        {"fault": "lie", "op": "miniblocks", "number": 2, "lie": "previous", "after": 2, "times": 1},
        {"fault": "skip", "op": "miniblocks", "number": 2, "after": 3, "times": 1},
        {"fault": "older", "op": "stream", "times": 1},
    ]
    with Node(tmp_path / "node", "--seal-events", "1", "--snapshot-every", "2", faults=faults) as node:
        client = node.client()
        client.create("bad")
        body = {"events": [message("bad")]}
        assert [client.call("POST", "/v1/streams/bad/events", body)[0] for _ in range(3)] == [503, 503, 200]
        client.say("bad", 4)
        assert [client.view("bad").blocks[0].number for _ in range(2)] == [2, 4]
        for error in (FormatError, FormatError, IdentityError, GapError):
            page = client.good("GET", "/v1/streams/bad/miniblocks", **{"from": 0, "to": 5})
            with pytest.raises(error) as caught:
                verify_chain([block_from(block, "bad") for block in page["blocks"]], START)
            assert caught.type is error
        assert len(client.history("bad")[0]) == 6
