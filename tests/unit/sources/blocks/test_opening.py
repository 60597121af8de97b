"""How a stream was when it was first taken stands in the log: no event tells who was there from the beginning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from evermark.sources.base import Limit
from evermark.sources.blocks.chain import StreamKind
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, Pipeline, pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)
FETCHED = replace(PACE, carried_bytes_max=4)  # blocks are too large to be carried along


def opened(pipe: Pipeline, stream: str) -> list[dict[str, Any]]:
    said = [json.loads(row["payload"]) for row in pipe.rows(stream) if row["op"] == "schema"]
    return [one for one in said if "creator" in one]


def room(blocks: int, **more: int) -> ModelNode:
    node = ModelNode(**more)
    node.create("a", StreamKind.DIRECT, ["ann", "bob"])
    grow(node, blocks)
    return node


def grow(node: ModelNode, blocks: int) -> None:
    for _ in range(blocks):
        node.say("a")
        node.seal("a")


@pytest.mark.parametrize("pace", [PACE, FETCHED], ids=["carried", "fetched"])
@pytest.mark.parametrize("blocks", [0, 2, 8], ids=["empty", "in the answer", "in a gap"])
def test_the_first_row_of_a_stream_says_who_was_there(blocks: int, pace: Any) -> None:
    """GIVEN members who never joined WHEN a stream is taken, however it comes THEN its first row names them, once."""
    node, plans = room(blocks), MemoryPlans()
    pipe = pipeline([node], plans, pace=pace)
    pipe.drain(ALL)
    (said,) = opened(pipe, "a")
    assert (said["kind"], said["members"]) == ("direct", ["ann", "bob"])
    assert pipe.rows("a")[0]["op"] == "schema"
    # WHEN it grows, and reading begins again THEN it is not said a second time
    grow(node, 9)
    pipe.start()
    pipe.drain(ALL)
    assert len(opened(pipe, "a")) == 1
    assert pipe.ids("a") == node.hashes("a")


@pytest.mark.parametrize("pace", [PACE, FETCHED], ids=["carried", "fetched"])
def test_one_that_is_taken_from_its_snapshot_on_says_who_was_there_then(pace: Any) -> None:
    """GIVEN a channel somebody joined and left WHEN it is taken from a snapshot THEN that one's members count."""
    node = ModelNode(snapshot_every=2)
    node.create("a", members=["ann"])
    for member, leave in (("bob", False), ("ann", True), ("cid", False)):
        node.join("a", member, leave=leave)
        node.seal("a")
    pipe = pipeline([node], whole=False, pace=pace)
    pipe.drain(ALL)
    (said,) = opened(pipe, "a")
    assert said["members"] == ["bob"]
    assert pipe.rows("a")[0]["op"] == "schema"


def test_whoever_left_and_came_back_unseen_is_told_by_another_opening() -> None:
    """GIVEN a stream forgotten after a leave WHEN the member is back before the next snapshot THEN it is told anew."""
    node, plans = ModelNode(snapshot_every=1), MemoryPlans()
    node.create("a", members=["ann", "bob"])
    grow(node, 1)
    pipe = pipeline([node], plans, whole=False)
    pipe.drain(ALL)
    plans.forget(0, 0.0, lambda _stream, _kind: False, 10**18)
    for leave in (True, False):
        node.join("a", "bob", leave=leave)
        node.seal("a")
    pipe.start()
    pipe.drain(ALL)
    assert [one["members"] for one in opened(pipe, "a")] == [["ann", "bob"], ["ann", "bob"]]


def test_a_recreated_stream_says_anew_who_is_there() -> None:
    """GIVEN a stream that was deleted and made again, with the same members THEN both are told, in this order."""
    node = room(3)
    pipe = pipeline([node])
    pipe.drain(ALL)
    node.create("a", StreamKind.DIRECT, ["ann", "bob"])
    grow(node, 2)
    pipe.drain(ALL)
    assert [row["op"] for row in pipe.rows("a") if row["op"] != "message"] == ["schema", "truncate", "schema", "schema"]
    assert len({one["incarnation"] for one in opened(pipe, "a")}) == 2


def test_a_state_that_was_lost_doubles_no_opening() -> None:
    """GIVEN a log and no State WHEN everything is taken again and compared THEN it is there once."""
    node = room(5)
    pipe = pipeline([node])
    pipe.drain(ALL)
    kept = pipeline([node], MemoryPlans())
    kept.log, kept.ends = pipe.log, pipe.ends
    kept.start()
    kept.drain(ALL)
    assert len(opened(kept, "a")) == 1
    assert kept.ids("a") == node.hashes("a")
