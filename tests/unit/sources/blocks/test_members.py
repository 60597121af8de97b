"""Streams that are wanted because a bot is in them: from its join on, to its leave, and not a moment longer."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

import pytest

from evermark.errors import FormatError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Cookie, StreamKind
from evermark.sources.blocks.decide.resume import Answer, StreamState
from evermark.sources.blocks.nodes.client import Listing
from evermark.sources.blocks.nodes.members import MemberCache, members_at
from evermark.sources.blocks.stream_choice import BotStreams, ChosenStreams
from simulator.blocks import plans as plans_in_memory
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import Crash, Cut, Pipeline, pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)


@dataclass
class Some:
    """Bots as a test says."""

    names: set[str] = field(default_factory=lambda: {"bot"})
    named: set[str] = field(default_factory=set)

    def users(self) -> frozenset[str]:
        return frozenset(self.names)

    def inboxes(self) -> frozenset[str]:
        return frozenset(self.named)

    def version(self) -> str:
        return ",".join(sorted(self.names)) + ";" + ",".join(sorted(self.named))


def _room(node: ModelNode, stream: str, *members: str, count: int = 3) -> None:
    node.create(stream, members=members)
    for _ in range(count):
        node.say(stream)
        node.seal(stream)


def _read(node: ModelNode, bots: Some, plans: MemoryPlans, **more: object) -> Pipeline:
    return pipeline([node], plans, choice=BotStreams(bots), **more)


def test_members_come_from_the_snapshot_and_what_follows_it_in_the_answer() -> None:
    """GIVEN joins and leaves before a snapshot, in blocks and in the minipool WHEN asked THEN all of them count."""
    node = ModelNode(snapshot_every=2, page_blocks=1, resume_blocks=50)
    node.create("a", members=["ann", "bob"])
    membership = MemberCache()
    assert membership.of(node, "a", tuple) == {"ann", "bob"}
    node.join("a", "cid")
    assert membership.of(node, "a", tuple) == {"ann", "bob", "cid"}
    for member in ("dot", "eve", "fay"):
        node.join("a", member)
        node.seal("a")
    node.join("a", "ann", leave=True)
    for each in (membership, MemberCache()):
        assert each.of(node, "a", tuple) == {"bob", "cid", "dot", "eve", "fay"}


def test_only_streams_with_a_bot_and_inboxes_of_bots_keep_state() -> None:
    """B13, D15: channels and direct streams with a bot, its inbox; cookies exist for nothing else."""
    node, plans = ModelNode(), MemoryPlans()
    _room(node, "with", "ann", "bot")
    _room(node, "without", "ann")
    node.create("direct", StreamKind.DIRECT, ["ann", "bot"])
    for owner in ("bot", "ann"):
        node.create(f"inbox-{owner}", StreamKind.INBOX, [owner])
        node.say(f"inbox-{owner}")
    pipe = _read(node, Some(), plans)
    pipe.drain(ALL)
    assert set(plans.streams) == {"with", "direct", "inbox-bot"}
    assert plans.gaps == {}
    assert pipe.ids("with") == node.hashes("with")
    assert pipe.rows("without") == pipe.rows("inbox-ann") == []


def test_b13_an_inbox_that_a_bot_names_is_taken_whatever_it_is_and_whoever_is_in_it() -> None:
    """GIVEN a channel without bots WHEN one names it as its inbox THEN it is taken, and kept; no other one is."""
    node, plans, bots = ModelNode(), MemoryPlans(), Some()
    _room(node, "mail", "ann")
    _room(node, "without", "ann")
    pipe = _read(node, bots, plans)
    pipe.drain(ALL)
    assert pipe.rows("mail") == []
    bots.named.add("mail")
    pipe.drain(ALL)
    node.say("mail", 2)
    pipe.drain(ALL)
    assert pipe.ids("mail") == node.hashes("mail")
    assert set(plans.streams) == {"mail"}


def test_b13_an_inbox_that_a_bot_names_is_never_cold() -> None:
    """GIVEN streams that did not change since the source first started, and only inboxes are looked at then WHEN a bot
    names a channel as its inbox THEN it is taken at once; any other channel with its next event."""
    node, plans, bots = ModelNode(), MemoryPlans(), Some(named={"mail"})
    for stream in ("mail", "later", "room"):
        _room(node, stream, "bot")
    pipe = _read(node, bots, plans, cold=True)
    pipe.drain(ALL)
    assert set(plans.streams) == {"mail"}
    bots.named.add("later")
    pipe.drain(ALL)
    assert set(plans.streams) == {"mail", "later"}
    node.say("room")
    pipe.drain(ALL)
    assert set(plans.streams) == {"mail", "later", "room"}


@pytest.mark.parametrize("whole", [True, False])
def test_a_bot_that_joins_later_has_the_stream_from_then_on(whole: bool) -> None:
    """GIVEN a channel without a bot WHEN one joins THEN it is taken as `start` says, its join included."""
    node, plans = ModelNode(), MemoryPlans()
    _room(node, "a", "ann", count=5)
    pipe = _read(node, Some(), plans, whole=whole)
    pipe.drain(ALL)
    assert pipe.rows("a") == []
    joined = node.join("a", "bot")
    node.say("a", 2)
    pipe.drain(ALL)
    taken = pipe.ids("a")
    assert joined in taken
    assert taken == node.hashes("a")[-len(taken) :]
    assert (len(taken) == len(node.hashes("a"))) is whole


@pytest.mark.parametrize("cut", [None, "planned", "read", "logged", "confirmed", "unconfirmed"])
def test_a_leave_is_taken_and_after_it_the_stream_is_nobodys(cut: Cut | None) -> None:
    """GIVEN a stream with a bot WHEN it leaves and joins again, whatever crashes THEN nothing is missing or twice."""
    node, plans = ModelNode(), MemoryPlans()
    _room(node, "a", "ann", "bot")
    pipe = _read(node, Some(), plans)
    pipe.drain(ALL)
    left = node.join("a", "bot", leave=True)
    after = node.say("a", 2)
    for _ in range(2):
        try:
            pipe.step(ALL, cut)
        except Crash:
            pipe.start()
    if cut != "unconfirmed":
        pipe.drain(ALL)
        assert pipe.ids("a")[-3:] == [left, *after]
        assert "a" not in plans.streams
        node.say("a", 2)
        pipe.drain(ALL)
        assert pipe.ids("a")[-3:] == [left, *after]
    node.join("a", "bot")
    pipe.drain(ALL)
    assert sorted(pipe.ids("a")) == sorted(node.hashes("a"))
    assert "a" in plans.streams


@pytest.mark.parametrize("seen", [True, False], ids=["an hour ahead", "some minutes ahead until now"])
def test_a_clock_that_is_ahead_doubles_nothing(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a node whose clock is ahead of State's, or was until it was set WHEN a bot leaves a stream that is new
    and joins again THEN the stream is compared with the log, and nothing is logged twice."""
    now_us = time.time_ns() // 1000
    monkeypatch.setattr(plans_in_memory, "_numbers", itertools.count(now_us))
    ahead_us = (3600 if seen else 500) * 1_000_000
    node = ModelNode(snapshot_every=10, numbers=itertools.count(now_us + ahead_us))
    node.ahead_us = ahead_us if seen else 0
    node.create("room", members=["ann"])
    pipe = _read(node, Some(), MemoryPlans())
    for leave in (False, True, False):
        node.join("room", "bot", leave=leave)
        node.say("room", 3)
        node.seal("room")
        pipe.drain(ALL)
    assert sorted(pipe.ids("room")) == sorted(set(node.hashes("room")))


