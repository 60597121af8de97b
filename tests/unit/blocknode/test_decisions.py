"""When a node seals and snapshots, and what a cookie continues: as functions, and over random histories of a ledger."""

from __future__ import annotations

import itertools
import json
import sqlite3
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.blocknode.bodies import CreateAsked, EventAsked, event_of
from evermark.blocknode.decisions import (
    Answer,
    Pool,
    Range,
    continuation,
    judge_range,
    next_touched,
    seal_in_us,
    snapshot_due,
)
from evermark.blocknode.ledger import Clocks, Ledger
from evermark.blocknode.reader import Answers, ReaderPosition
from evermark.blocknode.refusal import Refused
from evermark.blocknode.settings import NodeSettings
from evermark.errors import ConfigError
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    Snapshot,
    StreamKind,
    block_from,
    event_from,
    make_block,
    sum_up,
    verify_chain,
)

SETTINGS = NodeSettings(
    Path("nowhere"),
    seal_events=4,
    seal_bytes=1000,
    seal_after_s=2,
    snapshot_every=3,
    page_blocks=2,
    resume_blocks=5,
)
SECOND = 1_000_000


def test_a_minipool_is_sealed_by_count_by_bytes_or_by_time_and_never_empty() -> None:
    """GIVEN a minipool WHEN it is full or old THEN it is due; an empty one never is."""
    assert seal_in_us(Pool(), 10**18, SETTINGS) is None
    assert seal_in_us(Pool(4, 10, 0), 0, SETTINGS) == 0
    assert seal_in_us(Pool(1, 1000, 0), 0, SETTINGS) == 0
    assert seal_in_us(Pool(3, 999, 5 * SECOND), 5 * SECOND, SETTINGS) == 2 * SECOND
    assert seal_in_us(Pool(3, 999, 5 * SECOND), 7 * SECOND, SETTINGS) == 0


@given(st.integers(0, 5), st.integers(0, 2000), st.integers(0, 10**16), st.integers(0, 10**16))
def test_a_minipool_never_waits_longer_than_it_may(count: int, size: int, since_us: int, now_us: int) -> None:
    """GIVEN any minipool and any clock, also one that was set back WHEN asked THEN it waits at most its time."""
    wait_us = seal_in_us(Pool(count, size, since_us), now_us, SETTINGS)
    assert (wait_us is None) == (count == 0)
    assert wait_us is None or 0 <= wait_us <= 2 * SECOND


@given(st.integers(0, 100), st.integers(1, 200), st.integers(0, 10**8))
def test_snapshots_come_every_n_blocks_or_when_much_was_written(last: int, after: int, size: int) -> None:
    """GIVEN a snapshot WHEN N blocks or many bytes followed THEN the next block carries one, and not before."""
    due = snapshot_due(last + after, last, size, SETTINGS)
    assert due == (after >= 3 or size >= SETTINGS.snapshot_bytes)


hashes = st.sampled_from(["a" * 64, "b" * 64])


@given(st.integers(0, 30), hashes, st.integers(1, 20), st.tuples(*[hashes] * 20), st.integers(1, 10))
def test_a_cookie_is_continued_only_from_the_block_it_names(
    gen: int, before: str, next_number: int, chain: tuple[str, ...], most: int
) -> None:
    """GIVEN any cookie and any chain WHEN asked THEN it goes on only if that block is ours, and not too far back."""
    ours = chain[gen - 1] if 0 < gen <= next_number else None
    answer = continuation(Cookie(gen, before), next_number, ours, most)
    goes_on = 0 < gen <= next_number and chain[gen - 1] == before and next_number - gen <= most
    assert (answer is Answer.CONTINUE) == goes_on
    assert continuation(None, next_number, before, most) is Answer.RESET
    assert continuation(Cookie(next_number, before), next_number, before, most) is Answer.CONTINUE


