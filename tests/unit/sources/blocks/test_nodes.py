"""Several nodes, one of them unwell: what it cannot say is asked of the others."""

from __future__ import annotations

import pytest

from evermark.errors import DeniedError, EvermarkError, FormatError, NotFoundError, UnreachableError
from evermark.sources.base import Limit
from evermark.sources.blocks.nodes.client import Listing, NodeClient, NodeInfo
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, pipeline

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
