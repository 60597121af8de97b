"""D3: a stream that is taken again, when the log has lost its beginning: memberships are as they were made."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from evermark.delivery.bots.membership import lesson, moves_of
from evermark.delivery.model import Stay
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Cookie
from evermark.sources.blocks.decide.resume import StreamState
from evermark.sources.blocks.nodes.members import members_at
from evermark.sources.blocks.stream_choice import BotStreams
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, Crash, Cut, Pipeline, pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)
USERS = frozenset({"x", "y", "z"})
HOWEVER_IT_COMES = pytest.mark.parametrize(
    ("pace", "rows_max"),
    [(PACE, 100), (PACE, 2), (replace(PACE, carried_bytes_max=4), 100)],
    ids=["carried", "in parts", "fetched"],
)


@dataclass
class Kept:
    """A log that loses its oldest rows, and those who learn from it row by row and lose nothing."""

    pipe: Pipeline
    seen: list[dict[str, Any]] = field(default_factory=list)

    def look(self) -> None:
        self.seen = [*self.seen, *(row for row in self.pipe.log[0] if row not in self.seen)]

    def expire(self) -> None:
        """What is logged now is gone, and nobody forgets what was learned from it."""
        self.look()
        self.pipe.log[0] = []

    def stays(self, user: str) -> tuple[Stay, ...]:
        self.look()
        ordered = sorted(({**row, "batch": 1} for row in self.seen), key=lambda row: str(row["position"]))
        moves = list(moves_of(ordered, USERS, lambda _: ()))
        return lesson(user, 0, 1, {}, moves).stays.get("a", ())

    def is_in(self, user: str) -> bool:
        stays = self.stays(user)
        return bool(stays) and stays[-1].end is None

    def hears(self, user: str, event: str) -> bool:
        """Whether the user is a member where the event stands last."""
        self.look()
        at = (1, max(str(row["position"]) for row in self.seen if row["event_id"] == event))
        return any(stay.covers(at) for stay in self.stays(user))


def said(node: ModelNode) -> str:
    (event,) = node.say("a")
    node.seal("a")
    return event


def moved(node: ModelNode, member: str, *, leave: bool = False) -> None:
    node.join("a", member, leave=leave)
    node.seal("a")


def restored(node: ModelNode, blocks: int, members: set[str]) -> None:
    it = node.streams["a"]
    it.blocks, it.pool, it.members = it.blocks[:blocks], [], set(members)
    it.snapshot = max(block.number for block in it.blocks if block.snapshot is not None)
    node._touch("a")


@dataclass(frozen=True)
class XAndY:
    def users(self) -> frozenset[str]:
        return frozenset({"x", "y"})

    def inboxes(self) -> frozenset[str]:
        return frozenset()

    def version(self) -> str:
        return "x and y"


@HOWEVER_IT_COMES
@pytest.mark.parametrize("whole", [True, False])
def test_d3_who_left_is_no_member_again_when_the_log_lost_only_its_join(whole: bool, pace: Any, rows_max: int) -> None:
    """GIVEN a join the log has lost and a leave it has WHEN another bot's join makes the stream be taken again THEN who
    left hears nothing that was said since, and who joined all that was said after it."""
    node = ModelNode(snapshot_every=4)
    node.create("a", members=["ann"])
    said(node)
    moved(node, "y")
    kept = Kept(pipeline([node], MemoryPlans(), choice=BotStreams(XAndY()), whole=whole, pace=pace))
    kept.pipe.drain(ALL)
    assert kept.is_in("y")
    kept.expire()
    moved(node, "y", leave=True)
    kept.pipe.drain(ALL)
    assert not kept.is_in("y")
    between = [said(node), said(node)]
    moved(node, "x")
    after = said(node)
    kept.pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))
    assert (kept.is_in("x"), kept.is_in("y")) == (True, False)
    assert (kept.hears("x", after), kept.hears("y", after)) == (True, False)
    logged = {row["event_id"] for row in kept.seen}
    assert not [event for event in between if event in logged and (kept.hears("y", event) or kept.hears("x", event))]
    assert set(between) <= logged or not whole


@HOWEVER_IT_COMES
def test_d3_a_restored_node_puts_nobody_out_when_the_log_lost_the_beginning(pace: Any, rows_max: int) -> None:
    """GIVEN a stream older than the log, and a join that the log has WHEN the node is restored THEN its user is a
    member, and hears what is said then."""
    node = ModelNode(snapshot_every=3)
    node.create("a", members=["ann"])
    for _ in range(4):
        said(node)
    kept = Kept(pipeline([node], MemoryPlans(), pace=pace))
    kept.pipe.drain(ALL)
    kept.expire()
    moved(node, "x")
    blocks = len(node.streams["a"].blocks)
    moved(node, "z")
    said(node)
    kept.pipe.drain(ALL)
    assert kept.is_in("x") and kept.is_in("z")
    restored(node, blocks, {"ann", "x"})
    fresh = said(node)
    kept.pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))
    assert (kept.is_in("x"), kept.is_in("z")) == (True, False)
    assert kept.hears("x", fresh)


@HOWEVER_IT_COMES
@pytest.mark.parametrize("lost", [True, False])
def test_d3_an_accepted_fork_sends_nobody_what_was_said_before_it_joined(lost: bool, pace: Any, rows_max: int) -> None:
    """GIVEN a history that is accepted, in which somebody joins late WHEN it is taken THEN who joined hears what was
    said after that, and not what was said before; who was in both hears all of it, whether the log lost the join or
    not."""
    node = ModelNode(snapshot_every=3)
    node.create("a", members=["z"])
    moved(node, "y")
    kept = Kept(pipeline([node], MemoryPlans(), pace=pace))
    kept.pipe.drain(ALL)
    if lost:
        kept.expire()
    blocks = len(node.streams["a"].blocks)
    said(node)
    said(node)
    kept.pipe.drain(ALL)
    restored(node, blocks, {"z", "y"})
    before = said(node)
    moved(node, "x")
    after = [said(node) for _ in range(3)]
    kept.pipe.drain(ALL)
    kept.pipe.source.accept_fork("a")
    kept.pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))
    heard = {user: [kept.hears(user, event) for event in (before, *after)] for user in USERS}
    assert heard == {"x": [False, True, True, True], "y": [True] * 4, "z": [True] * 4}


@HOWEVER_IT_COMES
@pytest.mark.parametrize("lost", [True, False])
def test_d3_members_of_an_accepted_history_are_those_it_began_with(lost: bool, pace: Any, rows_max: int) -> None:
    """GIVEN a history in which a first member left and another user joined WHEN another one is accepted, in which the
    first stays and the other joins late THEN each hears what was said there while it was a member, and nothing else."""
    node = ModelNode(snapshot_every=3)
    node.create("a", members=["z"])
    said(node)
    kept = Kept(pipeline([node], MemoryPlans(), pace=pace))
    kept.pipe.drain(ALL)
    if lost:
        kept.expire()
    blocks = len(node.streams["a"].blocks)
    moved(node, "z", leave=True)
    moved(node, "x")
    said(node)
    kept.pipe.drain(ALL)
    assert (kept.is_in("z"), kept.is_in("x")) == (False, True)
    restored(node, blocks, {"z"})
    before = said(node)
    moved(node, "x")
    after = [said(node) for _ in range(3)]
    kept.pipe.drain(ALL)
    kept.pipe.source.accept_fork("a")
    kept.pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))
    heard = {user: [kept.hears(user, event) for event in (before, *after)] for user in ("x", "z")}
    assert heard == {"x": [False, True, True, True], "z": [True] * 4}
    assert (kept.is_in("z"), kept.is_in("x")) == (True, True)


def closings(pipe: Pipeline) -> list[dict[str, Any]]:
    found = [json.loads(row["payload"]) for row in pipe.rows("a") if row["op"] == "schema"]
    return [one for one in found if one.get("change") == "taken again"]


@pytest.mark.parametrize("cut", ["planned", "read", "logged", "confirmed"])
def test_each_time_a_stream_is_taken_again_ends_with_who_is_in_it_once(cut: Cut) -> None:
    """GIVEN a node that is restored twice to one place, and crashes THEN each time is closed by one row of its own."""
    node = ModelNode(snapshot_every=3)
    node.create("a", members=["x"])
    said(node)
    blocks = len(node.streams["a"].blocks)
    pipe = pipeline([node], MemoryPlans())
    for times in (1, 2):
        moved(node, "y")
        moved(node, "x", leave=True)
        pipe.drain(ALL)
        restored(node, blocks, {"x"})
        with pytest.raises(Crash):
            pipe.step(ALL, cut)
        pipe.start()
        pipe.drain(ALL)
        assert [one["members"] for one in closings(pipe)] == [["x"]] * times
        assert pipe.rows("a")[-1]["op"] == "schema"
    ids = Counter(row["event_id"] for row in pipe.rows("a"))
    assert max(ids.values()) == 1


def test_a_stream_that_grows_while_it_is_taken_again_is_closed_all_the_same() -> None:
    """GIVEN a stream that has passed where it was before it is taken again as a whole THEN it is closed at its end, and
    goes on without repeats."""
    node, plans = ModelNode(snapshot_every=2), MemoryPlans()
    node.create("a", members=["x"])
    for _ in range(4):
        said(node)
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    restored(node, 3, {"x"})
    for _ in range(8):
        pipe.step(Limit(rows_max=1, wait_s=0.0))
        said(node)
    assert not closings(pipe)
    moved(node, "y")
    pipe.drain(ALL)
    assert [one["members"] for one in closings(pipe)] == [["x", "y"]]
    said(node)
    pipe.drain(ALL)
    known = plans.known(["a"])["a"].known
    assert known is not None and known.repeats_below <= known.cookie.minipool_gen
    assert len(closings(pipe)) == 1
    assert set(node.hashes("a")) <= set(pipe.ids("a"))


def test_who_is_in_a_stream_is_told_for_the_very_place_it_was_taken_to() -> None:
    """GIVEN a node that went on meanwhile THEN only what was taken counts; and nobody can say behind a later snapshot,
    of another chain, or at a node that has less."""
    node = ModelNode(snapshot_every=100)
    node.create("a", members=["ann"])
    moved(node, "bob")
    taken = StreamState(0, node.streams["a"].cookie, "", frozenset({node.join("a", "cid")}))
    node.join("a", "dot")
    assert members_at(node, "a", taken, tuple) == frozenset({"ann", "bob", "cid"})
    node.seal("a")
    moved(node, "eve")
    assert members_at(node, "a", taken, tuple) == frozenset({"ann", "bob", "cid"})
    other, ahead = Cookie(2, "0" * 64), Cookie(9, "0" * 64)
    assert members_at(node, "a", replace(taken, cookie=other), tuple) is None
    assert members_at(node, "a", replace(taken, cookie=ahead), tuple) is None
    node.snapshot_every = 1
    moved(node, "fay")
    assert members_at(node, "a", taken, tuple) is None


def test_d3_a_join_that_one_node_hides_puts_nobody_out_of_an_accepted_fork() -> None:
    """GIVEN a join that one node shows unreadable and another does not WHEN a fork is accepted THEN its user stays."""
    node = ModelNode(snapshot_every=100)
    node.create("a", members=["ann"])
    moved(node, "x")
    said(node)
    kept = Kept(pipeline([node, other := node.copied("two")], MemoryPlans()))
    kept.pipe.drain(ALL)
    restored(node, 2, {"ann", "x"})
    fresh = [said(node) for _ in range(3)]
    other.streams = node.copied("two").streams
    kept.pipe.drain(ALL)
    kept.pipe.source.accept_fork("a")
    node.garbled.add(("a", 1))
    kept.pipe.drain(ALL)
    assert json.loads(kept.pipe.notes("a")[0])["members"] == ["ann", "x"]
    assert all(kept.hears("x", event) for event in fresh)
    assert (len(kept.stays("x")), kept.is_in("x")) == (2, True)  # up to the fork, and from the join in this history on