@pytest.mark.parametrize("what", ["gone", "lied about"])
def test_one_stream_that_cannot_be_asked_for_keeps_no_others_state(what: str) -> None:
    """GIVEN streams without bots by now, one of which its node lost, or lies about WHEN tidied up THEN the state of the
    others is removed, and that of a stream that nobody has any more; of a lie nothing follows."""
    node, plans, bots = ModelNode(), MemoryPlans(), Some({"bot", "other"})
    for stream, member in (("a", "other"), ("b", "other"), ("c", "bot")):
        _room(node, stream, member, count=1)
    pipe = _read(node, bots, plans, keep_unwanted_s=0.0)
    pipe.drain(ALL)
    bots.names = {"bot"}
    if what == "gone":
        del node.streams["a"]
    else:
        node.lies.add(("a", 1))
    pipe.source.upkeep()
    assert set(plans.streams) == ({"c"} if what == "gone" else {"a", "c"})


def test_another_set_of_bots_is_looked_for_in_all_streams() -> None:
    """GIVEN a bot registered later WHEN its version shows THEN streams it is in are taken though nothing is new."""
    node, plans, bots = ModelNode(), MemoryPlans(), Some(set())
    _room(node, "a", "ann", "bot")
    _room(node, "b", "ann")
    pipe = _read(node, bots, plans)
    pipe.drain(ALL)
    assert plans.streams == {}
    bots.names.add("bot")
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert set(plans.streams) == {"a"}
    bots.names.clear()
    pipe.source.upkeep()
    assert plans.streams == {}


