"""Block streams taken from real nodes: every restart, snapshot and reset, with the state that is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evermark.errors import ConfigError, DeniedError, IdentityError
from evermark.secrets import KeyRef, Plain, Sealed, SecretBox
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import EventKind, StreamKind
from evermark.sources.blocks.nodes import client as blocks_client
from evermark.sources.blocks.stream_choice import BotsInState, BotStreams, ChosenStreams
from evermark.sources.kinds import BotReaders
from evermark.state.connection import State
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from simulator.blocks.pipeline import Crash, Cut
from tests.contract.blocknode.blocknode_scene import Client, Node, control, message
from tests.contract.blocks.blocks_scene import ALL, EACH, NEVER, PACE, Scene, new_stream, scene

TOKEN = "a token of some length, for tests"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Every event is a block, every fifth block a snapshot, pages of three blocks; a cookie is good for two blocks."""
    options = (*EACH, "--snapshot-every", "5", "--page-blocks", "3", "--resume-blocks", "2")
    with Node(tmp_path_factory.mktemp("each"), *options) as made:
        yield made


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A block holds four events, and nothing is sealed by time."""
    options = ("--seal-after", "3600s", "--seal-events", "4", "--snapshot-every", "2")
    with Node(tmp_path_factory.mktemp("pooling"), *options) as made:
        yield made


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    made = node.client()
    yield made
    made.close()


@pytest.fixture
def pool(pooling: Node) -> Iterator[Client]:
    made = pooling.client()
    yield made
    made.close()


@pytest.fixture
def here(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


def test_sync_state_has_the_columns_that_are_asked_for(here: Scene) -> None:
    """B1: these, and no others."""
    asked = """select column_name, data_type, is_nullable, column_default from information_schema.columns
        where table_schema = %s and table_name = 'stream_sync_state' order by ordinal_position"""
    assert here.rows(asked, here.state.schema) == [
        ("stream_id", "bytea", "NO", None),
        ("snapshot_miniblock", "bigint", "NO", None),
        ("minipool_gen", "bigint", "NO", None),
        ("prev_miniblock_hash", "bytea", "YES", None),
        ("updated_at", "timestamp with time zone", "NO", "now()"),
    ]


def test_sync_state_follows_blocks_and_not_the_minipool(here: Scene, pooling: Node, pool: Client) -> None:
    """B2: written with a new block, with the snapshot if it has one; an event alone writes nothing."""
    stream = new_stream(pool, 1)
    pipe = here.pipeline([pooling.url], [stream])
    pipe.drain(ALL)
    first = here.synced(stream)
    assert first is not None
    assert first[:2] == (0, 1)
    pool.say(stream, 1)
    pipe.drain(ALL)
    assert here.synced(stream) == first
    pool.say(stream, 2)
    pipe.drain(ALL)
    second = here.synced(stream)
    assert second is not None
    assert second[:2] == (0, 2)
    assert bytes(second[2]).hex() == pool.view(stream).cookie.prev_miniblock_hash
    pool.say(stream, 4)
    pipe.drain(ALL)
    third = here.synced(stream)
    assert third is not None
    assert third[:2] == (2, 3)
    assert pipe.ids(stream) == pool.hashes(stream)


def test_restart_with_the_same_snapshot_fetches_no_block(here: Scene, tmp_path: Path) -> None:
    """B3, B4: the stream is asked from its snapshot; what was taken is skipped; not one block is asked for."""
    refuse = {"fault": "refuse", "op": "miniblocks"}
    with Node(tmp_path, *EACH, "--snapshot-every", "50", faults=[refuse]) as node:
        client = node.client()
        stream = new_stream(client, 10)
        pipe = here.pipeline([node.url])
        pipe.drain(ALL)
        client.say(stream, 5)
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.view(stream).hashes
        assert here.stale() == {}
        client.close()


def test_restart_after_several_snapshots_fetches_the_gap(here: Scene, node: Node, client: Client) -> None:
    """B5, B9: [gen, snapshot) in pages of the node's size, then what follows; in order, nothing twice."""
    stream = new_stream(client, 7)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    client.say(stream, 23)
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids(stream) == client.hashes(stream)
    state = here.synced(stream)
    assert state is not None
    assert state[:2] == (30, 31)


def test_restart_exactly_at_the_snapshot_is_no_gap(here: Scene, node: Node, client: Client) -> None:
    """B5: the generation equals the snapshot's number: there is nothing between them to fetch."""
    stream = new_stream(client, 9)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    client.say(stream, 1)
    assert client.view(stream).blocks[0].number == 10
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids(stream) == client.hashes(stream)