@pytest.mark.parametrize("next_number", [1, 2, 5])
def test_a_range_is_judged_by_the_blocks_there_are(next_number: int) -> None:
    """GIVEN every range WHEN asked THEN only real blocks are good; a follower cannot know which are."""
    for start, end in itertools.product(range(-2, 8), repeat=2):
        judged = judge_range(start, end, next_number, follows=False)
        blocks = set(range(start, end))
        assert (judged is Range.EMPTY) == (not blocks or start < 0)
        assert (judged is Range.GOOD) == (bool(blocks) and blocks <= set(range(next_number)))
        followed = judge_range(start, end, next_number, follows=True)
        assert followed is not Range.IMPOSSIBLE
        assert (followed is Range.GOOD) == (bool(blocks) and start in range(next_number))


@given(st.integers(0, 10**16), st.integers(0, 10**16))
def test_touched_always_grows(last: int, now_us: int) -> None:
    """GIVEN any clock WHEN a stream changes THEN its number is above all before."""
    assert next_touched(last, now_us) > last


def test_settings_that_cannot_be_are_refused() -> None:
    """GIVEN limits of nothing, short tokens, odd urls WHEN a node is set so THEN it says what is wrong."""
    where = Path("nowhere")
    for wrong in (
        {"seal_events": 0},
        {"seal_after_s": 0},
        {"event_bytes": 10**9},
        {"token": "short"},
        {"follow": "ftp://x"},
        {"follow": "http://"},
        {"follow": "http://ann:short@x:8330"},
        {"follow": "https://:short@x"},
        {"follow": "http://x/?token=short"},
        {"follow": "http://x:port"},
    ):
        with pytest.raises(ConfigError) as caught:
            NodeSettings(where, **wrong)
        assert "short" not in str(caught.value).replace("too short", "")
        assert caught.value.hint


