"""D3: memberships after a person accepted another history of a stream: those of the history that is left."""

from __future__ import annotations

import pytest

from evermark.delivery.bots.membership import lesson, moves_of
from evermark.sources.base import Limit
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)
USERS = frozenset({"first", "shared", "rejected", "left", "stayed", "new", "pooled", "again", "gone"})


def _moved(node: ModelNode, member: str, *, leave: bool = False) -> None:
    node.join("a", member, leave=leave)
    node.seal("a")


@pytest.mark.parametrize("rows_max", [100, 2])
@pytest.mark.parametrize("snapshot_every", [3, 100])
def test_d3_after_an_accepted_fork_who_is_a_member_is_as_the_node_has_it(snapshot_every: int, rows_max: int) -> None:
    """GIVEN joins and leaves in a history that is rejected, in the other one, and in both WHEN it is accepted THEN what
    is learned from the log is what the node says, though what both have is logged once."""
    node = ModelNode(snapshot_every=snapshot_every)
    node.create("a", members=["first"])
    for member in ("shared", "left", "stayed", "gone"):
        _moved(node, member)
    kept, members = len(node.streams["a"].blocks), set(node.streams["a"].members)
    pipe = pipeline([node], MemoryPlans())
    _moved(node, "rejected")
    _moved(node, "stayed", leave=True)
    _moved(node, "gone", leave=True)
    _moved(node, "again")
    pipe.drain(ALL)
    it = node.streams["a"]
    gone, again = (block.events[-1] for block in it.blocks[-2:])
    it.blocks, it.members = it.blocks[:kept], members
    it.snapshot = max(block.number for block in it.blocks if block.snapshot is not None)
    _moved(node, "new")
    _moved(node, "left", leave=True)
    for _ in range(3):
        node.say("a")
        node.seal("a")
    node.add("a", gone)
    node.seal("a")
    node.join("a", "pooled")
    node.add("a", again)
    pipe.start()
    pipe.drain(ALL)
    pipe.source.accept_fork("a")
    pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))

    rows = [{**row, "batch": 1} for row in pipe.rows("a")]
    moves = list(moves_of(sorted(rows, key=lambda row: str(row["position"])), USERS, lambda _: ()))
    learned = {user: lesson(user, 0, 1, {}, moves).stays.get("a", ()) for user in USERS}
    found = {user for user, stays in learned.items() if stays and stays[-1].end is None}
    assert found == {"first", "shared", "stayed", "new", "pooled", "again"}
