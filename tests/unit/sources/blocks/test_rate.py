"""How often a node is asked for blocks, and into how many tasks a gap is cut; on a clock of the test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from evermark.sources.base import Limit
from evermark.sources.blocks.decide.ticks import cut_evenly, partition_of
from evermark.sources.blocks.nodes import client
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import Pace
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, pipeline, place
from simulator.blocks.plans import MemoryPlans

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


@pytest.mark.parametrize("partitions", [1, 2])
def test_b9_all_tasks_of_a_batch_together_keep_to_requests_per_s(clock: Clock, partitions: int) -> None:
    """GIVEN a gap that several tasks fetch WHEN they run at the same time THEN the node is not asked more often, even
    if every other partition has as many tasks."""
    node, plans = ModelNode(page_blocks=2), MemoryPlans()
    node.create("a")
    _sealed(node, "a", 3)
    pace = replace(TEN_A_SECOND, slice_s=0.0005, slices_max=4)
    pipe = pipeline([node], plans, pace=pace, partitions=partitions)
    pipe.drain(ALL)
    _sealed(node, "a", 60)
    partition = partition_of("a", partitions)
    start = pipe.ends[partition]
    end = pipe.source.latest({partition: start}, ALL)[partition]
    pieces = pipe.source.slices(partition, start, end)
    rates, ids = [], []
    for piece in pieces:
        task = BlockStreams(
            place(pace=pace, partitions=partitions), lambda _: plans, lambda _: NodeClient([node], pace)
        )
        before, begun = len(node.pages), clock.now
        ids += [row["event_id"] for batch in task.read(piece) for row in batch.to_pylist()]
        if clock.now > begun:
            rates.append((len(node.pages) - before - 1) / (clock.now - begun))
    assert len(rates) == 4
    assert sum(rates) == pytest.approx(10 / partitions)
    assert ids == node.hashes("a")[3:]


@pytest.mark.parametrize(
    ("page_blocks", "answer_s", "blocks", "tasks"),
    [
        (20, 0.02, 20_000, 16),  # 1000 answers of 20 ms: waiting, which tasks share
        (500, 0.02, 20_000, 10),  # 40 answers: 200 000 events to decode
        (500, 0.02, 6_000, 3),
        (500, 0.02, 2_000, 1),  # a second: not worth a second task
        (20, 1.0, 200, 10),  # few blocks of a slow node
    ],
)
def test_b9_a_gap_is_cut_by_what_it_costs(page_blocks: int, answer_s: float, blocks: int, tasks: int) -> None:
    """GIVEN a node's pages and answers WHEN a gap is planned THEN into tasks of about a second, each of whole pages."""
    node = ModelNode(page_blocks=page_blocks)
    node.answer_s = answer_s
    pace = Pace()
    cost_s = NodeClient([node], pace).fetch_s(blocks, blocks * 10)
    cuts = cut_evenly(7, 7 + blocks, max(1, min(pace.slices_max, int(cost_s / pace.slice_s))), page_blocks)
    sizes = [after - before for before, after in pairwise(cuts)]
    assert sum(sizes) == blocks
    assert len(sizes) == tasks
    assert all(size % page_blocks == 0 for size in sizes[:-1])