class World:
    """A ledger in memory with a clock of its own, and a plain list of what was accepted beside it."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.executescript(files("evermark.blocknode").joinpath("schema.sql").read_text())
        self.now_us = 1_000 * SECOND
        self.clocks = Clocks(lambda: self.now_us, lambda: self.now_us)
        self.ledger = Ledger(self.db, SETTINGS, self.clocks)
        self.answers = Answers(SETTINGS)
        self.accepted: dict[str, list[BlockEvent]] = {}
        self.positions: dict[str, ReaderPosition | None] = {}
        self.read: dict[str, dict[str, None]] = {}
        self._numbers = itertools.count()

    def create(self, stream: str) -> None:
        made, _ = self.ledger.create(stream, CreateAsked(kind="channel", creator="a"), f"{next(self._numbers)}")  # type: ignore[arg-type]
        if made:
            self.accepted[stream], self.read[stream], self.positions[stream] = [], {}, None

    def event(self, stream: str, kind: str, who: str) -> tuple[BlockEvent, bytes]:
        fields: dict[str, object] = {"kind": kind, "creator": "a", "at_us": 1, "nonce": f"n{next(self._numbers)}"}
        if kind in {"join", "leave"}:
            fields["member"] = who
        elif kind == "settings":
            fields["settings"] = {who: "on" if len(self.accepted[stream]) % 2 else None}
        return event_of(stream, EventAsked.model_validate(fields), 10_000)

    def add(self, stream: str, *events: tuple[BlockEvent, bytes]) -> None:
        if stream not in self.accepted:
            with pytest.raises(Refused):
                self.ledger.add(stream, events)
            return
        known = {event.hash for event in self.accepted[stream]}
        answers = self.ledger.add(stream, events)
        assert [answer.duplicate for answer in answers] == [event.hash in known for event, _ in events]
        self.accepted[stream] += [event for event, _ in events if event.hash not in known]

    def commit(self) -> None:
        self.ledger.seal_due()
        self.ledger.flush()

    def follow(self, stream: str) -> None:
        """Read on as a sync does, from where this reader stands."""
        while True:
            view = self.answers.view(self.db, stream, self.positions[stream])
            if view.reset:
                self.read[stream] = dict.fromkeys(self.sealed_before(stream, json.loads(view.blocks[0])))
            for body in view.blocks:
                self.read[stream].update(dict.fromkeys(json.loads(body)["header"]["event_hashes"]))
            self.read[stream].update(dict.fromkeys(json.loads(text)["hash"] for text in view.minipool))
            self.positions[stream] = view.position
            if not view.more:
                break
        assert list(self.read[stream]) == [event.hash for event in self.accepted[stream]]

    def sealed_before(self, stream: str, block: dict[str, dict[str, int]]) -> list[str]:
        before = self.blocks(stream)[: block["header"]["number"]]
        return [event.hash for one in before for event in one.events]

    def blocks(self, stream: str) -> list[Block]:
        _, _, next_number, *_ = self.answers._stream(self.db, stream)
        bodies: list[bytes] = []
        while len(bodies) < next_number:
            bodies += self.answers.page(self.db, stream, len(bodies), next_number).blocks
        return [block_from(json.loads(body), stream) for body in bodies]

    def check(self) -> None:
        """Every accepted event once and in order, in a sound chain; snapshots sum up; the reader has them all."""
        for stream, accepted in self.accepted.items():
            blocks = self.blocks(stream)
            view = self.answers.view(self.db, stream, None)
            assert verify_chain(blocks, START) == view.position.cookie
            pool = [event_from(json.loads(text)) for text in view.minipool]
            assert [event for block in blocks for event in block.events] + pool == accepted
            assert len(pool) < SETTINGS.seal_events
            members: set[str] = set()
            set_to: dict[str, str] = {}
            for block in blocks:
                sum_up(members, set_to, block.events)
                assert (block.snapshot is not None) == (block.number % SETTINGS.snapshot_every == 0)
                if block.snapshot is not None:
                    assert (block.snapshot.members, block.snapshot.settings) == (tuple(sorted(members)), set_to)
            self.follow(stream)


USUAL, RARE = ["add", "many", "read", "wait"], ["again", "delete", "create", "restart", "fail"]
steps = st.tuples(
    st.sampled_from(USUAL * 3 + RARE),
    st.sampled_from(["s1", "s1", "s1", "s2"]),
    st.sampled_from(["message", "message", "join", "leave", "settings"]),
    st.sampled_from(["bob", "eve"]),
)


@given(st.lists(steps, min_size=10, max_size=40))
def test_any_history_keeps_every_accepted_event_once_in_a_sound_chain(history: list[tuple[str, str, str, str]]) -> None:
    """GIVEN any history of adds, repeats, waits, deletions, restarts and failed transactions THEN nothing is lost."""
    world = World()
    world.create("s1")
    world.commit()
    for what, stream, kind, who in history:
        known = stream in world.accepted
        if what == "add" and known:
            world.add(stream, world.event(stream, kind, who))
        elif what == "many" and known:
            world.add(stream, *[world.event(stream, kind, who) for _ in range(9)])
        elif what == "again" and world.accepted.get(stream):
            event = world.accepted[stream][len(world.accepted[stream]) // 2]
            world.add(stream, (event, json.dumps(event.wire()).encode()))
        elif what == "wait":
            world.now_us += SECOND
        elif what == "read" and known:
            world.follow(stream)
        elif what == "delete" and known:
            world.ledger.delete(stream)
            del world.accepted[stream]
        elif what == "create":
            world.create(stream)
        elif what == "restart":
            world.commit()
            world.ledger = Ledger(world.db, SETTINGS, world.clocks)
        elif what == "fail" and known:
            world.commit()
            world.db.execute("begin")
            world.ledger.add(stream, [world.event(stream, kind, who) for _ in range(5)])
            world.db.execute("rollback")
            world.ledger.forget()
        world.commit()
    while world.ledger.purging:
        world.ledger.purge()
    world.check()
    world.now_us += 2 * SECOND
    world.commit()
    assert world.ledger.seal_in_s is None
    world.check()


def test_a_start_holds_nothing_of_streams_that_nobody_uses() -> None:
    """GIVEN many streams, one with a minipool WHEN a node starts THEN it remembers that one's time, and no other."""
    world = World()
    for number in range(300):
        world.create(f"s{number}")
    world.add("s7", world.event("s7", "message", ""))
    world.commit()
    ledger = Ledger(world.db, SETTINGS, world.clocks)
    assert len(ledger._due) == 1
    assert len(ledger._heads) == 0
    plan = world.db.execute("explain query plan select stream from streams where pool_count > 0").fetchall()
    assert "streams_to_seal" in plan[0][3]