def test_a_node_restored_from_a_backup_gives_what_is_new_and_nothing_twice(here: Scene, tmp_path: Path) -> None:
    """B6: it has less than was taken; what it has is compared with the log, what it gets then is taken."""
    data, backup = tmp_path / "node", tmp_path / "backup"
    options = (*EACH, "--snapshot-every", "4")
    with Node(data, *options) as node:
        client = node.client()
        stream = new_stream(client, 6)
        client.close()
    shutil.copytree(data, backup)
    with Node(data, *options) as node:
        client = node.client()
        again, late = message(stream), message(stream)
        client.add(stream, again)
        client.add(stream, late)
        client.say(stream, 6)
        lost = client.hashes(stream)
        pipe = here.pipeline([node.url])
        pipe.drain(ALL)
        client.close()
    assert pipe.ids(stream) == lost
    with Node(backup, *options, port=node.port) as node:
        client = node.client()
        client.add(stream, again)  # its maker was told that it is kept, and sends it once more
        fresh = client.say(stream, 2)
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids(stream) == lost + fresh
        assert pipe.dropped > 0
        fresh += client.say(stream, 12)
        pipe.drain(ALL)
        assert pipe.ids(stream) == lost + fresh
        pipe.start()
        client.add(stream, late)  # when the stream has passed the block that the event was in
        pipe.drain(ALL)
        assert pipe.ids(stream) == lost + fresh
        fresh += client.say(stream, 3)
        pipe.drain(ALL)
        assert pipe.ids(stream) == lost + fresh
        client.close()


def test_every_reset_is_checked_and_not_only_the_first(here: Scene, node: Node, client: Client) -> None:
    """B7: the same process is too far behind for its cookie, again and again; each time the gap is fetched."""
    stream = new_stream(client, 2)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    for count in (8, 11, 13):
        client.say(stream, count)
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)


def test_a_recreated_stream_is_taken_anew_and_an_event_says_so(here: Scene, node: Node, client: Client) -> None:
    """B8: its state resets; what was taken of the old one stays; deleting it is said, too."""
    stream = new_stream(client, 7)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    old = pipe.ids(stream)
    client.good("DELETE", f"/v1/streams/{stream}")
    client.create(stream)
    client.say(stream, 3)
    pipe.drain(ALL)
    assert pipe.ids(stream) == old + client.hashes(stream)
    assert '"change": "recreated"' in pipe.notes(stream)[0]
    state = here.synced(stream)
    assert state is not None
    assert state[:2] == (0, 4)
    client.good("DELETE", f"/v1/streams/{stream}")
    pipe.drain(ALL)
    assert '"change": "deleted"' in pipe.notes(stream)[1]
    assert here.synced(stream) is None


def test_a_large_gap_is_cut_into_slices_that_are_read_apart(here: Scene, tmp_path: Path) -> None:
    """B9: what a stream got while nobody read it: many pages, several slices. Read in any order, each gives rows within
    its own bounds, in order; together they are the whole gap, and nothing that was taken before."""
    with Node(tmp_path, *EACH, "--snapshot-every", "300", "--page-blocks", "40", "--resume-blocks", "2") as node:
        client = node.client()
        stream = new_stream(client, 7)
        pipe = here.pipeline([node.url])
        pipe.drain(ALL)
        taken = pipe.ids(stream)
        for _ in range(2):
            client.say(stream, 450)
        source = here.source([node.url], pace=replace(PACE, slice_s=0.01))
        start = pipe.ends[0]
        end = source.latest({0: start}, ALL)[0]
        pieces = source.slices(0, start, end)
        assert len(pieces) >= 4
        found: dict[str, list[dict[str, Any]]] = {}
        for piece in reversed(pieces):
            rows = [row for batch in source.read(piece) for row in batch.to_pylist()]
            positions = [row["position"] for row in rows]
            assert positions == sorted(set(positions))
            assert all(piece.start <= position < piece.end for position in positions)
            found[piece.start] = rows
        assert sum(bool(rows) for rows in found.values()) >= 4
        in_order = [row["event_id"] for piece in pieces for row in found[piece.start]]
        assert len(taken) == 7
        assert taken + in_order == client.hashes(stream)
        client.close()


