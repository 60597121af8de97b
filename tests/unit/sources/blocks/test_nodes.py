"""Several nodes, one of them unwell: what it cannot say is asked of the others."""

from __future__ import annotations

from typing import Any

import pytest

from evermark.errors import BusyError, DeniedError, EvermarkError, FormatError, NotFoundError, UnreachableError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Block, Cookie
from evermark.sources.blocks.decide.resume import Answer
from evermark.sources.blocks.nodes.client import Listing, NodeClient, NodeInfo
from evermark.sources.blocks.stream_choice import BotStreams
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, pipeline
from simulator.blocks.plans import MemoryPlans
from tests.unit.sources.blocks.test_members import Some

ALL = Limit(wait_s=0.0)


class Unwell(ModelNode):
    """Answers who it is, and nothing else."""

    error: EvermarkError

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        raise self.error


class Nameless(Unwell):
    """Answers nothing at all."""

    def about(self) -> NodeInfo:
        raise self.error


@pytest.mark.parametrize("error", [DeniedError("401"), FormatError("<html>"), UnreachableError("gone")], ids=repr)
def test_b10_a_node_that_refuses_or_talks_nonsense_stops_nobody(error: EvermarkError) -> None:
    """GIVEN two nodes, one unwell WHEN reading THEN everything comes from the other; with that one alone it is told."""
    well = ModelNode("one")
    well.create("a")
    well.say("a", 3)
    unwell = Unwell("two")
    unwell.leader, unwell.error = "one", error
    pipe = pipeline([unwell, well])
    pipe.drain(ALL)
    assert pipe.ids("a") == well.hashes("a")
    with pytest.raises(type(error)):
        pipeline([unwell]).source.latest({0: pipe.source.earliest(0)}, ALL)


@pytest.mark.parametrize("error", [DeniedError("401"), FormatError("<html>"), UnreachableError("gone")], ids=repr)
def test_b10_a_node_that_does_not_say_who_it_is_stops_nobody(error: EvermarkError) -> None:
    """GIVEN two nodes, one of which does not say who it is WHEN reading begins THEN the other one counts; with that one
    alone it is told."""
    well = ModelNode("one")
    well.create("a")
    well.say("a", 3)
    unwell = Nameless("two")
    unwell.leader, unwell.error = "one", error
    pipe = pipeline([unwell, well])
    pipe.drain(ALL)
    assert pipe.ids("a") == well.hashes("a")
    with pytest.raises(type(error)):
        pipeline([unwell])


@pytest.mark.parametrize("order", [0, 1])
def test_b10_not_found_at_one_node_says_nothing_while_another_cannot_be_asked(order: int) -> None:
    """GIVEN one that does not have a stream and one that is down WHEN asked THEN it is down, not gone."""
    nodes = [ModelNode("one"), ModelNode("two")][:: -1 if order else 1]

    def call(node: object) -> None:
        raise NotFoundError("no stream") if node is nodes[0] else UnreachableError("down")

    with pytest.raises(UnreachableError):
        NodeClient(nodes, PACE).ask_any(call)


def test_a_follower_that_lacks_a_stream_ends_nothing() -> None:
    """GIVEN a stream that was taken WHEN only a follower without it answers THEN it is stale, and nothing is void."""
    leader = ModelNode("one")
    leader.create("a")
    leader.say("a", 2)
    follower = leader.copied("two")
    pipe = pipeline([leader, follower])
    pipe.drain(ALL)
    leader.say("a", 1)
    late = leader.copied("two")
    leader.down = True
    late.view = _no_stream  # type: ignore[method-assign]
    again = pipeline([leader, late], pipe.source.plans)  # type: ignore[arg-type]
    again.log, again.ends = pipe.log, pipe.ends
    again.start()
    again.step(ALL)
    assert again.notes("a") == []
    assert set(again.source.plans.stale(0)) == {"a"}


def _no_stream(*_: object) -> None:
    raise NotFoundError("no stream a")