def test_listings_do_not_tear_apart_streams_that_share_a_number() -> None:
    """GIVEN streams that a follower wrote with one number WHEN listed one by one THEN none is passed over."""
    world = World()
    for number in range(3):
        world.create(f"s{number}")
    world.commit()
    world.db.execute("update streams set touched = 5 where stream <> 's0'")
    world.db.execute("update streams set touched = 4 where stream = 's0'")
    first = world.answers.listing(world.db, 0, 1)
    second = world.answers.listing(world.db, first[-1]["touched"], 1)
    assert [row["stream"] for row in first + second] == ["s0", "s1", "s2"]


def copied(stream: str, count: int = 1) -> list[Block]:
    """The first blocks of a stream, as another node made them."""
    blocks = [make_block(stream, START, 0, [], Snapshot(StreamKind.CHANNEL, "a", "i", (), {}))]
    while len(blocks) < count:
        blocks.append(make_block(stream, blocks[-1].cookie, 0, [], None))
    return blocks


def test_what_is_copied_late_is_listed_after_what_readers_have_passed() -> None:
    """GIVEN a listing that was read to its end WHEN a copy comes with a number in it THEN the reader is told of it."""
    world = World()
    passed = 0

    def news() -> list[str]:
        nonlocal passed
        world.commit()
        rows = world.answers.listing(world.db, passed, 100)
        passed = rows[-1]["touched"] if rows else passed
        return [row["stream"] for row in rows]

    world.ledger.copy("good", copied("good"), (), 7)
    assert (news(), passed) == (["good"], 7)
    world.ledger.copy("paid", copied("paid"), (), 5)
    world.ledger.copy("level", copied("level"), (), 7)
    assert news() == ["level", "paid"]
    world.ledger = Ledger(world.db, SETTINGS, world.clocks)
    world.ledger.copy("next", copied("next"), (), 8)  # the followed node's next number, which was passed meanwhile
    assert news() == ["next"]
    world.ledger.delete("good", 8)
    assert news() == ["good"]
    world.ledger.copy("later", copied("later"), (), 1000)
    assert (news(), passed) == (["later"], 1000)


def test_a_copy_in_parts_keeps_its_place_in_the_listing_until_its_last_part() -> None:
    """GIVEN a copy in parts, of a new or a listed stream WHEN a part comes THEN the listing is as it was."""
    world = World()
    old, new = copied("old", 3), copied("new", 2)

    def listed() -> list[tuple[str, int]]:
        world.commit()
        return [(row["stream"], row["touched"]) for row in world.answers.listing(world.db, 0, 100)]

    world.ledger.copy("old", old[:1], (), 7)
    assert listed() == [("old", 7)]
    world.ledger.copy("old", old[1:2], (), None)
    world.ledger.copy("new", new[:1], (), None)
    assert listed() == [("old", 7)]
    world.ledger.copy("old", old[2:], (), 9)
    world.ledger.copy("new", new[1:], (), 8)
    assert listed() == [("new", 8), ("old", 9)]


def test_a_large_snapshot_makes_no_other_one_due() -> None:
    """GIVEN a stream whose snapshot alone is larger than what may follow one WHEN blocks follow THEN few carry one."""
    world = World()
    settings = replace(SETTINGS, seal_events=1, snapshot_every=5, snapshot_bytes=2000)
    world.ledger = Ledger(world.db, settings, world.clocks)
    members = [f"{number:0100}" for number in range(50)]
    world.ledger.create("s", CreateAsked(kind=StreamKind.CHANNEL, creator="a", members=members), "i")
    world.accepted["s"] = []
    for _ in range(11):
        world.add("s", world.event("s", "message", ""))
    world.commit()
    assert [block.number for block in world.blocks("s") if block.snapshot] == [0, 5, 10]
    large = [
        event_of("s", EventAsked(kind="message", creator="a", at_us=1, nonce=f"l{number}", payload="x" * 2000), 10**5)
        for number in range(3)
    ]
    world.add("s", *large)
    world.commit()
    assert [block.number for block in world.blocks("s") if block.snapshot] == [0, 5, 10, 13]
