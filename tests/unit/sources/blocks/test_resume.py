"""For any history, downtime, snapshots and crash point: every event of a block stream is taken, and none twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import EvermarkError
from evermark.sources.base import Limit
from evermark.sources.blocks.target import Pace
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, Crash, Cut, Pipeline, pipeline
from simulator.blocks.plans import MemoryPlans

STREAMS = ("a", "b", "c")
CUT = replace(PACE, slice_s=0.0001, slices_max=4)  # a gap of two blocks is worth two tasks
ALL = Limit(wait_s=0.0)

streams = st.sampled_from(STREAMS)
cuts = st.sampled_from([None, None, "planned", "read", "logged", "confirmed", "unconfirmed", "unconfirmed"])
OPS = st.one_of(
    st.tuples(st.just("say"), streams, st.integers(1, 4)),
    st.tuples(st.just("seal"), streams),
    st.tuples(st.just("seal"), streams),
    st.tuples(st.just("grow"), streams, st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 12), cuts),
    st.tuples(st.just("step"), st.just(1000), cuts),
    st.tuples(st.just("restart")),
    st.tuples(st.just("refuse"), st.integers(1, 3)),
    st.tuples(st.just("lie"), streams, st.integers(0, 12)),
    st.tuples(st.just("honest")),
)


def _step(pipe: Pipeline, limit: Limit, cut: Cut | None) -> None:
    """A batch, cut off where asked; whatever happens, a new process takes over from there."""
    try:
        pipe.step(limit, cut)
    except (Crash, EvermarkError):
        pipe.start()


def _grow(node: ModelNode, stream: str, count: int) -> None:
    for _ in range(count):
        node.say(stream)
        node.seal(stream)


def _play(node: ModelNode, pipe: Pipeline, ops: list[tuple[object, ...]]) -> None:
    for name, *args in ops:
        match name, args:
            case "say", [str(stream), int(count)]:
                node.say(stream, count)
            case "seal", [str(stream)]:
                node.seal(stream)
            case "grow", [str(stream), int(count)]:
                _grow(node, stream, count)
            case "step", [int(rows), cut]:
                _step(pipe, Limit(rows_max=rows, wait_s=0.0), cut)  # type: ignore[arg-type]
            case "restart", []:
                pipe.start()
            case "refuse", [int(count)]:
                node.refusing = count
            case "lie", [str(stream), int(number)]:
                node.lies.add((stream, number))
            case "honest", []:
                node.lies.clear()


@given(
    st.lists(OPS, min_size=3, max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(1, 2),
    st.sampled_from([PACE, CUT]),
)
def test_whatever_happens_every_event_is_taken_once_and_in_order(
    ops: list[tuple[object, ...]],
    snapshot_every: int,
    page_blocks: int,
    resume_blocks: int,
    partitions: int,
    pace: Pace,
) -> None:
    """Events, sealing, snapshots, small batches, gaps in one slice or many, crashes between any two effects, nodes that
    refuse and lie."""
    node = ModelNode(snapshot_every=snapshot_every, page_blocks=page_blocks, resume_blocks=resume_blocks)
    for stream in STREAMS:
        node.create(stream)
    pipe = pipeline([node], partitions=partitions, pace=pace)
    _play(node, pipe, ops)
    node.lies.clear()
    node.refusing = 0
    pipe.drain(ALL)
    for stream in STREAMS:
        assert pipe.ids(stream) == node.hashes(stream)


@given(
    st.lists(
        st.one_of(OPS, st.tuples(st.just("recreate"), streams), st.tuples(st.just("delete"), streams)),
        min_size=3,
        max_size=30,
    )
)
def test_streams_that_are_deleted_and_recreated_are_taken_anew_and_nothing_twice(ops: list[tuple[object, ...]]) -> None:
    """What a stream holds in the end was taken, once, and in order; of what was deleted nothing came twice."""
    node = ModelNode()
    for stream in STREAMS:
        node.create(stream)
    pipe = pipeline([node])
    for op in ops:
        if op[0] == "recreate":
            node.delete(str(op[1]))
            node.create(str(op[1]))
        elif op[0] == "delete":
            node.delete(str(op[1]))
        elif len(op) < 2 or not isinstance(op[1], str) or not node.streams[op[1]].deleted:
            _play(node, pipe, [op])
    node.lies.clear()
    node.refusing = 0
    pipe.drain(ALL)
    for stream in STREAMS:
        taken = pipe.ids(stream)
        assert len(set(taken)) == len(taken)
        if not node.streams[stream].deleted:
            there = node.hashes(stream)
            assert [event for event in taken if event in set(there)] == there


@given(st.data())
def test_a_follower_that_is_behind_loses_and_doubles_nothing(data: st.DataObject) -> None:
    """The first node dies at any moment; a copy that may be older answers, until the first one is back."""
    node = ModelNode()
    for stream in STREAMS:
        node.create(stream)
    _grow(node, "a", 2)
    follower = node.copied("two")
    nodes = [node, follower]
    pipe = pipeline(nodes)
    for op in data.draw(st.lists(st.one_of(OPS, st.sampled_from([("down",), ("up",), ("copy",)])), max_size=30)):
        if op[0] in {"down", "up"}:
            node.down = op[0] == "down"
        elif op[0] == "copy" and not node.down:
            follower.streams = node.copied("two").streams
        elif not node.down or op[0] in {"step", "restart"}:
            _play(node, pipe, [op])
    node.down = False
    node.lies.clear()
    node.refusing = 0
    pipe.start()
    pipe.drain(ALL)
    for stream in STREAMS:
        assert pipe.ids(stream) == node.hashes(stream)


@given(st.lists(OPS, max_size=15), st.lists(OPS, max_size=15))
def test_a_lost_state_costs_comparisons_and_no_event(
    before: list[tuple[object, ...]], after: list[tuple[object, ...]]
) -> None:
    """With State gone and the log still there, everything is read again, and what the log has is dropped by id."""
    node = ModelNode()
    for stream in STREAMS:
        node.create(stream)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    _play(node, pipe, before)
    node.lies.clear()
    node.refusing = 0
    pipe.drain(ALL)
    plans.__init__()  # type: ignore[misc]
    pipe.start()
    _play(node, pipe, after)
    node.lies.clear()
    node.refusing = 0
    pipe.drain(ALL)
    for stream in STREAMS:
        assert pipe.ids(stream) == node.hashes(stream)


@given(st.integers(0, 9), st.integers(1, 9), st.data())
def test_a_node_restored_from_a_backup_gives_all_that_is_new_and_nothing_twice(
    kept: int, lost: int, data: st.DataObject
) -> None:
    """Wherever it was restored to, and whatever it made since: also what lies before its latest snapshot."""
    node = ModelNode(snapshot_every=data.draw(st.integers(1, 4)))
    node.create("a")
    _grow(node, "a", kept)
    backup = node.copied("one")
    backup.leader = None
    _grow(node, "a", lost)
    nodes = [node]
    pipe = pipeline(nodes)
    pipe.drain(ALL)
    lost_events = [event for block in node.streams["a"].blocks[kept + 1 :] for event in block.events]
    nodes[0] = backup
    backup._touched = node._touched
    for _ in range(data.draw(st.integers(0, lost - 1))):
        backup.add("a", lost_events.pop()) if data.draw(st.booleans()) else backup.say("a")
        backup.seal("a")
    pipe.start()
    backup.say("a")
    pipe.drain(Limit(rows_max=data.draw(st.integers(1, 9)), wait_s=0.0))
    _grow(backup, "a", data.draw(st.integers(0, 12)))
    pipe.drain(ALL)
    # B6: what the node lost is sent to it again when the stream is longer than it was before.
    for event in lost_events:
        backup.add("a", event)
        if data.draw(st.booleans()):
            backup.seal("a")
    pipe.drain(ALL)
    _grow(backup, "a", 1)
    pipe.drain(ALL)
    taken = pipe.ids("a")
    assert len(set(taken)) == len(taken)
    assert set(taken) == {*node.hashes("a"), *backup.hashes("a")}


def test_b16_a_very_old_state_is_resumed_over_hundreds_of_snapshots_in_small_batches() -> None:
    """GIVEN a state from the stream's first blocks WHEN it is read again after 300 snapshots, by a process that knows
    nothing else THEN the whole gap is taken once, in order, and no batch holds more blocks than it may."""
    node = ModelNode(snapshot_every=2, page_blocks=3, resume_blocks=1)
    node.create("a")
    node.create("b")
    _grow(node, "a", 1)
    pipe = pipeline([node], pace=replace(CUT, blocks_max=70))
    pipe.drain(ALL)
    _grow(node, "a", 600)
    node.say("b")
    pipe.start()
    sizes = []
    while pipe.step(ALL):
        sizes.append(sum(map(len, pipe.log.values())) - sum(sizes))
    assert len(sizes) >= 600 // 70
    assert all(size <= 75 for size in sizes[1:])
    assert pipe.ids("a") == node.hashes("a")
    assert pipe.ids("b") == node.hashes("b")
    assert pipe.dropped == 0


@pytest.mark.parametrize("cut", ["planned", "read", "logged", "confirmed"])
def test_a_crash_during_gap_recovery_finds_the_same_gap_again(cut: Cut) -> None:
    """B11: nothing of the gap is passed that was not logged, and nothing is logged twice."""
    node = ModelNode(snapshot_every=4)
    node.create("a")
    _grow(node, "a", 2)
    pipe = pipeline([node])
    pipe.drain(ALL)
    _grow(node, "a", 12)
    with pytest.raises(Crash):
        pipe.step(ALL, cut)
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