def test_what_is_named_is_wanted_beside_the_bots_streams() -> None:
    """GIVEN a stream named in the settings WHEN no bot is in it THEN it is taken all the same."""
    node, plans = ModelNode(), MemoryPlans()
    _room(node, "named", "ann")
    _room(node, "other", "ann")
    pipe = pipeline([node], plans, choice=BotStreams(Some(), ChosenStreams(frozenset({"named"}))))
    pipe.drain(ALL)
    node.say("named")
    pipe.drain(ALL)
    assert pipe.ids("named") == node.hashes("named")
    assert set(plans.streams) == {"named"}


def test_a_node_that_lies_about_a_stream_does_not_hide_its_bots() -> None:
    """GIVEN a forged block behind the snapshot WHEN members are asked for THEN the stream is stale until it is true."""
    node, plans = ModelNode(snapshot_every=100), MemoryPlans()
    _room(node, "a", "ann")
    node.join("a", "bot")
    node.seal("a")
    _room(node, "b", "ann", "bot")
    _room(node, "nobody", "ann")
    node.lies |= {("a", 2), ("nobody", 2)}
    pipe = _read(node, Some(), plans)
    pipe.drain(ALL)
    assert set(plans.gaps) == {"a", "nobody"}
    assert pipe.ids("b") == node.hashes("b")
    node.lies.clear()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert pipe.ids("nobody") == []
    assert plans.gaps == {}


class Repeats(ModelNode):
    """Begins each answer at the snapshot, and says that there is more."""

    def view(self, stream: str, cookie: Cookie | None) -> Answer:
        assert len(self.cookies) < 20, "it is asked for ever"
        return replace(super().view(stream, None), more=True)


@pytest.mark.parametrize("who", ["now", "where it was taken to"])
def test_a_node_that_gives_the_same_blocks_for_ever_is_not_asked_for_ever(who: str) -> None:
    """GIVEN a node whose answers never lead further THEN asking it for the members of a stream fails."""
    node = Repeats(snapshot_every=100)
    _room(node, "a", "ann")
    taken = StreamState(0, Cookie(99, "f" * 64), node.streams["a"].incarnation)
    with pytest.raises(FormatError, match="again"):
        members_at(node, "a", taken, tuple) if who != "now" else MemberCache().of(node, "a", tuple)


class Asked(ModelNode):
    """Remembers from where its listing was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        self.asked.append(touched_after)
        return super().listing(touched_after, wait_s)


@pytest.mark.parametrize("told", [True, False], ids=["confirmed", "not confirmed yet"])
def test_another_choice_that_changes_nothing_is_looked_at_once(told: bool) -> None:
    """GIVEN bots that are in no stream WHEN they come THEN the listing is read once more, and from its end on then: by
    who looked, though not all was confirmed, and by who begins after all was."""
    node, bots, plans = Asked(), Some(), MemoryPlans()
    for stream in ("a", "b"):
        _room(node, stream, "bot")
    pipe = _read(node, bots, plans)
    while pipe.step(ALL, None if told else "unconfirmed"):
        pass
    bots.names.add("nowhere")
    assert not pipe.step(ALL)
    assert node.asked[-2:] == [0, node._touched]
    if told:
        pipe.start()
    node.asked.clear()
    assert not pipe.step(ALL)
    assert node.asked == [node._touched]