class Damaged(ModelNode):
    """Cannot answer about the streams in `damaged`, and is well otherwise; or it is away from then on (`dies`)."""

    damaged: frozenset[str] = frozenset()
    dies = False

    def view(self, stream: str, cookie: Cookie | None) -> Answer:
        self._require(stream)
        return super().view(stream, cookie)

    def page(self, stream: str, start: int, end: int) -> list[Block]:
        self._require(stream)
        return super().page(stream, start, end)

    def _require(self, stream: str) -> None:
        if stream in self.damaged:
            self.down = self.dies
            raise BusyError("500 failed")


def _three(**more: Any) -> Damaged:
    node = Damaged("one")
    for stream in ("before", "damaged", "later"):
        node.create(stream, **more)
        node.say(stream, 3)
    node.damaged = frozenset({"damaged"})
    return node


@pytest.mark.parametrize("members", [(), ("bot",)], ids=["every stream", "streams of bots"])
def test_a_stream_that_its_node_cannot_answer_holds_up_no_other(members: tuple[str, ...]) -> None:
    """GIVEN a node that fails at one stream and is well otherwise WHEN read THEN that stream is stale, and the streams
    listed after it are taken; once it is mended the stream is."""
    node, plans = _three(members=members), MemoryPlans()
    more = {"choice": BotStreams(Some())} if members else {}
    pipe = pipeline([node], plans, **more)
    pipe.step(ALL)
    assert pipe.ids("later") == node.hashes("later")
    assert set(plans.stale(0)) == {"damaged"}
    node.damaged = frozenset()
    pipe.drain(ALL)
    assert pipe.ids("damaged") == node.hashes("damaged")
    assert plans.gaps == {}


def test_a_stream_that_its_node_cannot_answer_is_asked_of_another() -> None:
    """GIVEN a copy of such a node THEN the copy gives the stream, and nothing is stale."""
    node, plans = _three(), MemoryPlans()
    copied = node.copied("two")
    copied.damaged = frozenset()  # type: ignore[attr-defined]
    pipe = pipeline([node, copied], plans)
    pipe.step(ALL)
    assert pipe.ids("damaged") == node.hashes("damaged")
    assert plans.gaps == {}


def test_a_copy_that_knows_of_no_bot_does_not_hide_the_join_that_its_node_cannot_tell() -> None:
    """GIVEN a bot that joined after the copy was made WHEN the node cannot answer about its stream THEN that is stale,
    and taken when the node can."""
    node, plans = _three(), MemoryPlans()
    copied = node.copied("two")
    copied.damaged = frozenset()  # type: ignore[attr-defined]
    node.join("damaged", "bot")
    pipe = pipeline([node, copied], plans, choice=BotStreams(Some()))
    assert not pipe.step(ALL)
    assert set(plans.gaps) == {"damaged"}
    node.damaged = frozenset()
    pipe.drain(ALL)
    assert pipe.ids("damaged") == node.hashes("damaged")
    assert plans.gaps == {}


@pytest.mark.parametrize("dies", [True, False], ids=["away", "refuses many"])
def test_a_node_that_is_not_well_makes_no_stream_stale(dies: bool) -> None:
    """GIVEN a node that is away, and one that refuses every stream THEN the look fails: the node is at fault, and not
    each of its streams."""
    node, plans = _three(), MemoryPlans()
    for n in range(100):
        node.create(f"s{n}")
    node.damaged, node.dies = frozenset(node.streams), dies
    pipe = pipeline([node], plans)
    with pytest.raises(BusyError):
        pipe.step(ALL)
    assert len(plans.gaps) <= (0 if dies else 20)


def test_a_node_with_another_history_ends_no_gap_that_another_node_can_fill() -> None:
    """GIVEN two nodes, the first with another history from somewhere in a gap of several pages on WHEN the gap is
    filled THEN with the blocks of the other node, and nobody is asked which history is right."""
    well = ModelNode("one", page_blocks=3)
    well.create("a")
    other = _sealed(well, 4).copied("two")
    blocks = _sealed(well, 8).streams["a"].blocks
    _sealed(other, 8)
    client = NodeClient([other, well], PACE)
    pages = list(client.between("a", (1, blocks[0].hash), (10, blocks[9].hash)))
    assert [block for page in pages for block in page] == blocks[1:10]


def _sealed(node: ModelNode, blocks: int) -> ModelNode:
    for _ in range(blocks):
        node.say("a")
        node.seal("a")
    return node