@pytest.mark.parametrize("cut", ["planned", "read", "logged", "confirmed", "unconfirmed"])
def test_a_crash_between_minipool_and_block_takes_no_event_twice(
    here: Scene, pooling: Node, pool: Client, cut: Cut
) -> None:
    """B11: an event of the minipool comes again in its block, whether anything crashed or not."""
    stream = new_stream(pool, 2)
    pipe = here.pipeline([pooling.url], [stream])
    for count in (1, 5, 3):
        try:
            pipe.step(ALL, cut)
        except Crash:
            pipe.start()
        pool.say(stream, count)
    pipe.drain(ALL)
    assert pipe.ids(stream) == pool.hashes(stream)


def test_only_wanted_streams_keep_state_and_unwanted_ones_are_forgotten(
    here: Scene, node: Node, client: Client
) -> None:
    """B13, B2: the rest is cleaned by its age; wanted again, nothing of it is logged twice."""
    one, two = new_stream(client, 3), new_stream(client, 3)
    both = here.pipeline([node.url], [one, two])
    both.drain(ALL)
    client.say(one, 1)
    less = here.pipeline([node.url], [one], keep_unwanted_s=3600.0)
    less.ends, less.log = both.ends, both.log
    less.start()
    less.drain(ALL)
    less.source.upkeep()
    assert here.synced(two) is not None
    here.rows("update stream_sync_state set updated_at = now() - interval '2 hours' returning 1")
    less.source.upkeep()
    assert here.synced(two) is None
    assert here.synced(one) is not None
    both.ends = less.ends
    both.start()
    client.say(two, 1)
    both.drain(ALL)
    assert both.ids(two) == client.hashes(two)
    assert both.ids(one) == client.hashes(one)


def test_b16_a_very_old_state_is_kept_and_its_gap_is_fetched(here: Scene, node: Node, client: Client) -> None:
    """GIVEN a chosen stream whose state was written ten years ago, and another that nothing came of since WHEN they are
    read again, dozens of snapshots later THEN upkeep took no state away, and each event is taken once, in order."""
    one, quiet = new_stream(client, 3), new_stream(client, 3)
    pipe = here.pipeline([node.url], [one, quiet], keep_unwanted_s=3600.0)
    pipe.drain(ALL)
    here.rows("update stream_sync_state set updated_at = now() - interval '10 years' returning 1")
    old = here.synced(quiet)
    client.say(one, 400)
    pipe.start()
    pipe.source.upkeep()
    assert here.synced(quiet) == old
    pipe.drain(Limit(rows_max=150, wait_s=0.0))
    client.say(quiet, 1)
    pipe.drain(ALL)
    assert pipe.ids(one) == client.hashes(one)
    assert pipe.ids(quiet) == client.hashes(quiet)
    assert pipe.dropped == 0


def _until_the_next_second(node: Node) -> None:
    """A node's clock is read to the second: until it shows a later one than that of the last change."""
    asked = blocks_client.Node(node.url, None, PACE)
    try:
        until(lambda: (listing := asked.listing(0, 0)).now_us > listing.touched, "the node's clock moves on")
    finally:
        asked.close()


def test_cold_streams_wait_for_their_first_event(here: Scene, tmp_path: Path) -> None:
    """B14: at the first start inboxes alone are looked at; another stream with its next event, from its first block."""
    with Node(tmp_path, *NEVER) as node:
        client = node.client()
        cold = new_stream(client, 3)
        inbox = new_stream(client, kind="inbox", members=["alice"])
        client.say(inbox, 1)
        _until_the_next_second(node)
        pipe = here.pipeline([node.url], cold=True)
        pipe.drain(ALL)
        assert (pipe.ids(cold), pipe.ids(inbox)) == ([], client.hashes(inbox))
        assert pipe.source.planner.tracked == 1
        client.say(cold, 1)
        pipe.drain(ALL)
        assert pipe.ids(cold) == client.hashes(cold)
        client.close()


def test_streams_are_chosen_by_kind(here: Scene, tmp_path: Path) -> None:
    """B13: all of a kind are wanted, and nothing else is looked at."""
    with Node(tmp_path, *NEVER) as node:
        client = node.client()
        room, inbox = new_stream(client, 1), new_stream(client, kind="inbox", members=["alice"])
        client.say(inbox, 1)
        pipe = here.pipeline([node.url], choice=ChosenStreams(kinds=frozenset({StreamKind.INBOX})))
        pipe.drain(ALL)
        assert (pipe.ids(room), pipe.ids(inbox)) == ([], client.hashes(inbox))
        client.close()


