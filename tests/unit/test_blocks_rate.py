"""How often a node is asked for blocks: `requests_per_s` holds for each task that fetches, on a clock of the test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from evermark.sources.base import Limit
from evermark.sources.blocks.nodes import client
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.testing.simulator.blocks.node import ModelNode
from evermark.testing.simulator.blocks.pipeline import PACE, pipeline

ALL = Limit(wait_s=0.0)
TEN_A_SECOND = replace(PACE, requests_per_s=10.0)


@dataclass
class Clock:
    """Stands in for the `time` module: only sleeping takes time."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, wait_s: float) -> None:
        self.now += wait_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client, "time", made)
    return made


def _sealed(node: ModelNode, stream: str, blocks: int) -> None:
    for _ in range(blocks):
        node.say(stream)
        node.seal(stream)


def test_b9_a_gap_is_fetched_no_faster_than_requests_per_s(clock: Clock) -> None:
    """GIVEN a stream that went on without us WHEN its gap is fetched page by page THEN with the pauses asked for."""
    node = ModelNode(page_blocks=2)
    node.create("a")
    _sealed(node, "a", 3)
    pipe = pipeline([node], pace=TEN_A_SECOND)
    pipe.drain(ALL)
    _sealed(node, "a", 60)
    before, begun = len(node.pages), clock.now
    pipe.drain(ALL)
    requests = len(node.pages) - before
    assert requests >= 25
    assert clock.now - begun == pytest.approx(requests / 10, abs=0.11)
    assert pipe.ids("a") == node.hashes("a")


def test_b9_the_limit_is_of_each_task_and_not_of_the_node(clock: Clock) -> None:
    """GIVEN two tasks that ask one node WHEN each is at its limit THEN the node gets twice that (docs/blocks.md)."""
    node = ModelNode()
    node.create("a")
    _sealed(node, "a", 11)
    tasks = [NodeClient([node], TEN_A_SECOND) for _ in range(2)]
    for number in range(11):
        for task in tasks:
            task.block("a", number)
    assert clock.now == pytest.approx(1.0)
