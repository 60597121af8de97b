"""What an owner that comes late, a log that was set back, or an older tick may change of what others know: nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evermark.errors import GapError, IdentityError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Cookie
from evermark.sources.blocks.decide.resume import StreamState, witnessed
from evermark.sources.blocks.decide.ticks import Item, Move, Position, Tick, path, way_to
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import Pipeline, pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)


def _node(blocks: int = 6, **how: int) -> ModelNode:
    node = ModelNode(**({"snapshot_every": 4, "resume_blocks": 0} | how))
    node.create("a")
    _grow(node, blocks)
    return node


def _grow(node: ModelNode, blocks: int = 1, stream: str = "a") -> None:
    for _ in range(blocks):
        node.say(stream)
        node.seal(stream)


def _set_back(pipe: Pipeline, end: str) -> None:
    pipe.log[0] = [row for row in pipe.log[0] if row["position"] < end]
    pipe.ends[0] = end


def test_the_way_to_a_boundary_begins_at_its_root_or_at_what_was_confirmed() -> None:
    """GIVEN a root behind what was confirmed THEN only ticks that follow it go by it."""
    root, after, other = Tick(5, 5, 0), Tick(5, 11, 0), Tick(8, 10, 0)
    ticks = [root, after, other]
    assert way_to(ticks, 8, 5) == [root]
    assert way_to(ticks, 8, 11) == [root, after]
    assert way_to(ticks, 8, 10) == [other]
    assert way_to(ticks, 8, 8) == []
    for nowhere in (4, 12):
        with pytest.raises(GapError):
            way_to(ticks, 8, nowhere)
    with pytest.raises(GapError):
        path(ticks, 4, 5)  # what ended there once is gone


def test_an_owner_that_begins_late_takes_nothing_from_its_successor() -> None:
    """GIVEN an owner that was paused before `begin` WHEN its successor has gone on THEN what is known stays known."""
    node = _node()
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    late, then = pipe._make(), dict(pipe.ends)
    _grow(node, 3)
    pipe.drain(ALL)
    node.say("a")
    planned = pipe.source.latest(pipe.ends, ALL)
    before, state = dict(plans.streams), plans.state(0)

    late.check(then)
    late.begin(0, then[0])
    found = late.latest(then, ALL)
    assert late.may_repeat_from(0, then[0]) == str(Position(0))
    assert [row for piece in late.slices(0, then[0], found[0]) for row in late.read(piece)]

    assert (plans.streams, plans.anew) == (before, set())
    assert replace(plans.state(0), last_tick=0) == replace(state, last_tick=0)
    assert list(pipe.source.slices(0, pipe.ends[0], planned[0]))
    node.rewrite("a", 4)
    pipe.drain(ALL)
    assert plans.stale(0)["a"].fork


@pytest.mark.parametrize("rows_max", [1, 3, 1000])
def test_a_log_that_was_set_back_gets_what_it_lacks_and_nothing_twice(rows_max: int) -> None:
    """GIVEN State that knows more than the log THEN all is compared with the log, and from then on as ever."""
    node = _node()
    node.create("b")
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    end = pipe.ends[0]
    for _ in range(3):
        for stream in ("a", "b"):
            _grow(node, 3, stream)
            node.say(stream, 2)
        pipe.drain(ALL)
    _set_back(pipe, end)
    pipe.start()
    pipe.drain(Limit(rows_max=rows_max, wait_s=0.0))
    for stream in ("a", "b"):
        assert pipe.ids(stream) == node.hashes(stream)
    assert plans.anew == set()
    assert not any(tick.root for tick in plans.ticks(0))
    _grow(node, 2)
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")


@pytest.mark.parametrize("lost", ["log", "plan"])
@pytest.mark.parametrize("snapshot_every", [2, 100])
def test_a_fork_from_before_everything_is_taken_anew_is_noticed(lost: str, snapshot_every: int) -> None:
    """GIVEN a history that was rewritten WHEN the log was set back, or State is older than it THEN it is a fork."""
    node = _node(8, snapshot_every=snapshot_every)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.step(Limit(rows_max=2, wait_s=0.0))
    end = pipe.ends[0]
    pipe.drain(ALL)
    if lost == "log":
        _set_back(pipe, end)
    else:
        pipe.ends[0] = str(Position(99))
    old = pipe.ids("a")
    node.rewrite("a", 5)
    _grow(node, 3)
    for _ in range(2):
        pipe.start()
        pipe.drain(ALL)
    assert pipe.ids("a") == old
    assert plans.stale(0)["a"].fork
    pipe.source.accept_fork("a")
    pipe.drain(Limit(rows_max=2, wait_s=0.0))
    assert sorted(pipe.ids("a")) == sorted({*old, *node.hashes("a")})
    assert plans.stale(0) == {}


def test_a_copy_that_has_less_than_was_once_taken_is_no_witness() -> None:
    """GIVEN a stream that is taken anew WHEN only a copy answers that has less of it THEN the stream waits."""
    node = _node(6)
    copied = node.copied("two")
    _grow(node, 3)
    pipe = pipeline([node, copied])
    pipe.step(Limit(rows_max=2, wait_s=0.0))
    end = pipe.ends[0]
    pipe.drain(ALL)
    _set_back(pipe, end)
    taken = pipe.ids("a")
    node.rewrite("a", 8)
    node.down = True
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == taken
    node.down = False
    pipe.start()
    pipe.drain(ALL)
    assert pipe.source.plans.stale(0)["a"].fork


def test_what_a_witness_says_of_an_answer() -> None:
    """The same chain, another one, one that has to be asked for, one that is not the same stream."""
    node = _node(9, snapshot_every=4)
    answer, it = node.view("a", None), node.streams["a"]
    assert answer.snapshot == 8
    same = StreamState(0, it.blocks[8].cookie, it.incarnation)
    assert witnessed(same, answer, may_lack=False) is None
    older = replace(same, cookie=it.blocks[3].cookie)
    assert witnessed(older, answer, may_lack=False) == older.cookie
    for gen in (8, 9, 10):
        other = replace(same, cookie=Cookie(gen, "f" * 64))
        with pytest.raises(IdentityError):
            witnessed(other, answer, may_lack=False)
        assert witnessed(replace(other, incarnation="another"), answer, may_lack=False) is None
    ahead = replace(same, cookie=Cookie(11, "f" * 64))
    assert witnessed(ahead, answer, may_lack=False) is None
    with pytest.raises(GapError):
        witnessed(ahead, answer, may_lack=True)


def test_a_mark_outlives_ticks_that_were_made_before_it() -> None:
    """GIVEN a batch that is logged and not confirmed WHEN its stream becomes stale THEN confirming it is no cure."""
    node = _node(3)
    node.create("b")
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.step(ALL, "unconfirmed")
    _grow(node)
    node.say("b")
    node.lies.add(("a", 4))
    pipe.step(ALL)
    assert list(plans.gaps) == ["a"]
    node.lies.clear()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert plans.gaps == {}


def test_nobody_takes_away_a_mark_that_was_made_meanwhile() -> None:
    """GIVEN a look that found nothing wrong WHEN another owner marks the stream before that is said THEN it stays."""
    plans = MemoryPlans()
    plans.mark_stale(0, "a", 4, "a lie")
    seen = plans.stale(0)["a"]
    plans.mark_stale(0, "a", 4, "a lie")
    plans.unmark_stale("a", seen)
    assert list(plans.gaps) == ["a"]
    plans.unmark_stale("a", plans.stale(0)["a"])
    assert plans.gaps == {}


def test_a_block_that_is_not_made_yet_keeps_no_stream_stale() -> None:
    """GIVEN a stream marked where its next block will be WHEN its node is honest again THEN its minipool is taken."""
    node = _node(5, snapshot_every=4)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    said = node.say("a", 2)
    node.lies.add(("a", 4))
    pipe.start()
    pipe.drain(ALL)
    assert plans.stale(0)["a"].block == node.streams["a"].cookie.minipool_gen
    node.lies.clear()
    pipe.drain(ALL)
    assert pipe.ids("a")[-2:] == said
    assert plans.gaps == {}


def test_news_of_a_node_that_lies_is_not_passed_because_its_copy_has_none() -> None:
    """GIVEN a lie about a stream with news, and a copy without them THEN the stream is stale until it can be read."""
    node = _node(5, snapshot_every=100)
    copied = node.copied("two")
    plans = MemoryPlans()
    pipe = pipeline([node, copied], plans)
    pipe.drain(ALL)
    node.say("a", 2)
    node.lies.add(("a", 2))
    pipe.start()
    pipe.drain(ALL)
    assert list(plans.gaps) == ["a"]
    node.lies.clear()
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert plans.gaps == {}


def test_a_copy_that_has_less_is_no_cure_for_a_stream_its_leader_lied_about() -> None:
    """GIVEN a lie about a stream with news, passed in the listing WHEN a copy gives less THEN the rest is owed."""
    node = _node(0, snapshot_every=100)
    copied = node.copied("two")
    plans = MemoryPlans()
    _grow(node, 5)
    node.lies.add(("a", 2))
    copied.down = True
    pipe = pipeline([node, copied], plans)
    pipe.drain(ALL)
    assert list(plans.gaps) == ["a"]
    node.down, copied.down = True, False
    node.lies.clear()
    pipe.drain(ALL)
    node.down = False
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert plans.gaps == {}
    assert plans.unfinished(0) == []


@pytest.mark.parametrize("restarted", [True, False])
def test_a_persons_word_outlives_ticks_that_were_made_before_it(restarted: bool) -> None:
    """GIVEN a fork found behind a batch that is not confirmed WHEN it is accepted THEN it is taken all the same."""
    node = _node(5)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    _grow(node, 2)
    pipe.step(ALL, "unconfirmed")
    old = pipe.ids("a")
    node.rewrite("a", 4)
    pipe.drain(ALL)
    assert plans.stale(0)["a"].fork
    pipe.source.accept_fork("a")
    if restarted:
        pipe.start()
    pipe.drain(Limit(rows_max=2, wait_s=0.0))
    assert sorted(pipe.ids("a")) == sorted({*old, *node.hashes("a")})
    assert plans.stale(0) == {}


def test_a_number_is_given_out_once_whoever_begins_anew() -> None:
    """GIVEN plans WHEN reading begins anew at a tick that nobody knows THEN ticks made since have other numbers."""
    plans = MemoryPlans()
    plans.begin(0, 0)
    first = [plans.add(0, Tick(0, 0, 0), [Item("a", move=Move("channel", None))]) for _ in range(5)]
    plans.adopt(0, 2, 1)
    assert plans.add(0, Tick(2, 0, 0), []) > max(first)