def test_streams_share_partitions_and_the_number_of_them_stays(here: Scene, node: Node, client: Client) -> None:
    """Each stream is in one partition; another number of partitions is refused before anything is read."""
    streams = [new_stream(client, 3) for _ in range(6)]
    pipe = here.pipeline([node.url], streams, partitions=3)
    pipe.drain(ALL)
    assert sum(bool(rows) for rows in pipe.log.values()) > 1
    for stream in streams:
        assert pipe.ids(stream) == client.hashes(stream)
    with pytest.raises(ConfigError, match="partitions"):
        here.pipeline([node.url], streams, partitions=2)


def test_another_node_is_refused(here: Scene, node: Node, pooling: Node, client: Client) -> None:
    """A place that is not the one we left would look like every stream recreated."""
    stream = new_stream(client, 1)
    here.pipeline([node.url], [stream]).drain(ALL)
    for urls in ([pooling.url], [node.url, pooling.url]):
        with pytest.raises(IdentityError, match="another one"):
            here.pipeline(urls, [stream])


def test_a_lost_state_is_found_out_and_nothing_is_logged_twice(here: Scene, node: Node, client: Client) -> None:
    """The log knows a boundary that State does not: all is read again, and compared."""
    stream = new_stream(client, 12)
    pipe = here.pipeline([node.url], [stream])
    pipe.drain(ALL)
    for table in ("stream_sync_state", "block_streams", "block_ticks", "block_partitions"):
        here.rows(f"delete from {table} returning 1")
    client.say(stream, 2)
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids(stream) == client.hashes(stream)
    assert pipe.dropped == 12 + 1  # and how the stream was made


def test_a_token_travels_sealed(here: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened where the node is asked; without it the node says no, and nobody's error shows it."""
    monkeypatch.setenv("BLOCKS_TEST_KEY", "a key for sealing, of some length")
    sealed = Sealed.seal(TOKEN, SecretBox(KeyRef("env", "BLOCKS_TEST_KEY")))
    monkeypatch.setenv("EVERMARK_BLOCKNODE_TOKEN", TOKEN)
    with Node(tmp_path, *NEVER, "--token", TOKEN) as node:
        client = node.client(TOKEN)
        stream = new_stream(client, 2)
        pipe = here.pipeline([node.url], token=sealed)
        pipe.drain(ALL)
        assert pipe.ids(stream) == client.hashes(stream)
        with pytest.raises(DeniedError) as denied:
            here.pipeline([node.url])
        assert TOKEN not in str(denied.value)
        client.close()


def _users(state: State, source: str) -> frozenset[str]:
    with state.connection() as conn:
        rows = conn.execute("select name from bots_of_the_test where source = %s", (source,)).fetchall()
    return frozenset(name for (name,) in rows)


def _no_inboxes(_: State, source: str) -> frozenset[str]:
    return frozenset()


def _users_version(state: State, source: str) -> str:
    return str(len(_users(state, source)))


def test_streams_follow_the_bots_in_them_and_cookies_exist_for_nothing_else(
    here: Scene, node: Node, client: Client
) -> None:
    """B13, D15: a bot joins, leaves and joins again; state is there while it is in, and nothing is logged twice."""
    room, without = new_stream(client, 7, members=["ann"]), new_stream(client, 3, members=["ann"])
    here.rows("create table bots_of_the_test (source text, name text)", returns=False)
    here.rows("insert into bots_of_the_test values ('chat', 'bot') returning 1")
    bots = BotsInState(Plain(here.dsn), here.state.schema, "chat", BotReaders(_users, _no_inboxes, _users_version))
    pipe = here.pipeline([node.url], choice=BotStreams(bots))
    pipe.drain(ALL)
    assert (pipe.ids(room), here.synced(room)) == ([], None)
    client.add(room, control(room, EventKind.JOIN, member="bot"))
    client.say(room, 3)
    pipe.drain(ALL)
    assert pipe.ids(room) == client.hashes(room)
    client.add(room, control(room, EventKind.LEAVE, member="bot"))
    pipe.drain(ALL)
    taken = client.hashes(room)
    assert (pipe.ids(room), here.synced(room)) == (taken, None)
    client.say(room, 2)
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids(room) == taken
    client.add(room, control(room, EventKind.JOIN, member="bot"))
    pipe.drain(ALL)
    assert pipe.ids(room) == client.hashes(room)
    assert pipe.dropped == len(taken) + 1
    assert (pipe.ids(without), here.synced(without)) == ([], None)
